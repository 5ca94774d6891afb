"""The web server's HTTP protocol. It sends small replies in one write, reports to `DELIVERIES` how each connection
ended, and closes connections whose request makes no progress.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nemo_gym.http.delivery import DELIVERIES, untaken

_HEAD, _HEAD_END = b"HTTP/1.", b"\r\n\r\n"
_JOINED_BYTES = 64 * 1024
"""Copying more costs more than a second write."""


class JoinedWrites:
    """An ``asyncio.Transport`` that wraps another and sends a reply's head and the start of its body in one write.

    uvicorn writes the two separately, and each write wakes the client, which can do nothing with a head alone: for
    small replies that costs more than producing them. A head waits for the next write, but at most until the event
    loop's next iteration, so a stream whose first chunk is not ready yet still starts at once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending_head = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._pending_head and len(data) <= _JOINED_BYTES:
            head, self._pending_head = self._pending_head, b""
            self._transport.write(b"".join((head, data)))
        elif self._pending_head or isinstance(data, memoryview):
            self._flush()
            self._transport.write(data)
        elif data.startswith(_HEAD) and data.endswith(_HEAD_END):
            self._pending_head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pending_head = b""
        self._transport.abort()

    def _flush(self) -> None:
        head, self._pending_head = self._pending_head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


PROGRESS_BYTES = 1024
"""Body bytes that must arrive within the timeout. Fewer count as no progress: a trickle cannot hold a connection."""
MAX_HEAD_BYTES = 128 * 1024
"""The limit for a request's line and headers. The parser copies an unfinished header each time more of it arrives, so
an endless header would block the event loop for seconds, and at that point the sender's credential is unchecked."""
_RECHECK_S = 0.25
_EMPTY = b"connection: close\r\ncontent-length: 0\r\n\r\n"
_TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\n" + _EMPTY
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _EMPTY


class WatchedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which also tells `DELIVERIES` how connections end: ``uvicorn.Config(app, http=...)``.

    It closes a connection whose request makes no progress for ``slow_request_timeout_s``; uvicorn waits forever. Time
    during which this server did not read, because its application was not reading, does not count.
    """

    def __init__(self, *args: Any, slow_request_timeout_s: float = 60.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeout_s = slow_request_timeout_s
        self._watching: asyncio.TimerHandle | None = None
        self._is_receiving = True
        """Whether this waits for the rest of a request, possibly of one that has not even begun."""
        self._progress_at = 0.0
        self._progress_bytes = 0
        self._is_late = False
        self._in_head = False
        self._head_bytes = 0
        self._stuck_bytes = 0
        """Bytes received since the last progress: since a message began, a head or message ended, or body arrived."""
        self._made_progress = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        DELIVERIES.began(self.client, transport)
        self._progress()
        self._watching = self.loop.call_later(self._timeout_s, self._watch)

    def data_received(self, data: bytes) -> None:
        self._made_progress = False
        super().data_received(data)
        self._stuck_bytes = 0 if self._made_progress else self._stuck_bytes + len(data)
        if self._stuck_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # otherwise `_refuse_head` has already sent an error
            super().send_400_response(msg)

    def eof_received(self) -> None:
        # Anything written from here on is lost without an error.
        DELIVERIES.ended(self.client, reset=untaken(self.transport) > 0)
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
        DELIVERIES.ended(self.client, reset=exc is not None or untaken(self.transport) > 0)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._made_progress = True
        self._head_bytes = 0
        self._is_receiving = True
        self._progress()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: the request was already checked and routed without it
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head, self._made_progress = False, True
        super().on_headers_complete()
        self._progress()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._made_progress = True
        self._progress_bytes += len(body)
        if self._progress_bytes >= PROGRESS_BYTES:
            self._progress()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._made_progress = True
        self._is_receiving = False

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            raise ValueError("the request's head is too large")  # stops the parser

    def _refuse_head(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()

    def _progress(self) -> None:
        self._progress_at = self.loop.time()
        self._progress_bytes = 0
        self._is_late = False

    def _watch(self) -> None:
        cycle = self.cycle
        if self._is_receiving:
            if self.flow.read_paused or (cycle is not None and cycle.waiting_for_100_continue):
                self._progress()  # the client is waiting for this server
        elif self.timeout_keep_alive_task is None and (cycle is None or cycle.response_complete):
            # The client sent bytes that do not begin a request; they cancelled uvicorn's keep-alive timer.
            self._is_receiving = True
            self._progress()
        left_s = self._progress_at + self._timeout_s - self.loop.time()
        if not self._is_receiving:
            left_s = self._timeout_s
        elif left_s <= 0 and not self._is_late:
            # This process may itself have been stalled; give it a moment to read what arrived in the meantime.
            self._is_late, left_s = True, _RECHECK_S
        elif left_s <= 0:
            self._time_out()
            return
        self._watching = self.loop.call_later(left_s, self._watch)

    def _time_out(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client is not reading earlier replies either
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_TIMED_OUT)
        self.transport.close()
