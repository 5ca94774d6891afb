"""Runs an application in this process, on an inherited socket or on its configured address."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from nemo_gym._util.tasks import finish
from nemo_gym.config.launch import GC_THRESHOLDS, ServerLaunch, announce_ready, die_with_parent
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.credentials import require_loopback
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import url_host
from nemo_gym.http.protocol import WatchedHttpProtocol

SERVER_KEEPALIVE_S = 75
"""Longer than the client's keep-alive, so that the client always closes an idle connection first."""
SHUTDOWN_GRACE_S = 90
"""How long a stopping server waits for open requests before it cancels their handlers."""
LISTEN_BACKLOG = 4096
MALLOC_SETTINGS = {-1: 32 << 20, -3: 16 << 20}
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes. A request of a few hundred KiB is copied several times.
With the defaults that memory returns to the kernel after each request and is mapped again page by page for the next,
which takes longer than all other work on those bytes."""

log = structlog.get_logger(__name__)


class WebServer(uvicorn.Server):
    """A uvicorn server that calls ``on_ready`` when it accepts requests and handles signals, and ``on_stop`` when it
    stops. An interrupt before that can be lost: Python drops one that is raised in a weak reference's callback. If
    ``on_ready`` raises an error, the server stops in order before it raises it."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_ready: Callable[[], None] | None = None,
        on_stop: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._interrupted = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal. Raises `KeyboardInterrupt` if one of them was SIGINT. uvicorn repeats a SIGINT after
        it has stopped, but without effect where the process began with SIGINT ignored, as in a script's background."""
        super().run(sockets=sockets)
        if self._interrupted:
            raise KeyboardInterrupt

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None and self.started and not self.should_exit:
            try:
                self._on_ready()
            except Exception:
                await self.shutdown(sockets=sockets)
                raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Started before uvicorn waits for open requests: it ends those that would otherwise stay open.
        stopping = asyncio.ensure_future(self._on_stop()) if self._on_stop is not None else None
        await super().shutdown(sockets=sockets)
        if stopping is not None:
            await stopping


def serve(
    app: FastAPI,
    config: BaseServerConfig,
    launch: ServerLaunch | None = None,
    *,
    slow_request_timeout_s: float = 60.0,
    on_stop: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve ``app`` until SIGINT or SIGTERM, then await ``on_stop``, which ends requests that would stay open. Raises
    `ConfigError` for an unusable address."""
    _tune_process()
    if launch is not None and launch.parent_pid is not None:
        die_with_parent(launch.parent_pid)
    secured = launch is not None and launch.credentials is not None
    sockets = (
        [_inherited_socket(launch.socket_fd)] if launch and launch.socket_fd is not None else [bind(config, secured)]
    )
    settings = _settings(slow_request_timeout_s)
    if launch is not None and launch.certificate_file is not None:
        settings |= {"ssl_certfile": launch.certificate_file, "ssl_keyfile": launch.key_file}
    on_ready = None if launch is None else functools.partial(announce_ready, launch)
    server = WebServer(uvicorn.Config(app, **settings), on_ready=on_ready, on_stop=on_stop)
    server.run(sockets=sockets)
    if not server.started:
        sys.exit(3)


class _EmbeddedServer(WebServer):
    """Runs in another program's event loop and leaves signals to that program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(
    app: FastAPI,
    config: BaseServerConfig,
    *,
    on_stop: Callable[[], Awaitable[None]] | None = None,
    grace_s: int = SHUTDOWN_GRACE_S,
    key: str = "port",
) -> AsyncIterator[str]:
    """Serve ``app``, which checks its callers itself, in the running event loop until the block ends; yields its URL.
    ``on_stop`` then ends requests that would stay open; others have ``grace_s``. Raises `ConfigError` for an unusable
    address; ``key`` is the setting that holds the port."""
    _tune_process()
    listener = bind(config, secured=True, key=key)
    host, port = listener.getsockname()[:2]
    settings = _settings(60.0) | {"timeout_graceful_shutdown": grace_s, "lifespan": "off"}
    server = _EmbeddedServer(uvicorn.Config(app, **settings), on_stop=on_stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="serve")
    try:
        yield f"http://{url_host(host)}:{port}"
    finally:
        server.should_exit = True
        await finish(serving)


def _tune_process() -> None:
    raise_file_limit()
    gc.set_threshold(*GC_THRESHOLDS)
    keep_memory()


def _settings(slow_request_timeout_s: float) -> dict[str, Any]:
    return {
        "access_log": False,
        "timeout_keep_alive": SERVER_KEEPALIVE_S,
        "timeout_graceful_shutdown": SHUTDOWN_GRACE_S,
        "backlog": LISTEN_BACKLOG,
        "log_level": "warning",
        "server_header": False,
        # Keep the real peer's address as the client: `DELIVERIES` identifies connections by its port.
        "proxy_headers": False,
        "ws": "none",
        "http": functools.partial(WatchedHttpProtocol, slow_request_timeout_s=slow_request_timeout_s),
    }


def _inherited_socket(fd: int) -> socket.socket:
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def bind(config: BaseServerConfig, secured: bool, key: str = "port") -> socket.socket:
    """Open a listening socket on the configured address; port 0 picks a free port. Raises `ConfigError`, which names
    ``key``, the setting that holds the port."""
    consequence = "this server was started without credentials; use host=127.0.0.1, or start it with ng_run"
    require_loopback(config.host, consequence, unless=secured)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another '{key}', or 0 for a free"
            " one",
            key=key,
            port=config.port,
        ) from error
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Raise this process's limit of file descriptors to its hard limit, at most 65536: each connection takes one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def keep_memory() -> None:
    """Make glibc keep freed memory for reuse (`MALLOC_SETTINGS`); does nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform == "linux":
        for parameter, value in MALLOC_SETTINGS.items():
            mallopt(parameter, value)


def give_back_memory() -> None:
    """Make the C library return all unused memory to the kernel, including gaps between blocks in use. Takes some
    milliseconds per 100 MB, without the interpreter's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
