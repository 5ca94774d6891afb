"""Starts the servers of a composition, restarts those that crash, and stops them in order.

The supervisor runs in ``ng_run``. It gets every socket already bound, passes each server its launch data on a
descriptor, and learns from the nursery when a server ends. A crashed server is started again on the same socket after
a pause that doubles each time. A server that crashes too often, or fails before it was ever ready, ends the stack.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym._util.files import COMMAND_DIRECTORY_VARIABLE
from nemo_gym._util.secrets import scrub, secret_values
from nemo_gym._util.tasks import BackgroundTasks, Backoff, pause_after
from nemo_gym.config.composition import Composition
from nemo_gym.config.files import EXTRA_ROOTS_VARIABLE
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.keys import AGENT_TYPE, ENVIRONMENT_TYPE, MODEL_TYPE, OBSERVABILITY
from nemo_gym.config.launch import ServerLaunch, write_launch
from nemo_gym.config.plugin_keys import entrypoint
from nemo_gym.config.servers import ServerBlock
from nemo_gym.config.visibility import Address, call_targets, endpoints, pipeline_view, server_view
from nemo_gym.contract.credentials import Role, StackKeys
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.stack import nursery
from nemo_gym.stack.endpoints import (
    ServerEntry,
    StackEntry,
    http_answer,
    start_ticks,
    why_not_ready,
    write_scraping,
    write_stack,
)
from nemo_gym.stack.ports import Listener, close_listeners

STARTUP_TIMEOUT_S = 120.0
SHUTDOWN_TIMEOUT_S = 30.0
MAX_RESTARTS = 5


class Settings:
    """The supervisor's timeouts and restart limit, from the configuration keys of the same names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        def read(key: str, default: Any) -> Any:
            return default if values.get(key) is None else values[key]

        self.startup_timeout_s: float = read("startup_timeout_s", STARTUP_TIMEOUT_S)
        self.shutdown_timeout_s: float = read("shutdown_timeout_s", SHUTDOWN_TIMEOUT_S)
        self.max_restarts: int = read("max_restarts", MAX_RESTARTS)


