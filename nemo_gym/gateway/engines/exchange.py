"""One HTTP/1.1 exchange on a kept connection: a request's bytes out, its answer as it arrives.

Every call of a harness is one exchange with an engine, and clients for any server and any use (cookies, redirects,
tracing, forms) take several times as long for it. Reading the messages is llhttp's part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_HEAD_BYTES = 64 << 10
_LENGTH_DIGITS = 18
_UNREAD_BYTES = 1 << 20
"""Of a streamed answer that its reader has not taken; more stays with the engine."""
_JOINED_BYTES = 64 << 10
"""Copying more costs more than a second write."""


class NoHttpError(Exception):
    """The other end speaks something else."""


class TooLongError(NoHttpError):
    """A body is longer than its reader takes."""


class Reply:
    """An answer. Awaiting any of it raises `NoHttpError`, `TimeoutError`, `OSError`. One that was read to its end
    gives its connection back when it is closed; any other ends its connection, which is what makes an engine stop.

    Its ``on_…`` methods are called by the parser."""

    def __init__(self, connection: Connection, deadline: float, idle_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        """By name in lower case; the values of one that is repeated are joined with commas."""
        self._connection = connection
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._fed = 0
        self._parts: list[bytes] = []
        self._unread = 0
        self._read_whole = False
        self._at_most = 0
        self._done = False
        self._keep_alive = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._overdue = loop.call_at(deadline, self._fail, TimeoutError())
        self._idle_s = idle_s
        """Of silence once the answer has begun: before that, a model that does not stream is at work."""
        self._idle: asyncio.TimerHandle | None = None

    async def head(self) -> None:
        """Until status and headers are there."""
        while not self.status:
            await self._more()

    async def read(self, at_most: int) -> bytes:
        """All of the body that was not read yet; `TooLongError` as soon as it is known to have more bytes than
        ``at_most``."""
        self._read_whole = True
        self._at_most = at_most
        self._connection.read_on()
        self._check_size()
        while not self._done:
            await self._more()
        return self._taken()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                yield self._taken()
            elif self._done:
                return
            else:
                self._connection.read_on()
                await self._more()

    def close(self) -> None:
        self._overdue.cancel()
        if self._idle is not None:
            self._idle.cancel()
        self._parser = None  # which refers to this
        self._connection.answered(keep=self._done and self._keep_alive)

    async def _more(self) -> None:
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    @property
    def _announced(self) -> int:
        """Bytes that the body will have; 0 where that is not said."""
        said = self.headers.get("content-length", "")
        return int(said) if said.isdecimal() and len(said) < _LENGTH_DIGITS else 0

    def _taken(self) -> bytes:
        parts, self._parts, self._unread = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # -- from the connection -------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """Whether the reader keeps up."""
        if self._parser is None or self._error is not None:
            return True
        if self._done:
            self._keep_alive = False  # an answer to nothing
            return True
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(NoHttpError("another protocol"))
        except HttpParserError as error:
            self._fail(NoHttpError(str(error)))
        self._fed += len(data)
        if not self.status and self._fed > _HEAD_BYTES:
            self._fail(NoHttpError("a head without an end"))
        if self._read_whole:
            self._check_size()
        if self._idle_s is not None:
            self._heard()
        if self._done or (self.status and not self._read_whole):
            self._wake()
        return self._read_whole or self._unread <= _UNREAD_BYTES

    def not_heard(self) -> None:
        """What comes is not read for a while: silence is no longer the other end's."""
        if self._idle is not None:
            self._idle.cancel()

    def heard_again(self) -> None:
        if self._fed and not self._done and self._error is None:
            self._heard()

    def broke_off(self, error: Exception | None) -> None:
        """The connection has ended; without an error when the other end closed it in order."""
        sized = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
        if error is None and self.status and not sized:
            self._done = True  # that was the answer's end
            self._wake()
        self._fail(error if isinstance(error, OSError) else ConnectionResetError())

    def _heard(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._idle_s is not None:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._fail, TimeoutError())

    def _check_size(self) -> None:
        if self._unread > self._at_most or (self._announced > self._at_most and not self._done):
            self._parts = []
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
            self._keep_alive = False  # an answer to nothing, which the next request's would be behind

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # behind the body come trailers, which say nothing of how it was to be read
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if self._parser is None or self._done:
            return
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
        elif status >= 100:
            self.headers.clear()  # news before the answer
        else:
            self._fail(NoHttpError(f"the status {status}"))

    def on_body(self, body: bytes) -> None:
        if self.status and not self._done:
            self._parts.append(body)
            self._unread += len(body)

    def on_message_complete(self) -> None:
        if self._parser is not None and self.status and not self._done:
            self._keep_alive = self._parser.should_keep_alive()
            self._done = True


class Connection(asyncio.Protocol):
    """To one server, for one exchange at a time."""

    def __init__(self, unused: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        """``unused`` is called after an exchange that leaves it fit for another, ``lost`` once it has ended."""
        self._unused = unused
        self._lost = lost
        self._reply: Reply | None = None
        self._paused = False
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, head: bytes, body: bytes, deadline: float, idle_s: float | None) -> Reply:
        """Send one request; ``head`` has its empty line, ``deadline`` is the event loop's time. The reply has to be
        closed. Raises `ConnectionResetError` where the other end is gone."""
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
            self._transport.abort()  # what is not sent yet is for nobody any more

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
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self.end()  # an answer to nothing
        elif not self._reply.feed(data) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
            self._reply.not_heard()

    def eof_received(self) -> None:
        # A transport that closes by itself waits until all is written, and maybe nobody reads it any more.
        if self._reply is not None:
            self._reply.broke_off(None)
        self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self)
        if self._reply is not None:
            self._reply.broke_off(exc)
