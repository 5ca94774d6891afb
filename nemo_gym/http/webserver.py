"""Runs an application in this process: on the socket it inherited, or on its configured address."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from nemo_gym._util.tasks import finish
from nemo_gym.config.launch import GC_THRESHOLDS, ServerLaunch, announce_ready, die_with_parent
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.http.client import is_loopback, url_host
from nemo_gym.http.protocol import WatchedHttpProtocol

SERVER_KEEPALIVE_S = 75
"""Longer than the client's, so that the client always closes an idle connection first."""
SHUTDOWN_GRACE_S = 90
"""For requests in flight when the server is told to stop; then their handlers are cancelled."""
LISTEN_BACKLOG = 4096
MALLOC_SETTINGS = {-1: 32 << 20, -3: 16 << 20}
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes. A request of a few hundred KiB is held several times on
its way; with the defaults that memory goes back to the kernel after each request, and comes again page by page, which
takes longer than all else that is done with those bytes."""

log = structlog.get_logger(__name__)


class WebServer(uvicorn.Server):
    """A uvicorn server that tells its parent when it accepts requests, and its application when it stops."""

    def __init__(
        self,
        config: uvicorn.Config,
        launch: ServerLaunch | None = None,
        on_stop: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._launch = launch
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._launch is not None and self.started and not self.should_exit:
            announce_ready(self._launch)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before the wait for open requests: those that would not end by themselves are told to.
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
    """Serve ``app`` until SIGINT or SIGTERM; ``on_stop`` then ends what would keep requests open. Raises `ConfigError`
    for an address that cannot be used."""
    _tune_process()
    if launch is not None and launch.parent_pid is not None:
        die_with_parent(launch.parent_pid)
    secured = launch is not None and launch.credentials is not None
    sockets = [_inherited(launch.socket_fd)] if launch and launch.socket_fd is not None else [bind(config, secured)]
    settings = _settings(slow_request_timeout_s)
    if launch is not None and launch.certificate_file is not None:
        settings |= {"ssl_certfile": launch.certificate_file, "ssl_keyfile": launch.key_file}
    server = WebServer(uvicorn.Config(app, **settings), launch, on_stop)
    server.run(sockets=sockets)
    if not server.started:
        sys.exit(3)


class _Guest(WebServer):
    """Runs in an event loop of somebody else's, whose signals are that one's affair."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(
    app: FastAPI, config: BaseServerConfig, *, on_stop: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[str]:
    """Serve ``app``, which checks its callers itself, in the running event loop until the block ends; gives its URL.
    ``on_stop`` then ends what would keep requests open. Raises `ConfigError` for an address that cannot be used."""
    _tune_process()
    listener = bind(config, secured=True)
    host, port = listener.getsockname()[:2]
    server = _Guest(uvicorn.Config(app, **_settings(60.0), lifespan="off"), None, on_stop)
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
        # The caller is who connected: its port tells the connection, on which the delivery of answers is watched.
        "proxy_headers": False,
        "ws": "none",
        "http": functools.partial(WatchedHttpProtocol, slow_request_timeout_s=slow_request_timeout_s),
    }


def _inherited(fd: int) -> socket.socket:
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def bind(config: BaseServerConfig, secured: bool) -> socket.socket:
    """A listening socket on the configured address; port 0 takes a free one."""
    if not is_loopback(config.host) and not secured:
        raise ConfigError(
            f"host '{config.host}' can be reached from other machines, and this server was started without"
            " credentials; use host 127.0.0.1, or start it with ng_run",
            key="host",
        )
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose another 'port', or leave it out"
            " to get a free one",
            key="port",
            port=config.port,
        ) from error
    listener.listen(LISTEN_BACKLOG)
    listener.setblocking(False)
    return listener


def raise_file_limit() -> None:
    """Use as many file descriptors as this process may: each connection takes one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_memory() -> None:
    """Have the C library keep memory that is about to be used again; nothing where it is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform == "linux":
        for parameter, value in MALLOC_SETTINGS.items():
            mallopt(parameter, value)


def give_back_memory() -> None:
    """Have the C library give the kernel what it keeps and nobody uses, also between what is used. Takes some
    milliseconds for each hundred MB, without the interpreter's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