@dataclass
class Server:
    """One server process and its restarts."""

    number: int
    block: ServerBlock
    listener: Listener
    app: Path
    python: str | None
    log: Path
    pid: int | None = None
    restarts: int = 0
    """Restarts since the stack was started."""
    crashes: int = 0
    """Crashes since it was last ready for more than `HEALTHY_AFTER_S`."""
    ready_at: float | None = None
    error: str | None = None
    """The error that the server reported while it started."""
    not_ready: str | None = None
    """Why the last ``/ready`` response was not 200; ``None`` if it was, or if there was no response."""
    is_permanent: bool = False
    """Whether ``error`` is a configuration error, which a restart cannot fix."""
    was_ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the server has no running process."""

    @property
    def instance(self) -> str:
        return self.block.instance

    @property
    def name(self) -> str:
        """The instance, plus the number of a replica that is not the first."""
        return self.listener.name


ROLES = {AGENT_TYPE: Role.AGENT, ENVIRONMENT_TYPE: Role.ENVIRONMENT, MODEL_TYPE: Role.MODEL}
STOP_ORDER = (AGENT_TYPE, ENVIRONMENT_TYPE, MODEL_TYPE)
"""Agents first: they close boxes and sessions through the others."""

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 15.0
HEALTHY_AFTER_S = 60.0
"""If a server was ready for this long before a crash, its earlier crashes no longer count."""
TAIL_LINES = 20
FIRST_WORD_AFTER_S, NEXT_WORD_AFTER_S = 3.0, 30.0
"""Seconds until the first message about a server that is not ready, and between further messages."""


class Supervisor:
    """Owns the servers of one stack. Use within one event loop: `start`, `wait_ready`, then `failure`, then `stop`."""

    def __init__(
        self,
        composition: Composition,
        listeners: Mapping[str, Listener],
        interpreters: Mapping[str, str | None],
        *,
        run_id: str,
        run_dir: Path,
        keys: StackKeys,
        hosts: Hosts | None = None,
        nursery_process: tuple[int, socket.socket],
        say: Callable[[str], None],
    ) -> None:
        self.composition = composition
        self.run_id, self.run_dir, self.keys = run_id, run_dir, keys
        self.settings = Settings(composition.values)
        self._say = say
        self._nursery_pid, self._channel = nursery_process
        self._secrets = secret_values(composition.values) | {keys.to_hex()}
        self._hosts = hosts
        self._replicas = hosts.replicas if hosts is not None else _replicas(listeners.values())
        self._addresses: dict[str, Address] = {name: places[0] for name, places in self._replicas.items()}
        if hosts is not None:
            self._addresses |= {name: listener.address for name, listener in listeners.items()}
        self._stopping = False
        self._tasks = BackgroundTasks(self._broken)
        self.failure: asyncio.Future[ServerError | ConfigError] = asyncio.get_running_loop().create_future()
        """Resolves with an error when the stack cannot go on."""
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.servers = {
            listener.name: Server(
                number=number,
                block=(block := composition.servers[listener.instance]),
                listener=listener,
                app=entrypoint(block, composition.roots),
                python=interpreters.get(block.instance),
                log=logs / f"{listener.name}.log",
            )
            for number, listener in enumerate(_in_order(composition, listeners.values()))
        }
        self._by_number = {server.number: server for server in self.servers.values()}

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Request a process for every server, without waiting; see `wait_ready`."""
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._on_events)
        for server in self.servers.values():
            server.ended.set()
            self._launch(server)

    async def wait_ready(self) -> None:
        """Wait until ``/ready`` of every server returns 200. Raises the error of `failure`, or `ServerError` naming
        the servers that were not ready in time."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(self._all_ready())
        either: set[asyncio.Future[Any]] = {waiting, self.failure}
        try:
            done, _ = await asyncio.wait(
                either, timeout=self.settings.startup_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if waiting in done:
            self.write_stack()
            return
        if self.failure in done:
            raise self.failure.result()
        unready = [server for server in self.servers.values() if not server.was_ready.is_set()]
        raise ServerError(
            f"not ready after {self.settings.startup_timeout_s:g} s: {', '.join(map(_describe_unready, unready))};"
            f" see {unready[0].log}, or give them longer with startup_timeout_s={self.tail(unready[0])}"
        )

    async def _all_ready(self) -> None:
        for server in self.servers.values():
            await server.was_ready.wait()

    def _launch(self, server: Server) -> None:
        instance, block = server.instance, server.block
        targets = call_targets(self.composition, instance)
        addresses = {**self._addresses, instance: server.listener.address}
        launch = ServerLaunch(
            instance=instance,
            config=server_view(self.composition, instance, addresses, self._replicas),
            credentials=self.keys.for_server(instance, ROLES[block.server_type], targets),
            run_id=self.run_id,
            metrics_token=self.keys.metrics_token,
            state_dir=str(self._state_dir(server.name)),
            endpoints=endpoints(self.composition, instance, addresses, self._replicas),
            **self._external_access(server),
        )
        ready_read, ready_write = os.pipe()
        launch_fd = write_launch(launch)
        log_fd = os.open(server.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        fds = [launch_fd, server.listener.socket.fileno(), ready_write, log_fd]
        request = {
            "op": "fork",
            "id": server.number,
            "app": str(server.app),
            "roots": [str(root) for root in self.composition.roots],
            "python": server.python,
            "environment": self._environment(),
        }
        server.ready_at, server.error = None, None
        server.ended.clear()
        try:
            nursery.send(self._channel, request, fds)
        except OSError as error:
            os.close(ready_read)
            self._fail(ServerError(f"the process that forks servers is gone: {error}"))
            return
        finally:
            for fd in (launch_fd, ready_write, log_fd):
                os.close(fd)
        self._tasks.start(self._watch_start(server, ready_read))

    def _external_access(self, server: Server) -> dict[str, Any]:
        """Return the launch fields for a server that other hosts reach: its URL and TLS files."""
        if self._hosts is None:
            return {}
        tls = self._hosts.tls
        files = {"certificate_file": str(tls.certificate_file), "key_file": str(tls.key_file)} if tls else {}
        return {"url": server.listener.address.url, **files}

    def _state_dir(self, name: str) -> Path:
        folder = self.run_dir / "state" / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _environment(self) -> dict[str, str]:
        """Return the variables that a server sets in its own process, so that they stay out of the initial environment
        block, which other users may read: the variables that the configuration passes on by name (``pass_env:
        [HF_TOKEN]``), the plugin roots, and the user's working directory (a server's own is its plugin's folder)."""
        names = self.composition.values.get("pass_env") or []
        passed = {str(name): os.environ[str(name)] for name in names if str(name) in os.environ}
        return {
            **passed,
            EXTRA_ROOTS_VARIABLE: os.pathsep.join(map(str, self.composition.roots)),
            COMMAND_DIRECTORY_VARIABLE: str(Path.cwd()),
        }

    async def _watch_start(self, server: Server, ready_fd: int) -> None:
        """Read one line from the ready pipe: ``ready``, ``error {…}``, or nothing if the process dies."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready_fd, "rb", buffering=0)
        )
        try:
            line = (await reader.readline()).decode(errors="replace").strip()
        finally:
            transport.close()
        if line.startswith("error "):
            report = json.loads(line.removeprefix("error "))
            server.error = scrub(report["message"], self._secrets)
            server.is_permanent = report["code"] == ConfigError.code
        elif line == "ready":
            await self._until_ready(server)

    async def _until_ready(self, server: Server) -> None:
        backoff = Backoff(first_s=0.01, longest_s=1.0)
        loop = asyncio.get_running_loop()
        tell_at = loop.time() + FIRST_WORD_AFTER_S
        while not server.ended.is_set() and not self._stopping:
            response = await http_answer(server.listener.address.url, "/ready", timeout_s=5.0)
            server.not_ready = why_not_ready(response)
            if response is not None and response[0] == ConfigError.status:
                problem = f"server '{server.name}': {scrub(str(server.not_ready), self._secrets)}; see {server.log}"
                self._fail(ConfigError(problem, instance=server.instance))
                return
            if loop.time() > tell_at and server.not_ready is not None:
                self._say(f"waiting for server '{server.name}': {server.not_ready}")
                tell_at = loop.time() + NEXT_WORD_AFTER_S
            if response is not None and response[0] == 200:
                server.ready_at = asyncio.get_running_loop().time()
                server.was_ready.set()
                if server.restarts:
                    self._say(f"server '{server.name}' is ready again (pid {server.pid})")
                    try:
                        self.write_stack()
                    except OSError as error:  # the server runs all the same
                        self._say(f"the stack file still shows its old pid: {error}")
                return
            await backoff.again()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _on_events(self) -> None:
        while True:
            try:
                received = nursery.receive(self._channel)
            except BlockingIOError:
                return
            if received is None:
                asyncio.get_running_loop().remove_reader(self._channel)
                for server in self.servers.values():
                    server.ended.set()
                self._fail(ServerError("the process that forks servers has ended, and the servers with it"))
                return
            self._on_event(received[0])

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "broken":
            self._fail(ServerError(f"the server processes cannot import what they need: {event['error']}"))
        elif event["event"] == "forked":
            server = self._by_number[event["id"]]
            server.pid = event["pid"]
            if self._stopping:
                self._signal(server, signal.SIGTERM)
        elif event["event"] == "exited":
            server = self._by_number[event["id"]]
            server.pid = None
            server.ended.set()
            if not self._stopping:
                self._tasks.start(self._after_exit(server, event["code"]))

    async def _after_exit(self, server: Server, code: int) -> None:
        # The last line of the ready pipe may not have been read yet.
        await asyncio.sleep(0.02)
        status = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f": {server.error}" if server.error else ""
        if code == 0 and not reason and not server.was_ready.is_set():
            reason = ": its entrypoint ended without serving; it must call run_webserver() of the server's class"
        summary = f"server '{server.name}' ended with {status}{reason}"
        if not server.was_ready.is_set() or server.is_permanent:
            problem = ConfigError if server.is_permanent else ServerError
            log_tail = "" if server.is_permanent else self.tail(server)
            self._fail(problem(f"{summary}; see {server.log}{log_tail}", instance=server.instance))
            return
        now = asyncio.get_running_loop().time()
        if server.ready_at is not None and now - server.ready_at > HEALTHY_AFTER_S:
            server.crashes = 0
        server.crashes += 1
        if server.crashes > self.settings.max_restarts:
            self._fail(
                ServerError(
                    f"{summary}, after {self.settings.max_restarts} restarts (max_restarts=); see {server.log}"
                    f"{self.tail(server)}",
                    instance=server.instance,
                )
            )
            return
        pause_s = pause_after(server.crashes, first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S)
        self._say(
            f"{summary}; restart {server.crashes} of {self.settings.max_restarts} in {pause_s:g} s{self.tail(server)}"
        )
        await asyncio.sleep(pause_s)
        if self._stopping:
            return
        server.restarts += 1
        self._launch(server)

    def tail(self, server: Server) -> str:
        """Return the last lines of a server's log, each after a line break, with secrets replaced."""
        try:
            with server.log.open("rb") as stream:
                stream.seek(max(0, server.log.stat().st_size - 16 * 1024))
                text = stream.read().decode(errors="replace")
        except OSError:
            return ""
        return scrub("".join(f"\n  | {line}" for line in text.splitlines()[-TAIL_LINES:]), self._secrets)

    # -- stopping ----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Send SIGTERM in order (agents, environments, models), and SIGKILL to the servers that are left after
        ``shutdown_timeout_s``; then end the nursery. Idempotent."""
        self._stopping = True
        await self._tasks.cancel()
        orderly = asyncio.ensure_future(self._stop_in_order())
        try:
            # The task that stops a stack has usually been cancelled, and in such a task `asyncio.timeout` raises no
            # TimeoutError before Python 3.11.3.
            finished, _ = await asyncio.wait([orderly], timeout=self.settings.shutdown_timeout_s)
            for task in finished:
                task.result()
            running = [
                server
                for server_type in STOP_ORDER
                for server in self.servers.values()
                if server.block.server_type == server_type and not server.ended.is_set()
            ]
            if running:
                first = running[0].block.server_type  # the others were not asked to stop yet
                slow = ", ".join(server.name for server in running if server.block.server_type == first)
                later = ", ".join(server.name for server in running if server.block.server_type != first)
                self._say(
                    f"killing what did not stop in {self.settings.shutdown_timeout_s:g} s: {slow}"
                    + (f" (and {later}, whose turn to stop comes after that)" if later else "")
                )
        finally:
            orderly.cancel()
            self.kill()

    async def _stop_in_order(self) -> None:
        for server_type in STOP_ORDER:
            group = [server for server in self.servers.values() if server.block.server_type == server_type]
            for server in group:
                self._signal(server, signal.SIGTERM)
            await asyncio.gather(*(server.ended.wait() for server in group))

    def kill(self) -> None:
        """Send SIGKILL to all remaining servers, end the nursery, and close the sockets."""
        self._stopping = True
        for server in self.servers.values():
            if not server.ended.is_set() and server.pid is not None:
                _kill_group(server.pid)
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        stop_nursery(self._nursery_pid)
        close_listeners(server.listener for server in self.servers.values())

    def _signal(self, server: Server, number: signal.Signals) -> None:
        if server.pid is not None and not server.ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # the event of its exit has not arrived yet
                os.kill(server.pid, number)

    def _broken(self, _: asyncio.Task[Any], error: BaseException) -> None:
        """Nobody awaits the tasks that watch servers, and a server that is not watched is not restarted."""
        self._fail(ServerError(f"the servers can no longer be watched: {type(error).__name__}: {error}"))

    def _fail(self, error: ServerError | ConfigError) -> None:
        if not self.failure.done() and not self._stopping:
            self.failure.set_result(error)

    # -- telling others ----------------------------------------------------------------------------------------------

    def stack(self) -> StackEntry:
        """Return the description of this stack for the stack file."""
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        return StackEntry(
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            pid=os.getpid(),
            started_ticks=ticks,
            root_key=self.keys.to_hex(),
            chosen=dict(self.composition.chosen),
            config=pipeline_view(self.composition, self._addresses, self._replicas),
            observability=dict(self.composition.values.get(OBSERVABILITY) or {}),
            servers=tuple(
                ServerEntry(
                    instance=server.instance,
                    server_type=server.block.server_type,
                    implementation=server.block.implementation,
                    url=server.listener.address.url,
                    pid=server.pid,
                    log=str(server.log),
                    restarts=server.restarts,
                )
                for server in self.servers.values()
            ),
        )

    def write_stack(self) -> None:
        stack = self.stack()
        write_stack(stack)
        servers = [(server.instance, server.server_type, server.url) for server in stack.servers]
        write_scraping(self.run_dir, self.keys.metrics_token, servers, self.run_id)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def stop_nursery(pid: int) -> None:
    """Kill the nursery, which has no servers any more, and reap it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _describe_unready(server: Server) -> str:
    return f"{server.name} ({server.not_ready})" if server.not_ready else server.name


def _in_order(composition: Composition, listeners: Iterable[Listener]) -> list[Listener]:
    """Sort listeners in the composition's order of servers, and then by replica number."""
    order = list(composition.servers)
    return sorted(listeners, key=lambda listener: (order.index(listener.instance), listener.number))


def _replicas(listeners: Iterable[Listener]) -> dict[str, tuple[Address, ...]]:
    by_instance: dict[str, tuple[Address, ...]] = {}
    for listener in sorted(listeners, key=lambda listener: listener.number):
        by_instance[listener.instance] = (*by_instance.get(listener.instance, ()), listener.address)
    return by_instance
