"""The connections of a gateway to its engines: made when they are needed, kept between calls."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohappyeyeballs

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines.exchange import Connection, NoHttpError, Reply

KEEPALIVE_S = 4.0
"""Seconds that an unused connection is kept: less than the five after which vLLM and SGLang close theirs, so that no
request is sent into a connection that is just ending."""
_NAMES_S = 10.0
"""How long a host's addresses are remembered."""
_FIRST_ADDRESS_S = 0.25
"""How long the first of a host's addresses is tried alone."""


class NotConnectedError(Exception):
    """No connection came about, so that no request was begun; its cause says why."""


BROKEN = (NotConnectedError, NoHttpError, TimeoutError, OSError)
"""What `EngineConnections.send` and its replies raise."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A server."""

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class Patience:
    """In seconds."""

    connect_s: float
    total_s: float
    """From the connection to the last byte."""
    idle_s: float | None = None
    """Between two reads of an answer that has begun."""


class EngineConnections:
    """Connections to any number of servers, to each as many as there are calls. Belongs to one event loop."""

    def __init__(self, *, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._unused: dict[Origin, list[tuple[float, Connection]]] = {}
        self._open: set[Connection] = set()
        self._ageing: asyncio.TimerHandle | None = None
        self._names: dict[Origin, tuple[float, asyncio.Task[list[Any]]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def send(self, origin: Origin, head: bytes, body: bytes, patience: Patience) -> Reply:
        """Send one request, once, and wait for the head of its answer, which has to be closed."""
        if self._closed:
            raise RuntimeError("these connections are closed")
        begun = asyncio.get_running_loop().time()
        connection = self._kept(origin, begun) or await self._made(origin, patience)
        reply = connection.ask(head, body, begun + patience.total_s, patience.idle_s)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    async def aclose(self) -> None:
        """End every connection; whoever waits for an answer on one sees it break. Nothing can be sent any more."""
        self._closed = True
        if self._ageing is not None:
            self._ageing.cancel()
        for _, lookup in self._names.values():
            lookup.cancel()
        for connection in [*self._open]:
            connection.end()
        await asyncio.sleep(0)  # in which the transports let their sockets go

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- kept ----------------------------------------------------------------------------------------------------

    def _kept(self, origin: Origin, now: float) -> Connection | None:
        unused = self._unused.get(origin)
        while unused:
            since, connection = unused.pop()  # the latest: those of a busier time age
            if connection.usable and now - since < self._keepalive_s:
                return connection
            connection.end()
        return None

    def _keep(self, origin: Origin, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._unused.setdefault(origin, []).append((loop.time(), connection))
        if self._ageing is None:
            self._ageing = loop.call_later(self._keepalive_s, self._end_old)

    def _end_old(self) -> None:
        loop = asyncio.get_running_loop()
        young = loop.time() - self._keepalive_s
        for origin, unused in [*self._unused.items()]:
            self._unused[origin] = [one for one in unused if one[0] > young and one[1].usable]
            for since, connection in unused:
                if since <= young:
                    connection.end()
            if not self._unused[origin]:
                del self._unused[origin]
        self._ageing = loop.call_later(self._keepalive_s / 4, self._end_old) if self._unused else None

    # -- made ----------------------------------------------------------------------------------------------------

    async def _made(self, origin: Origin, patience: Patience) -> Connection:
        try:
            async with asyncio.timeout(min(patience.connect_s, patience.total_s)):
                return await self._connect(origin)
        except (OSError, UnicodeError) as error:
            ours = isinstance(error, TimeoutError) and error.errno is None  # not the system's own
            if ours and patience.total_s <= patience.connect_s:
                raise
            raise NotConnectedError from error

    async def _connect(self, origin: Origin) -> Connection:
        addresses = await self._addresses(origin)
        sock = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=_FIRST_ADDRESS_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.tls and self._tls is None:
                self._tls = ssl.create_default_context()
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(partial(self._keep, origin), self._open.discard),
                sock=sock,
                ssl=self._tls if origin.tls else None,
                server_hostname=origin.host if origin.tls else None,
            )
        except BaseException:
            sock.close()
            raise
        if self._closed:  # meanwhile
            connection.end()
            raise ConnectionAbortedError
        if connection.usable:
            self._open.add(connection)
        return connection

    async def _addresses(self, origin: Origin) -> list[Any]:
        """One lookup for all who connect at the same time."""
        loop = asyncio.get_running_loop()
        until, lookup = self._names.get(origin, (0.0, None))
        failed = lookup is not None and lookup.done() and (lookup.cancelled() or lookup.exception() is not None)
        if lookup is None or failed or until < loop.time():
            lookup = loop.create_task(_resolved(origin))
            self._names[origin] = loop.time() + _NAMES_S, lookup
        try:
            return await asyncio.shield(lookup)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and lookup.cancelled() and task is not None and not task.cancelling():
                raise ConnectionAbortedError from None  # not the call was ended, but the connections
            raise


async def _resolved(origin: Origin) -> list[Any]:
    return await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)


# What stands above the bodies of an engine's requests.

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_OURS = frozenset({"content-length", "expect", "transfer-encoding", "upgrade"})
"""They say where a request ends: another word on that would make two requests of one."""
_IN_PATHS = "/%!$&'()*+,;=:@~"


class RequestHeads:
    """The heads of requests to one engine; all but the first line and the length is the same in each."""

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        """``headers`` replace those that are sent anyway, if their names are equal but for upper and lower case.
        Raises `ConfigError` for what cannot be sent."""
        parts = urlsplit(base_url)
        try:
            port, host = parts.port, (parts.hostname or "").encode("idna" if not base_url.isascii() else "ascii")
        except ValueError as error:
            raise ConfigError(f"'{base_url[:200]}' is no URL of a server ({error})") from error
        tls = parts.scheme == "https"
        self.origin = Origin(parts.hostname or "", port or (443 if tls else 80), tls)
        name = f"[{host.decode()}]" if b":" in host else host.decode()
        sent = {
            "host": ("Host", f"{name}:{port}" if port else name),
            "accept": ("Accept", "application/json, text/event-stream"),
            "accept-encoding": ("Accept-Encoding", "identity"),
            "content-type": ("Content-Type", "application/json"),
        }
        sent |= {name.lower(): (name, value) for name, value in headers.items()}
        for name, value in sent.values():
            if name.lower() in _OURS:
                raise ConfigError(f"header {name!r} is the gateway's own; leave it out of the engine's 'headers'")
            if not _NAME.fullmatch(name):
                raise ConfigError(f"header {name[:40]!r} is no name of a header; give for example 'X-Tenant'")
            if _NO_VALUE.search(value):
                raise ConfigError(f"header {name[:40]!r}: a line break or control character in it cannot be sent")
        self._path = quote(parts.path, safe=_IN_PATHS)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in sent.values()).encode()

    def of(self, method: str, route: str, length: int) -> bytes:
        """``length``: of the body, in bytes."""
        line = f"{method} {self._path}{route} HTTP/1.1\r\n".encode()
        return b"%b%bContent-Length: %d\r\n\r\n" % (line, self._headers, length)
