"""Replies that say when they were handed over, so that a retry and a new question can be told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nemo_gym.gateway.relayed import coalesced, size_of, written
from nemo_gym.gateway.streaming import KeepAlive
from nemo_gym.http.problems import JsonResponse

EVENT_STREAM = "text/event-stream"
_PIECE_BYTES = 64 * 1024


class DeliveredJson(JsonResponse):
    """A reply that says when its last byte was handed over."""

    def __init__(self, content: Any, sent: Callable[[], None]) -> None:
        # Not the base's: it makes the same of a body that it holds in one piece, and takes several times as long.
        self._pieces = [*coalesced(written(content))]
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [
            (b"content-length", b"%d" % size_of(self._pieces)),
            (b"content-type", b"application/json"),
        ]
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for left, piece in zip(range(len(self._pieces) - 1, -1, -1), self._pieces, strict=True):
            await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
        self._sent()


class DeliveredEvents(Response):
    """A stream whose events are all there."""

    media_type = EVENT_STREAM

    def __init__(self, events: bytes, sent: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._sent()


class DeliveredStream(StreamingResponse):
    """A stream whose events are still to come, from ``work``."""

    def __init__(self, stream: KeepAlive, work: asyncio.Future[None], sent: Callable[[], None]) -> None:
        super().__init__(stream.events(), media_type=EVENT_STREAM, headers={"Cache-Control": "no-cache"})
        self._stream = stream
        self._work = work
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            self._sent()
        finally:
            # Also where the caller left before anything was iterated, and no generator has anything to clean up.
            self._work.cancel()
            await self._stream.aclose()


def pieces(events: Iterable[bytes]) -> Iterable[bytes]:
    """Events joined to pieces that are worth a write."""
    held: list[bytes] = []
    size = 0
    for event in events:
        held.append(event)
        size += len(event)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
