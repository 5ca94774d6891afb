"""An HTTP/1.1 client for engines and the stack's servers. It keeps connections alive, each with one request at a time.

With aiohttp instead, a call to an engine takes 300 to 500 µs more CPU, a third of the gateway's work for the call
(campaigns.bench.ablation), and a request of the pipeline takes 130 µs instead of 50. llhttp parses the messages.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import aiohappyeyeballs
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

SET_COOKIE = "set-cookie"
_HEAD_BYTES = 64 << 10
_LENGTH_DIGITS = 18
_UNREAD_BYTES = 1 << 20
"""Unread bytes of a streamed reply beyond which reading from the engine pauses."""
_JOINED_BYTES = 64 << 10
"""Copying a larger body costs more than a second write."""


class NoHttpError(Exception):
    """The other end did not send valid HTTP, or sent HTTP that this client does not support."""


class TooLongError(NoHttpError):
    """A body is longer than its reader accepts."""


class Reply:
    """A response. Reading it raises `NoHttpError`, `TimeoutError` or `OSError`. Closing a reply that was read to its
    end releases its connection for reuse; closing any other ends the connection, so that an engine stops generating.

    The parser calls the ``on_…`` methods."""

    def __init__(self, connection: Connection, deadline: float, idle_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.status = 0
        """0 until the head has arrived."""
        self.headers: dict[str, str] = {}
        """By lower-case name. The values of a repeated header are joined with commas, cookies with newlines."""
        self._connection = connection
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._fed_bytes = 0
        self._unread = bytearray()
        """Grows with each arrival, for engines' answers: they come in many pieces, and to join those of a large one
        at its end would make its reader wait."""
        self._read_whole = False
        self._at_most = 0
        self._done = False
        self._keep_alive = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_timer = loop.call_at(deadline, self._fail, TimeoutError())
        self._idle_s = idle_s
        """The longest silence once the reply has begun; before that, a model that does not stream is still working."""
        self._idle_timer: asyncio.TimerHandle | None = None

    async def head(self) -> None:
        """Wait until status and headers have arrived."""
        while not self.status:
            await self._wait_for_data()

    async def read(self, at_most: int) -> bytearray:
        """Read the rest of the body. Raises `TooLongError` as soon as it is known to have more than ``at_most``
        bytes."""
        self._read_whole = True
        self._at_most = at_most
        self._connection.read_on()
        self._check_size()
        while not self._done:
            await self._wait_for_data()
        return self._take_unread()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._unread:
                yield bytes(self._take_unread())
            elif self._done:
                return
            else:
                self._connection.read_on()
                await self._wait_for_data()

    def close(self) -> None:
        self._deadline_timer.cancel()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._parser = None  # breaks a reference cycle
        # After an application error a server may close the connection without announcing it, as uvicorn does.
        self._connection.answered(keep=self._done and self._keep_alive and self.status != 500)

    async def _wait_for_data(self) -> None:
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    @property
    def _content_length(self) -> int:
        """The body's length by its header, in bytes; 0 without a usable one."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isdecimal() and len(value) < _LENGTH_DIGITS else 0

    def _take_unread(self) -> bytearray:
        unread, self._unread = self._unread, bytearray()
        return unread

    # -- from the connection -------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """Parse ``data``. Returns whether the reader keeps up; ``False`` asks the connection to pause."""
        if self._parser is None or self._error is not None:
            return True
        if self._done:
            self._keep_alive = False  # data that belongs to no request
            return True
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(NoHttpError("the response switches to another protocol"))
        except HttpParserError as error:
            self._fail(NoHttpError(str(error)))
        self._fed_bytes += len(data)
        if not self.status and self._fed_bytes > _HEAD_BYTES:
            self._fail(NoHttpError(f"the head of the response is larger than {_HEAD_BYTES} bytes"))
        if self._read_whole:
            self._check_size()
        if self._idle_s is not None:
            self._restart_idle_timer()
        if self._done or (self.status and not self._read_whole):
            self._wake()
        return self._read_whole or len(self._unread) <= _UNREAD_BYTES

    def not_heard(self) -> None:
        """Stop the idle timer while reading is paused, since silence is then not the other end's fault."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    def heard_again(self) -> None:
        if self._fed_bytes and not self._done and self._error is None:
            self._restart_idle_timer()

    def broke_off(self, error: Exception | None) -> None:
        """Record that the connection has ended; ``error`` is ``None`` if the other end closed it in order."""
        sized = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        if error is None and self.status and not sized:
            self._done = True  # a body without a length ends with its connection
            self._wake()
        self._fail(error if isinstance(error, OSError) else ConnectionResetError())

    def _restart_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._idle_s is not None:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._fail, TimeoutError())

    def _check_size(self) -> None:
        if len(self._unread) > self._at_most or (self._content_length > self._at_most and not self._done):
            self._unread = bytearray()
            self._fail(TooLongError(f"a body of more than {self._at_most} bytes"))

    def _fail(self, error: Exception) -> None:
        self._keep_alive = False
        if not self._done and self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- from the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._done:
            self._keep_alive = False  # a second reply to one request; the next request would get it as its own

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # ignore trailers: they come after the body and cannot change how it is read
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            separator = "\n" if key == SET_COOKIE else ", "  # a cookie may have commas of its own
            self.headers[key] = f"{self.headers[key]}{separator}{text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if self._parser is None or self._done:
            return
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        elif status >= 100:
            self.headers.clear()  # an informational response; the real one follows
        else:
            self._fail(NoHttpError(f"the status {status}"))

    def on_body(self, body: bytes) -> None:
        if self.status and not self._done:
            self._unread += body

    def on_message_complete(self) -> None:
        if self._parser is not None and self.status and not self._done:
            self._keep_alive = self._parser.should_keep_alive()
            self._done = True


class Connection(asyncio.Protocol):
    """A connection to one server, which carries one request at a time."""

    def __init__(self, unused: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        """``unused`` is called after an exchange if the connection can be reused, ``lost`` once it has ended."""
        self._unused = unused
        self._lost = lost
        self._reply: Reply | None = None
        self._paused = False
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, body: bytes, deadline: float, idle_s: float | None) -> Reply:
        """Send one request. ``head`` includes the final empty line; ``deadline`` is in the event loop's time. The
        caller must close the reply. Raises `ConnectionResetError` if the other end is gone."""
        if self._transport is None:
            raise ConnectionResetError
        self._reply = Reply(self, deadline, idle_s)
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return self._reply

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # drops unsent data, which nobody needs any more

    # -- from the reply ------------------------------------------------------------------------------------------

    def read_on(self) -> None:
        if self._paused and self._transport is not None and self.usable:
            self._paused = False
            self._transport.resume_reading()
            if self._reply is not None:
                self._reply.heard_again()

    def answered(self, *, keep: bool) -> None:
        self._reply = None
        if keep and self._transport is not None and self.usable and not self._transport.get_write_buffer_size():
            self.read_on()
            self._unused(self)
        else:
            self.end()

    # -- from the transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.end()  # data that belongs to no request
        elif not self._reply.feed(data) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
            self._reply.not_heard()

    def eof_received(self) -> None:
        # Abort here: a transport that closes by itself first waits until everything is written, perhaps forever.
        if self._reply is not None:
            self._reply.broke_off(None)
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)
        if self._reply is not None:
            self._reply.broke_off(exc)


KEEPALIVE_S = 4.0
"""How long an unused connection is kept: less than the 5 s after which vLLM and SGLang close theirs, so that no
request is sent on a connection that is just ending."""
_LOOKUP_CACHE_S = 10.0
"""How long a host's resolved addresses are cached."""
_FIRST_ADDRESS_S = 0.25
"""How long the first of a host's addresses is tried alone."""


