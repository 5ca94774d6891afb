"""Whether a caller is still there, and whether it can have read its answer.

Handing the last byte to the kernel does not say that anybody reads it. A client that closes its connection with bytes
unread makes its kernel reset it, and that is seen here; so is a connection that ended while the answer was still being
written, or with bytes on their way that the client's kernel never took. What cannot be seen is a client whose library
had already taken the bytes from the kernel: that counts as delivered.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status, seen by nobody, of a reply whose caller is gone."""


class Received(Protocol):
    """A request, ASGI's or a framework's."""

    @property
    def receive(self) -> Receive: ...


class CallerGoneError(Exception):
    """The connection is closed; nobody waits for an answer."""


async def disconnected(request: Received) -> None:
    """Returns when the caller has left. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def end(task: asyncio.Future[T]) -> None:
    """Cancel a task and wait until it has ended, also while the waiter is being cancelled itself."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved: an error while ending is the log's, which the work itself wrote
    if cancelled is not None:
        raise cancelled


async def while_connected(request: Received, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the caller leaves; then raises `CallerGoneError`."""
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
    """Bytes that may not be the kernel's yet. Below TLS lies a buffer that nobody can ask for its size: there, nothing
    has left before the other end's kernel has taken what it was sent."""
    size = transport.get_write_buffer_size()
    return size if transport.get_extra_info("sslcontext") is None else size + untaken(transport)


def untaken(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that were written and that the other end's kernel has not acknowledged. A client that leaves before they
    come ends its connection in order: the reset comes behind its end, and nobody reads that far."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    try:
        waiting = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4) if sock is not None else b"\0" * 4
    except (OSError, ValueError):  # no socket of the kernel's any more
        return 0
    return int.from_bytes(waiting, sys.byteorder)


class AnswerWatch:
    """One answer on one connection."""

    def __init__(self, transport: asyncio.Transport | None = None) -> None:
        """``transport``: the connection's, if its end will be seen here."""
        self._undelivered: Callable[[], None] | None = None
        self._when_lost: Callable[[], None] | None = None
        self._lost = False
        self._transport = transport
        self.watched = transport is not None
        """Whether the end of the connection will be seen here."""

    @property
    def left(self) -> bool:
        """Whether nothing of what was written is here any more: it is the kernel's, which outlives this process, or
        the connection is gone."""
        return self._lost or self._transport is None or _unwritten(self._transport) == 0

    def when_lost(self, call: Callable[[], None] | None) -> None:
        """``call`` when the connection ends, at once if it has ended; nothing takes it back."""
        self._when_lost = call
        if self._lost and call is not None:
            call()

    def all_sent(self, undelivered: Callable[[], None]) -> bool:
        """The last byte was handed over. Returns ``False`` if the connection was gone by then; else ``undelivered`` is
        called should it be reset before its client uses it again."""
        if not self._lost:
            self._undelivered = undelivered
        return not self._lost

    def _read(self) -> None:
        """The whole answer has been read."""
        self._undelivered = None  # which refers to the call, which refers to this

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
    """The answers being watched in this process, one per connection."""

    def __init__(self) -> None:
        self._watches: dict[Connection, AnswerWatch] = {}
        self._open: dict[Connection, asyncio.Transport] = {}

    def began(self, connection: Connection | None, transport: asyncio.Transport) -> None:
        """A connection is open whose end will be told."""
        if connection is not None:
            self._open[connection] = transport

    def watch(self, connection: Connection | None) -> AnswerWatch:
        """Watch the answer to a request that came on ``connection``, an ASGI scope's ``client``. A request on a
        connection says that what was sent on it before has been read."""
        watch = AnswerWatch(self._open.get(connection) if connection is not None else None)
        if connection is not None:
            if (before := self._watches.get(connection)) is not None:
                before._read()
            self._watches[connection] = watch
        return watch

    def ended(self, connection: Connection | None, *, reset: bool) -> None:
        """A connection is closed."""
        if connection is not None:
            self._open.pop(connection, None)
        if connection is not None and (watch := self._watches.pop(connection, None)) is not None:
            watch._end(reset)

    def __len__(self) -> int:
        return len(self._watches)


DELIVERIES = Deliveries()
"""Of the one web server of this process, if it was started with `nemo_gym.http.protocol.WatchedHttpProtocol`."""
