"""Streams and replies to harnesses: keep-alive pings, failures after the headers, and word of what was handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import orjson
import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.errors import ContextOverflowError, anthropic_error, openai_code, openai_error
from nemo_gym.gateway.engines.http import EventReader
from nemo_gym.gateway.wire_data import coalesced, size_of, written
from nemo_gym.http.json_bodies import JsonResponse


def failure_event(
    dialect: Dialect, error: NemoGymError, *, response: Mapping[str, Any] | None = None, number: int = 0
) -> bytes:
    """The last event of a stream that fails; no end marker may follow it. ``response`` and ``number`` are for
    Responses: the response as it was begun, and the event's sequence number."""
    if dialect is Dialect.CHAT:
        return _event(None, openai_error(error)[1])
    if dialect is Dialect.MESSAGES:
        return _event("error", anthropic_error(error)[1])
    known = error.status == 429 or isinstance(error, ContextOverflowError)
    code = openai_code(error) if known else "server_error"
    if response is None:
        return _event(
            "error",
            {"type": "error", "sequence_number": number, "code": code, "message": error.message, "param": None},
        )
    failed = {**response, "status": "failed", "error": {"code": code, "message": error.message}}
    return _event("response.failed", {"type": "response.failed", "sequence_number": number, "response": failed})


def _event(kind: str | None, value: Mapping[str, Any]) -> bytes:
    head = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


# What may stand between the events of a stream to say that the answer is still being made, in each dialect.
#
# | dialect | form | why this one |
# |---|---|---|
# | Chat Completions | a comment | the stream has no event that means nothing |
# | Messages | the event ``ping`` | the dialect's own; may come anywhere, also before ``message_start`` |
# | Responses | ``response.in_progress`` again | idle timers of its clients count events, and comments are none |
#
# Events of Responses are numbered, and nothing may come before ``response.created``. A ping before the first event
# therefore opens the response itself, and what follows is renumbered.

COMMENT = b": ping\n\n"
_OPENING = ("response.created", "response.in_progress")


class Pings:
    """Pings for one stream. Every whole event of the stream passes through ``passing`` first."""

    def __init__(self, dialect: Dialect, opening: Mapping[str, Any] | None = None) -> None:
        """``opening`` is the response object that a stream of Responses will begin with, where it is known before the
        stream begins; without it, pings before the first event are comments."""
        self._dialect = dialect
        self._response: dict[str, Any] | None = None
        self._opening = dict(opening) if opening is not None else None
        self._opened_here = False
        self._number = 0
        """Of the next event of Responses."""
        self._added = 0
        """How many events more than the stream's own have been sent."""

    def ping(self) -> bytes:
        """One ping, a whole event or comment."""
        if self._dialect is Dialect.MESSAGES:
            return b'event: ping\ndata: {"type": "ping"}\n\n'
        if self._dialect is Dialect.CHAT:
            return COMMENT
        if self._response is None:
            if self._opening is None:
                return COMMENT
            self._response, self._opened_here = self._opening, True
            return self._add("response.created") + self._add("response.in_progress")
        return self._add("response.in_progress")

    def passing(self, event: bytes) -> bytes:
        """An event of the stream as it is to be sent; nothing for one that a ping has already said."""
        if self._dialect is not Dialect.RESPONSES:
            return event
        if self._added == 0 and self._response is not None:
            # Once the beginning is known and no ping was needed, nothing has to be read.
            self._number += 1
            return event
        value = _json_of(event)
        if value is None:
            return event
        kind = value.get("type")
        if kind in _OPENING and self._opened_here:
            self._added -= 1
            return b""
        if kind == "response.created" and isinstance(value.get("response"), dict):
            self._response = value["response"]
        if self._added == 0:
            self._number += 1
            return event
        return self._numbered(value)

    def failure_number(self) -> int:
        """The number of an event that ends the stream early."""
        return self._number

    @property
    def response(self) -> Mapping[str, Any] | None:
        """The response as the stream began it, if it has begun."""
        return self._response

    def _add(self, kind: str) -> bytes:
        self._added += 1
        return self._numbered({"type": kind, "response": self._response})

    def _numbered(self, value: dict[str, Any]) -> bytes:
        value = {**value, "sequence_number": self._number}
        self._number += 1
        return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def _json_of(event: bytes) -> dict[str, Any] | None:
    for data in EventReader().feed(event + b"\n\n"):
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        return value if isinstance(value, dict) and "type" in value else None
    return None


