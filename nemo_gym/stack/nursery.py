"""The nursery: a small warm process from which server processes are forked.

``ng_run`` starts the nursery first. While the configuration is composed, the nursery imports the modules that every
server needs and freezes them, so that a server starts in a fraction of a second and shares that memory. The nursery is
single-threaded, holds no secret, and inherits no secret environment variable. It also guards against orphans: when its
parent ends for any reason, it stops every server, and servers die when it dies.

Parent and nursery exchange datagrams on a socket: JSON with file descriptors attached. Requests: ``fork``. Events:
``warm``, ``broken``, ``forked``, ``exited``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

PRELOAD = (
    "orjson",
    "omegaconf",
    "structlog",
    "aiohttp",
    "fastapi",
    "uvicorn",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
    "openai.types.responses",
    "openai.types.chat",
    "nemo_gym.global_config",
    "nemo_gym.openai_utils",
    "nemo_gym.server_utils",
    "nemo_gym.environment.server",
    "nemo_gym.agent.server",
    "nemo_gym.gateway.model_server",
    "nemo_gym.stack.child",
)
MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 8
ORPHAN_GRACE_S = 10.0
"""How long servers may take to stop after the parent is gone, before they are killed."""

_CODE = "import sys; from nemo_gym.stack.nursery import main; main(int(sys.argv[1]))"


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one datagram. Raises `OSError` if the other side is gone."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    socket.send_fds(channel, [data], list(fds))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one datagram with its descriptors; return ``None`` if the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_FDS)
    except ConnectionError:
        return None
    return (json.loads(data), fds) if data else None


def spawn(environment: dict[str, str]) -> tuple[int, socket.socket]:
    """Start a nursery in a new session, so that a terminal's Ctrl-C does not reach it. Return its pid and channel."""
    parent_end, nursery_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.set_inheritable(nursery_end.fileno(), True)
    argv = [sys.executable, "-P", "-c", _CODE, str(nursery_end.fileno())]
    pid = os.posix_spawn(
        sys.executable,
        argv,
        environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
        setsid=True,
        # If the parent was started with ignored signals (nohup, background jobs), the nursery must not inherit that.
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD],
    )
    nursery_end.close()
    return pid, parent_end


def main(channel_fd: int) -> NoReturn:
    """Run the nursery process."""
    channel = socket.socket(fileno=channel_fd)
    os.set_inheritable(channel_fd, False)
    # Imports create little garbage, and collecting during them takes much of the start-up: collect once at the end.
    gc.disable()
    try:
        for module in PRELOAD:
            importlib.import_module(module)
    except Exception as error:  # report whatever an import raises, or the parent would wait for ever
        send(channel, {"event": "broken", "error": f"{type(error).__name__}: {error}"})
        raise
    gc.collect()
    gc.freeze()
    gc.enable()
    with contextlib.suppress(OSError):  # the parent is gone; `serve` has stopped the servers
        send(channel, {"event": "warm"})
        _Nursery(channel).serve()
    os._exit(0)


class _Nursery:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.children: dict[int, int] = {}
        """Pid → the number by which the parent identifies the server."""
        self.wake_read, self.wake_write = socket.socketpair()
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.channel, selectors.EVENT_READ)
        selector.register(self.wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self.wake_read:
                    self._drain_wakeups()
                    for pid, number, code in self._ended():
                        send(self.channel, {"event": "exited", "id": number, "pid": pid, "code": code})
                else:
                    request = receive(self.channel)
                    if request is None:
                        self._stop_all()
                        return
                    self._fork(*request)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.wake_read.recv(4096):
                pass

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        request["parent_pid"] = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_server(request, fds)
        for fd in fds:
            os.close(fd)
        # The child sets its group too, because either process may run first, and a kill must reach the whole group.
        _set_group(pid)
        self.children[pid] = request["id"]
        send(self.channel, {"event": "forked", "id": request["id"], "pid": pid})

    def _become_server(self, request: dict[str, Any], fds: list[int]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.channel.close()
        self.wake_read.close()
        self.wake_write.close()
        _set_group(0)
        from nemo_gym.stack import child

        child.start(request, fds)

    def _ended(self) -> Iterator[tuple[int, int, int]]:
        """Reap the servers that have ended: pid, number and exit code of each."""
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self.children.pop(pid, None)
            if number is not None:
                _kill_group(pid)  # kill any processes that the dead server left behind
                yield pid, number, os.waitstatus_to_exitcode(status)

    def _stop_all(self) -> None:
        """Stop every server, now that the parent is gone; kill those that do not end within `ORPHAN_GRACE_S`."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while self.children and time.monotonic() < deadline:
            if not any(self._ended()):
                time.sleep(0.02)
        for pid in self.children:
            _kill_group(pid)


def _set_group(pid: int) -> None:
    with contextlib.suppress(OSError):  # the process already leads its own group, or has ended
        os.setpgid(pid, pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