class NotConnectedError(Exception):
    """No connection was established, so no request was sent. ``__cause__`` is the reason."""


BROKEN = (NotConnectedError, NoHttpError, TimeoutError, OSError)
"""The errors that `Connections.send` and its replies raise."""


def is_own_timeout(error: BaseException) -> bool:
    """Whether ``error`` is this client's own timeout; the operating system's has an ``errno``."""
    return isinstance(error, TimeoutError) and error.errno is None


@dataclass(frozen=True, slots=True)
class Origin:
    """A server."""

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits of one request, in seconds."""

    connect_s: float
    total_s: float
    """From the start of the call, connecting included, to the last byte."""
    idle_s: float | None = None
    """Between two arrivals of data, once the reply has begun."""


class Connections:
    """Connections to any number of servers, one per concurrent call. Belongs to one event loop."""

    def __init__(
        self, *, keepalive_s: float = KEEPALIVE_S, socket_factory: Callable[[Any], socket.socket] | None = None
    ) -> None:
        """``socket_factory`` is passed to `aiohappyeyeballs.start_connection`."""
        self._keepalive_s = keepalive_s
        self._socket_factory = socket_factory
        self._unused: dict[Origin, list[tuple[float, Connection]]] = {}
        self._open: set[Connection] = set()
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._lookups: dict[Origin, tuple[float, asyncio.Task[list[Any]]]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def send(self, origin: Origin, head: bytes, body: bytes, patience: Patience) -> Reply:
        """Send one request, without retries, and wait for the head of the reply. The caller must close the reply."""
        if self._closed:
            raise RuntimeError("these connections are closed")
        begun = asyncio.get_running_loop().time()
        connection = self._take_unused(origin, begun) or await self._open_connection(origin, patience)
        reply = connection.ask(head, body, begun + patience.total_s, patience.idle_s)
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    async def aclose(self) -> None:
        """End every connection; replies still being read fail. Nothing can be sent afterwards."""
        self._closed = True
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        for _, lookup in self._lookups.values():
            lookup.cancel()
        for connection in [*self._open]:
            connection.end()
        await asyncio.sleep(0)  # lets the transports close their sockets

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- kept ----------------------------------------------------------------------------------------------------

    def _take_unused(self, origin: Origin, now: float) -> Connection | None:
        unused = self._unused.get(origin)
        while unused:
            since, connection = unused.pop()  # the most recent, so that surplus connections expire
            if connection.usable and now - since < self._keepalive_s:
                return connection
            connection.end()
        return None

    def _keep(self, origin: Origin, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._unused.setdefault(origin, []).append((loop.time(), connection))
        if self._expiry_timer is None:
            self._expiry_timer = loop.call_later(self._keepalive_s, self._end_expired)

    def _end_expired(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_kept = loop.time() - self._keepalive_s
        for origin, unused in [*self._unused.items()]:
            self._unused[origin] = [entry for entry in unused if entry[0] > oldest_kept and entry[1].usable]
            for since, connection in unused:
                if since <= oldest_kept:
                    connection.end()
            if not self._unused[origin]:
                del self._unused[origin]
        self._expiry_timer = loop.call_later(self._keepalive_s / 4, self._end_expired) if self._unused else None

    # -- made ----------------------------------------------------------------------------------------------------

    async def _open_connection(self, origin: Origin, patience: Patience) -> Connection:
        try:
            async with asyncio.timeout(min(patience.connect_s, patience.total_s)):
                return await self._connect(origin)
        except (OSError, UnicodeError) as error:
            is_own = isinstance(error, TimeoutError) and error.errno is None  # not the system's own
            if is_own and patience.total_s <= patience.connect_s:
                raise
            raise NotConnectedError(str(error) or type(error).__name__) from error

    async def _connect(self, origin: Origin) -> Connection:
        addresses = await self._addresses(origin)
        sock = await aiohappyeyeballs.start_connection(
            addresses, happy_eyeballs_delay=_FIRST_ADDRESS_S, socket_factory=self._socket_factory
        )
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
        if self._closed:  # while this was connecting
            connection.end()
            raise ConnectionAbortedError
        if connection.usable:
            self._open.add(connection)
        return connection

    async def _addresses(self, origin: Origin) -> list[Any]:
        """Resolve a host's addresses, with one lookup for all concurrent callers."""
        loop = asyncio.get_running_loop()
        until, lookup = self._lookups.get(origin, (0.0, None))
        failed = lookup is not None and lookup.done() and (lookup.cancelled() or lookup.exception() is not None)
        if lookup is None or failed or until < loop.time():
            lookup = loop.create_task(_resolve(origin))
            self._lookups[origin] = loop.time() + _LOOKUP_CACHE_S, lookup
        try:
            return await asyncio.shield(lookup)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and lookup.cancelled() and task is not None and not task.cancelling():
                raise ConnectionAbortedError from None  # `aclose` cancelled the lookup; the caller was not cancelled
            raise


async def _resolve(origin: Origin) -> list[Any]:
    return await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)


_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP options and their values, in seconds, seconds and probes."""
_ACKNOWLEDGEMENTS = {"TCP_USER_TIMEOUT": 30_000}
"""In milliseconds."""


def probe(sock: socket.socket) -> None:
    """Make a TCP socket notice within 30 s that its peer vanished while it waits for data."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_tcp_options(sock, _PROBES)


def _set_tcp_options(sock: socket.socket, values: Mapping[str, int]) -> None:
    for name, value in values.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has every option
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def watched_socket(address: Any) -> socket.socket:
    """Create a socket that notices within 30 s that its peer vanished: while it waits for a reply by the kernel's
    probes, while it sends by missing acknowledgements. ``address`` is an entry of `socket.getaddrinfo`."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    if family in (socket.AF_INET, socket.AF_INET6):
        probe(sock)
        _set_tcp_options(sock, _ACKNOWLEDGEMENTS)
    return sock
