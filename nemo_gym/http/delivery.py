"""Detects whether a caller is still connected, and whether it can have read its response.

Handing the last byte to the kernel does not prove that the client reads it. When a client closes its connection with
unread bytes, its kernel resets the connection, which is detected here. So is a connection that ended while the
response was still being written, or with bytes that the client's kernel never acknowledged. Bytes that the client's
library took from its kernel but never passed on cannot be detected; they count as delivered.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status of a reply whose caller is gone; no client receives it."""


class Received(Protocol):
    """Anything with an ASGI ``receive``: a request of Starlette's, for example."""

    @property
    def receive(self) -> Receive: ...


class CallerGoneError(Exception):
    """The caller closed the connection and waits for no response."""


async def disconnected(request: Received) -> None:
    """Wait until the caller disconnects. The request's body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def end(task: asyncio.Future[T]) -> None:
    """Cancel a task and wait until it has ended, even if the waiting task is cancelled meanwhile."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # Without a task of its own, which the end of the event loop would cancel as well.
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # mark it as retrieved: the work logs its own errors
    if cancelled is not None:
        raise cancelled


async def while_connected(request: Received, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the caller disconnects first, cancel the work and raise `CallerGoneError`."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            await end(task)


Connection = tuple[str, int]
"""Address and port of the client's end, as in an ASGI scope's ``client``."""


def _unwritten(transport: asyncio.Transport) -> int:
    """Bytes that may still be in this process. Under TLS there is a further buffer whose size cannot be queried, so
    there the bytes that the other end's kernel has not acknowledged count too."""
    sock = _socket_of(transport)
    if sock is None or sock.fileno() < 0:  # closed: under TLS the size stays what it was
        return 0
    size = transport.get_write_buffer_size()
    return size if transport.get_extra_info("sslcontext") is None else size + untaken(transport)


def _socket_of(transport: asyncio.BaseTransport) -> Any:
    try:
        return transport.get_extra_info("socket")
    except AttributeError:  # asyncio's TLS transport, closed twice
        return None


def untaken(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that were written but not acknowledged by the other end's kernel. A client that leaves before they arrive
    closes its connection in order; its reset follows after the end of the stream, where it is not read any more."""
    sock = _socket_of(transport) if transport is not None else None
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4) if sock is not None else b"\0" * 4
    except (OSError, ValueError):  # the socket is closed
        return 0
    return int.from_bytes(queued, sys.byteorder)


class AnswerWatch:
    """Watches the delivery of one response on one connection."""

    def __init__(self, transport: asyncio.Transport | None = None) -> None:
        """``transport`` is the connection's, or ``None`` if `Deliveries` is not told of the connection's end."""
        self._undelivered: Callable[[], None] | None = None
        self._when_lost: Callable[[], None] | None = None
        self._lost = False
        self._transport = transport
        self.watched = transport is not None
        """Whether the end of the connection will be reported here."""

    @property
    def lost(self) -> bool:
        """Whether the connection has ended."""
        return self._lost

    @property
    def left(self) -> bool:
        """Whether no written byte is left in this process: the kernel, which outlives this process, has taken all of
        them, or the connection is gone."""
        return self._lost or not self.holds_bytes

    @property
    def holds_bytes(self) -> bool:
        """Whether written bytes may still be in this process, also for a client that has closed its end."""
        return self._transport is not None and _unwritten(self._transport) > 0

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """Call ``call`` when the connection ends, at once if it has ended. ``None`` removes the callback."""
        self._when_lost = call
        if self._lost and call is not None:
            call()

    def all_sent(self, undelivered: Callable[[], None]) -> bool:
        """Record that the last byte was handed to the transport. Returns ``False`` if the connection is gone already;
        else ``undelivered`` is called if the connection is reset before the client sends another request on it."""
        if not self._lost:
            self._undelivered = undelivered
        return not self._lost

    def _read(self) -> None:
        """Record that the client has read the whole response."""
        self._undelivered = None  # breaks a reference cycle: the callback's owner refers to this watch

    def _end(self, reset: bool) -> None:
        self._lost = True
        (when_lost, self._when_lost), (undelivered, self._undelivered) = (
            (self._when_lost, None),
            (self._undelivered, None),
        )
        if when_lost is not None:
            when_lost()
        if reset and undelivered is not None:
            undelivered()


class Deliveries:
    """The responses being watched in this process, one per connection."""

    def __init__(self) -> None:
        self._watches: dict[Connection, AnswerWatch] = {}
        self._open: dict[Connection, asyncio.Transport] = {}

    def began(self, connection: Connection | None, transport: asyncio.Transport) -> None:
        """Record an open connection; its end must be reported to `ended`."""
        if connection is not None:
            self._open[connection] = transport

    def watch(self, connection: Connection | None) -> AnswerWatch:
        """Watch the response to a request that came on ``connection``, an ASGI scope's ``client``. A new request on a
        connection proves that the client has read the response before it."""
        watch = AnswerWatch(self._open.get(connection) if connection is not None else None)
        if connection is not None:
            if (previous := self._watches.get(connection)) is not None:
                previous._read()
            self._watches[connection] = watch
        return watch

    def ended(self, connection: Connection | None, *, reset: bool) -> None:
        """Record that a connection is closed; ``reset`` if its last bytes may be lost."""
        if connection is not None:
            self._open.pop(connection, None)
        if connection is not None and (watch := self._watches.pop(connection, None)) is not None:
            watch._end(reset)

    def __len__(self) -> int:
        return len(self._watches)


DELIVERIES = Deliveries()
"""The watched responses of this process's web server, if it runs `nemo_gym.http.protocol.WatchedHttpProtocol`."""