# A stream that never goes silent: pings while nothing comes, before the first event and between any two.

PING_INTERVAL_S = 15.0
"""Far below the shortest patience of a known harness after headers (300 s), and of proxies in between (60 s)."""
FIRST_EVENT_GRACE_S = 5.0
log = structlog.get_logger(__name__)


class KeepAlive:
    """Server-sent events, made of ``source`` and pings. ``source`` yields bytes cut anywhere.

    ``await started()`` first: until the grace is over, a failure is raised and can still become a status. Then send
    headers and iterate ``events()``: a failure there becomes the dialect's own event. Closing the iterator closes the
    source, which ends the work for it."""

    def __init__(
        self,
        dialect: Dialect,
        source: AsyncGenerator[bytes, None],
        *,
        opening: Mapping[str, Any] | None = None,
        interval_s: float = PING_INTERVAL_S,
        grace_s: float = FIRST_EVENT_GRACE_S,
    ) -> None:
        """``opening``: see `Pings`. ``interval_s``: silence before a ping. ``grace_s``: how long headers wait for the
        first bytes."""
        self._dialect = dialect
        self._source = source
        self._pings = Pings(dialect, opening)
        self._interval_s = interval_s
        self._grace_s = grace_s
        self._next: asyncio.Task[bytes | None] | None = None
        self._rest = b""
        self.pings = 0

    async def started(self) -> None:
        """Returns when the first bytes are there or the grace is over; raises what the source raises until then."""
        try:
            done = await self._wait(self._grace_s)
            if done and self._next is not None and (error := self._next.exception()) is not None:
                raise error
        except BaseException:
            await self.aclose()
            raise

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events and pings."""
        try:
            while True:
                if not await self._wait(self._interval_s):
                    self.pings += 1
                    yield self._pings.ping()
                    continue
                task, self._next = self._next, None
                assert task is not None
                chunk = task.result()
                if chunk is None:
                    break
                if ready := self._whole(chunk):
                    yield ready
            if self._rest:
                yield self._pings.passing(self._rest)
        except NemoGymError as error:
            log.info("a stream failed after it began", code=error.code, error=str(error))
            yield failure_event(
                self._dialect, error, response=self._pings.response, number=self._pings.failure_number()
            )
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the source. Also needed when `events` was never iterated."""
        task, self._next = self._next, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        elif task is not None and not task.cancelled():
            task.exception()
        await self._source.aclose()

    async def _wait(self, timeout_s: float) -> bool:
        """Whether the next bytes (or the end, or a failure) are there."""
        if self._next is None:
            self._next = asyncio.create_task(self._advance())
        done, _ = await asyncio.wait({self._next}, timeout=timeout_s)
        return bool(done)

    async def _advance(self) -> bytes | None:
        return await anext(self._source, None)

    def _whole(self, chunk: bytes) -> bytes:
        """The events that are complete with ``chunk``: a ping must not fall into the middle of one."""
        text = self._rest + chunk
        ready = b""
        while (end := _event_end(text)) > 0:
            ready += self._pings.passing(text[:end])
            text = text[end:]
        self._rest = text
        return ready


def _event_end(text: bytes) -> int:
    """Where the first event of ``text`` ends, its empty line included; 0 when it does not end."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := text.find(mark)) >= 0]
    return min(ends, default=0)


# Replies that say when they were handed over, so that a retry and a new question can be told apart.

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
