"""One inference call: lowered to a policy request, answered once, raised to the caller's dialect, delivered.

    body ─▶ lower ─▶ equal to an earlier call whose answer was not delivered? ─ yes ─▶ that answer
                      └ no ─▶ sample ─▶ commit (journal) ─▶ answer ─▶ reply or stream ─▶ sent

A stream is cut from the whole answer after its commit, so nothing is delivered before it is durable; until then the
caller gets keep-alive pings. A failure after the headers becomes an event of the stream. The gateway notes when a
reply has been handed over, so that a retry gets the same answer again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from secrets import token_hex
from typing import Any, Generic, TypeVar

import orjson
import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nemo_gym.contract.errors import FencedError, NemoGymError
from nemo_gym.contract.session import NONE_CHOSEN, REQUEST_TIMEOUT_S, ChosenLimits
from nemo_gym.gateway.backend import (
    LARGE_BYTES,
    LONG_S,
    SMALL_BYTES,
    Backend,
    C,
    CallContext,
    CallLimits,
    D,
    LoopTurns,
    SessionShare,
    TurnFacts,
    step_begins,
)
from nemo_gym.gateway.capture import CallCapture, CallRecord
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS, EVENT_STREAM
from nemo_gym.gateway.dialects.chat import DialectAdapter, request_fingerprint
from nemo_gym.gateway.dialects.content import remote_images
from nemo_gym.gateway.dialects.errors import (
    ContextOverflowError,
    error_body,
    openai_code,
    status_of,
)
from nemo_gym.gateway.durable_sessions import DurableSessions
from nemo_gym.gateway.engines import EngineAnswerTooLargeError, EngineTimeoutError
from nemo_gym.gateway.engines.http import EventReader
from nemo_gym.gateway.journal import JournaledBody, SessionState
from nemo_gym.gateway.live_session import (
    Committed,
    Delivery,
    LargeText,
    LiveSession,
    RequestHints,
    encode_committed,
    large_texts,
    request_hints,
)
from nemo_gym.gateway.policy_request import (
    Buffer,
    ModelTimeoutError,
    PolicyRequest,
    Usage,
    answered,
    coalesced,
    limited_call,
    model_call,
    size_of,
    written,
)
from nemo_gym.http.delivery import (
    CLIENT_CLOSED_REQUEST,
    DELIVERIES,
    AnswerWatch,
    CallerGoneError,
    Connection,
    while_connected,
)
from nemo_gym.http.requests import JsonResponse, check_messages, check_values, json_object


def failure_event(
    dialect: Dialect, error: NemoGymError, *, response: Mapping[str, Any] | None = None, number: int = 0
) -> bytes:
    """Return the last event of a stream that fails; no end marker may follow it. ``response`` and ``number`` are for
    Responses: the response object as the stream began it, and the event's sequence number."""
    if dialect is Dialect.CHAT:
        return _event(None, error_body(dialect, error)[1])
    if dialect is Dialect.MESSAGES:
        return _event("error", error_body(dialect, error)[1])
    has_own_code = error.status == 429 or isinstance(error, ContextOverflowError)
    code = openai_code(error) if has_own_code else "server_error"
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


# Keep-alive pings between the events of a stream, in each dialect.
#
# | dialect | form | why this one |
# |---|---|---|
# | Chat Completions | a comment | the dialect has no event without a meaning |
# | Messages | the event ``ping`` | the dialect's own; may come anywhere, also before ``message_start`` |
# | Responses | ``response.in_progress`` again | a comment does not reset its clients' idle timers, an event does |
#
# Events of Responses are numbered, and no event may come before ``response.created``. A ping before the first event
# therefore opens the response itself, and the events after it are renumbered.

COMMENT = b": ping\n\n"
_OPENING = ("response.created", "response.in_progress")


class Pings:
    """Pings for one stream. Pass every whole event of the stream through ``passing`` before it is sent."""

    def __init__(self, dialect: Dialect, opening: Mapping[str, Any] | None = None) -> None:
        """``opening`` is the response object that a stream of Responses will begin with, if it is known in advance;
        without it, pings before the first event are comments."""
        self._dialect = dialect
        self.response: dict[str, Any] | None = None
        """The response object as the stream began it, if it has begun."""
        self._opening = dict(opening) if opening is not None else None
        self._opened_here = False
        self.number = 0
        """The sequence number of the next event of Responses."""
        self._added = 0
        """How many more events have been sent than ``passing`` was given."""

    def ping(self) -> bytes:
        """Return one ping, a whole event or comment."""
        if self._dialect is Dialect.MESSAGES:
            return b'event: ping\ndata: {"type": "ping"}\n\n'
        if self._dialect is Dialect.CHAT:
            return COMMENT
        if self.response is None:
            if self._opening is None:
                return COMMENT
            self.response, self._opened_here = self._opening, True
            return self._add("response.created") + self._add("response.in_progress")
        return self._add("response.in_progress")

    def passing(self, event: bytes) -> bytes:
        """Return an event of the stream as it is to be sent; empty for an opening event that a ping has sent."""
        if self._dialect is not Dialect.RESPONSES:
            return event
        if self._added == 0 and self.response is not None:
            # Once the beginning is known and while no ping has been sent, events need no parsing.
            self.number += 1
            return event
        value = _json_of(event)
        if value is None:
            return event
        kind = value.get("type")
        if kind in _OPENING and self._opened_here:
            self._added -= 1
            return b""
        if kind == "response.created" and isinstance(value.get("response"), dict):
            self.response = value["response"]
        if self._added == 0:
            self.number += 1
            return event
        return self._numbered(value)

    def _add(self, kind: str) -> bytes:
        self._added += 1
        return self._numbered({"type": kind, "response": self.response})

    def _numbered(self, value: dict[str, Any]) -> bytes:
        value = {**value, "sequence_number": self.number}
        self.number += 1
        return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def _json_of(event: bytes) -> dict[str, Any] | None:
    for data in EventReader().feed(event + b"\n\n"):
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return None
        return value if isinstance(value, dict) and "type" in value else None
    return None


# A stream that never goes silent: pings fill the gaps before the first event and between any two.

PING_INTERVAL_S = 15.0
"""Far below the shortest idle timeout of a known harness after headers (300 s) and of proxies in between (60 s)."""
FIRST_EVENT_GRACE_S = 5.0
log = structlog.get_logger(__name__)


class KeepAlive:
    """The server-sent events of ``source``, with pings between them. ``source`` may cut its bytes anywhere.

    A failure becomes the dialect's error event. Closing the iterator of ``events()`` closes the source, which ends the
    work behind it."""

    def __init__(
        self,
        dialect: Dialect,
        source: AsyncGenerator[bytes, None],
        *,
        opening: Mapping[str, Any] | None = None,
        interval_s: float = PING_INTERVAL_S,
    ) -> None:
        """``opening``: see `Pings`. ``interval_s``: silence before a ping."""
        self._dialect = dialect
        self._source = source
        self._pings = Pings(dialect, opening)
        self._interval_s = interval_s
        self._next: asyncio.Task[bytes | None] | None = None
        self._incomplete_event = b""
        self.pings = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Whole events and pings."""
        try:
            while True:
                if self._next is None:
                    self._next = asyncio.create_task(self._advance())
                task = self._next
                done, _ = await asyncio.wait({task}, timeout=self._interval_s)
                if not done:
                    self.pings += 1
                    yield self._pings.ping()
                    continue
                self._next = None
                chunk = task.result()
                if chunk is None:
                    break
                if ready := self._complete_events(chunk):
                    yield ready
            if self._incomplete_event:
                yield self._pings.passing(self._incomplete_event)
        except NemoGymError as error:
            log.info("a stream failed after it began", code=error.code, error=str(error))
            yield failure_event(self._dialect, error, response=self._pings.response, number=self._pings.number)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the source. Needed even if `events` was never iterated."""
        task, self._next = self._next, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        elif task is not None and not task.cancelled():
            task.exception()
        await self._source.aclose()

    async def _advance(self) -> bytes | None:
        return await anext(self._source, None)

    def _complete_events(self, chunk: bytes) -> bytes:
        """Return the events that ``chunk`` completes: a ping must not fall into the middle of an event."""
        text = self._incomplete_event + chunk
        ready = b""
        while (end := _event_end(text)) > 0:
            ready += self._pings.passing(text[:end])
            text = text[end:]
        self._incomplete_event = text
        return ready


def _event_end(text: bytes) -> int:
    """Return where the first event of ``text`` ends, after its empty line; 0 if it is incomplete."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := text.find(mark)) >= 0]
    return min(ends, default=0)


# Replies that report when they were handed over, so that a retry can be told from a new sample.


class DeliveredJson(JsonResponse):
    """A JSON reply that calls ``sent`` when its last byte was handed over."""

    def __init__(self, content: Any, sent: Callable[[], None]) -> None:
        # Does not call the base's __init__, which joins the body in one piece and takes several times as long.
        self._pieces = [*coalesced(written(content))]
        self.size = size_of(self._pieces)
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [
            (b"content-length", b"%d" % self.size),
            (b"content-type", b"application/json"),
        ]
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for remaining, piece in zip(range(len(self._pieces) - 1, -1, -1), self._pieces, strict=True):
            await send({"type": "http.response.body", "body": piece, "more_body": remaining > 0})
        self._sent()


class DeliveredEvents(Response):
    """A stream whose events are all available."""

    media_type = EVENT_STREAM

    def __init__(self, events: bytes, sent: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._sent()


class ClaimedReply(Response):
    """A large reply that calls ``written`` once all of it was handed over, or sending it failed."""

    def __init__(self, reply: Response, written: Callable[[], None]) -> None:
        self.status_code = reply.status_code
        self.background = None
        self._reply = reply
        self._written = written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._reply(scope, receive, send)
        finally:
            self._written()


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
            # If the caller left before the first iteration, no generator's cleanup runs.
            self._work.cancel()
            await self._stream.aclose()


R = TypeVar("R")
_FIRST_CHECK_S, _LONGEST_CHECK_S = 0.002, 0.25
"""First and longest interval between two checks whether the kernel has taken all of a reply."""
_LARGE_BODY_BYTES = 1 << 20
ROUTES = {dialect: path for path, dialect in PATHS.items()}


class Inference(Generic[C, D]):
    """Answers the calls of one gateway."""

    def __init__(
        self,
        backend: Backend[C, D],
        sessions: DurableSessions[C, D],
        *,
        model: str,
        return_token_ids: bool = False,
        ping_interval_s: float = PING_INTERVAL_S,
        first_event_grace_s: float = FIRST_EVENT_GRACE_S,
        capture: CallCapture | None = None,
        limits: CallLimits | None = None,
        remote_images: bool = False,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """``return_token_ids``: replies carry the exact tokens, as NeMo Gym's models do for training.
        ``first_event_grace_s``: how long the headers of a stream wait for the answer; a failure within that time
        becomes an HTTP status. ``remote_images``: whether calls of sessions may name images by address."""
        self._backend = backend
        self._sessions = sessions
        self._model = model
        self._return_token_ids = return_token_ids
        self._ping_interval_s = ping_interval_s
        self._first_event_grace_s = first_event_grace_s
        self._capture = capture
        self.limits = limits or CallLimits()
        self._remote_images = remote_images
        self._request_timeout_s = request_timeout_s
        self.turns = LoopTurns()
        self._captures_bodies = capture is not None and capture.bodies

    async def answer_session(
        self, dialect: Dialect, live: LiveSession[C], path: str, parts: list[bytes], request: CallRequest
    ) -> Response:
        """Return the reply to a session's call, whose body arrived in ``parts``. All routes for sessions end here."""
        watch = DELIVERIES.watch(request.connection)  # before the first wait, in which the caller may leave
        try:
            raw = parts[0] if len(parts) == 1 else await self._joined(parts, live)
            await self.admit(raw, live.share)
            if watch.lost:
                raise CallerGoneError
            working = step_begins(len(raw))
            body = json_object(raw, path, live.cache.parse, checks_depth=False)
            live.share.worked(working)
            return await self.answer(dialect, body, replace(request, body_bytes=len(raw)), live, watch)
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _joined(self, parts: list[bytes], live: LiveSession[C]) -> bytes:
        await self.turns.wait(live.share)
        working = step_begins(sum(map(len, parts)))
        raw = b"".join(parts)
        live.share.worked(working)
        parts.clear()
        return raw

    async def admit(self, raw: bytes, share: SessionShare) -> None:
        """Check and delay a session's body before it is parsed. Raises `TooManyValuesError`."""
        await check_values(raw, self.limits.max_body_values)
        if len(raw) > LARGE_BYTES:
            # So that several large bodies that arrive together are not parsed in one turn of the loop.
            share.owed_s = max(share.owed_s, LONG_S)
        await self.turns.wait(share)

    async def answer(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        request: CallRequest,
        live: LiveSession[C] | None,
        watch: AnswerWatch | None = None,
    ) -> Response:
        """Return the reply to one call of the session ``live``. The sampling ends if the caller leaves or this task is
        cancelled, unless another caller waits for the same answer. Raises `CallerGoneError` if the caller left."""
        watch = watch or DELIVERIES.watch(request.connection)
        call: Call[C] = Call(dialect, ADAPTERS[dialect], body, live, request.connection, watch, request.body_bytes)
        call.record = self._new_record(call, request)
        try:
            if not watch.watched:
                return await while_connected(request, self._answered(call, request))
            async with asyncio.timeout(None) as scope:
                loop = asyncio.get_running_loop()
                watch.when_lost(lambda: scope.reschedule(loop.time()))
                try:
                    return await self._answered(call, request)
                finally:
                    watch.when_lost(None)
        except TimeoutError as error:
            call.failed(error)
            self._capture_record(call)
            if scope.expired():
                raise CallerGoneError from None
            raise
        except BaseException as error:
            if isinstance(error, EngineAnswerTooLargeError):
                self._sessions.memory_is_free = True
            call.failed(error)
            self._capture_record(call)
            raise
        finally:
            if call.body_bytes > _LARGE_BODY_BYTES:
                self._sessions.memory_is_free = True

    async def _answered(self, call: Call[C], request: CallRequest) -> Response:
        live = call.live
        check_messages(call.body, self.limits.max_messages)
        if live is not None:
            self.limits.check_share(live.share)
            await self.turns.wait(live.share)
        remote_images.set(live is None or self._remote_images)  # in this call's context
        working = step_begins(call.body_bytes)
        call.lowered = call.adapter.lower(call.body, live.cache if live is not None else None)
        if self._return_token_ids:
            call.lowered = replace(call.lowered, token_ids=True)
        if live is None:
            return await self._reply(call, self._observed(call, request, self._answer_without_session(call)))
        live.share.worked(working)
        await self.turns.wait(live.share)
        working = step_begins(call.body_bytes)
        call.fingerprint = request_fingerprint(call.dialect, call.body, live.cache)
        live.share.worked(working)
        hints = request_hints(request.headers, call.connection, live.answered_on(call.fingerprint))
        return await self._reply(call, self._observed(call, request, self._answer_once(call, live, hints)))

    async def _observed(self, call: Call[C], request: CallRequest, work: Coroutine[Any, Any, None]) -> None:
        session = call.live.session if call.live is not None else None
        rollout, session_id = (session.rollout, session.session_id) if session is not None else (None, None)
        with model_call(self._model, str(call.dialect), call.body, request.headers, rollout, session_id) as calling:
            await work
            if call.committed is not None:
                answer, repeated = call.committed.answer, call.delivery is not None and call.delivery.repeated
                attributes = {
                    "gen_ai.response.id": answer.answer_id,
                    "gen_ai.response.finish_reasons": (str(answer.end),),
                }
                usage = Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
                answered(calling, None if repeated else usage, repeated=repeated, **attributes)

    async def _answer_once(self, call: Call[C], live: LiveSession[C], hints: RequestHints) -> None:
        """Sample the session's answer, or reuse the answer of the call that this one repeats."""
        live.in_flight += 1
        try:
            call.delivery = await live.answers.once(
                call.fingerprint,
                lambda: self._sample(live, call),
                lambda sampled: self._commit(live, call, sampled, hints.key),
                key=hints.key,
                repeat=hints.repeat,
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if live.state is not SessionState.OPEN and task is not None and not task.cancelling():
                # The session was closed, not this call.
                raise FencedError(f"session '{live.session_id}' is {live.state}") from None
            raise
        finally:
            live.in_flight -= 1
        call.answered(call.delivery.answer, repeated=call.delivery.repeated)

    async def _sample(self, live: LiveSession[C], call: Call[C]) -> D:
        if (refusal := self._sessions.journal.log.refusal) is not None:
            raise refusal  # the journal could not store what would be sampled now
        await self.turns.wait(live.share)
        context = CallContext(
            live.session_id, call.call_id, live.session.sampling, call.body_bytes, live.share, self.turns
        )
        sampled = await self._sampled(live.conversations, call, context, live.session.limits)
        if call.record is not None:
            call.record.mark("sampled")
        return sampled

    async def _sampled(self, conversations: C, call: Call[C], context: CallContext, limits: ChosenLimits) -> D:
        """Sample an answer. Raises `ModelTimeoutError` at the call's time limit, and if every engine timed out."""
        try:
            async with limited_call(limits, self._request_timeout_s):
                return await self._backend.sample(conversations, call.lowered, context)
        except EngineTimeoutError as error:
            raise ModelTimeoutError(error.message, **error.details) from error

    async def _commit(self, live: LiveSession[C], call: Call[C], sampled: D, key: str | None) -> Committed:
        await self.turns.wait(live.share)
        if live.state is not SessionState.OPEN:
            raise FencedError(f"session '{live.session_id}' is {live.state}", session_id=live.session_id)
        working = step_begins(call.body_bytes)
        # No await between here and the journal's own record: a turn in memory is also on its way to the disk.
        conversations = live.conversations
        answer, turn, facts = self._backend.commit(conversations, call.lowered, sampled)
        try:
            pieces = encode_committed(answer, turn)
        except BaseException:
            self._backend.take_back(conversations, facts.turn_id)
            raise
        call.large = large_texts(turn, pieces)
        whole = size_of(pieces)
        size = whole - sum(text.length for text in call.large)
        live.share.worked(working)
        index, call.journaled = await self._sessions.journal.commit_turn(
            live.session_id,
            pieces,
            fingerprint=call.fingerprint,
            key=key,
            undo=partial(self._backend.take_back, conversations, facts.turn_id),
        )
        live.session.count(Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens))
        live.share.count_turn(turn, size)
        call.sampled(facts)
        return Committed(answer, facts.turn_id, index, whole)

    async def _answer_without_session(self, call: Call[C]) -> None:
        """Answer a call without a session (of a judge, or of a NeMo Gym agent). Nothing is stored."""
        conversations = self._backend.conversations(datetime.now().astimezone())
        context = CallContext(None, call.call_id, body_bytes=call.body_bytes)
        sampled = await self._sampled(conversations, call, context, NONE_CHOSEN)
        answer, _, facts = self._backend.commit(conversations, call.lowered, sampled)
        call.conversations = conversations
        call.sampled(facts)
        call.answered(Committed(answer, facts.turn_id), repeated=False)

    async def _reply(self, call: Call[C], work: Coroutine[Any, Any, None]) -> Response:
        if not call.lowered.stream:
            await work
            return await self._rendered_reply(call, lambda: self._whole_reply(call))
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._first_event_grace_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            task.result()
            return await self._rendered_reply(call, lambda: self._whole_stream(call))
        return self._streamed_reply(call, task)

    async def _rendered_reply(self, call: Call[C], render: Callable[[], tuple[Response, int]]) -> Response:
        reply, size = await self._rendered(call, render)
        written = self._claim(call, size)
        return reply if written is None else ClaimedReply(reply, written)

    async def _rendered(self, call: Call[C], render: Callable[[], R]) -> R:
        """Render a committed answer, a step that is charged to its session."""
        if call.live is None:
            return render()
        assert call.committed is not None
        await self.turns.wait(call.live.share)
        working = step_begins(call.committed.size)
        rendered = render()
        call.live.share.worked(working)
        return rendered

    def _claim(self, call: Call[C], size: int) -> Callable[[], None] | None:
        """Claim a large reply for its session until its caller has taken it. Returns what to call once all of it was
        handed over. Raises `SessionBusyError`; a repeated call gets the same answer later."""
        if size <= SMALL_BYTES or call.live is None or not call.watch.watched:
            return None
        share = call.live.share
        share.claim_reply(size, self.limits.max_session_in_flight_bytes)
        return partial(_release, share, size, call.watch, _FIRST_CHECK_S)

    def _whole_reply(self, call: Call[C]) -> tuple[Response, int]:
        reply = DeliveredJson(self._reply_body(call), partial(self._sent, call))
        return reply, reply.size

    def _whole_stream(self, call: Call[C]) -> tuple[Response, int]:
        events = b"".join(call.adapter.events(self._reply_body(call), with_usage=call.lowered.stream_usage))
        return DeliveredEvents(events, partial(self._sent, call)), len(events)

    def _streamed_reply(self, call: Call[C], task: asyncio.Future[None]) -> Response:
        all_yielded = False

        async def source() -> AsyncGenerator[bytes, None]:
            nonlocal all_yielded
            try:
                await task
            except NemoGymError as error:
                call.failed(error)
                raise
            finally:
                task.cancel()
            # With the id under which a ping may have opened the stream, even if the answer repeats an earlier one.
            pieces = await self._rendered(call, render)
            written = self._claim(call, size_of(pieces))
            try:
                for piece in pieces:
                    yield bytes(piece)
                all_yielded = True
            finally:
                if written is not None:
                    written()

        def render() -> list[Buffer]:
            reply = self._reply_body(call, answer_id=call.call_id, created_at=opened_at)
            return [*coalesced(call.adapter.events(reply, with_usage=call.lowered.stream_usage))]

        opened_at = time.time()
        opening = call.adapter.opening(call.call_id, opened_at, self._model, call.body)
        stream = KeepAlive(call.dialect, source(), opening=opening, interval_s=self._ping_interval_s)

        def ended() -> None:
            if all_yielded:
                self._sent(call)
                return
            if call.record is not None:
                call.record.client_gone = call.record.code is None
            self._capture_record(call)

        return DeliveredStream(stream, task, ended)

    def _reply_body(self, call: Call[C], **changed: Any) -> dict[str, Any]:
        assert call.committed is not None
        answer = replace(call.committed.answer, **changed) if changed else call.committed.answer
        if call.lowered.logprobs or call.lowered.token_ids:
            conversations = call.live.conversations if call.live is not None else call.conversations
            assert conversations is not None
            relayed = call.dialect is Dialect.CHAT and not call.lowered.stream and not self._captures_bodies
            tokens = conversations.tokens_of(call.committed.turn_id, texts=call.lowered.logprobs, relayed=relayed)
            answer = replace(answer, tokens=tokens)
        reply = call.adapter.reply(answer, call.lowered, call.body)
        if call.record is not None and self._captures_bodies:
            call.record.answer = reply
        return reply

    def _sent(self, call: Call[C]) -> None:
        """The last byte of the reply was handed over."""
        delivered = call.delivery is None or call.watch.all_sent(partial(self._undelivered, call))
        if delivered and call.live is not None and call.delivery is not None and call.committed is not None:
            call.delivery.sent()
            call.live.sent_on(call.fingerprint, call.connection)
            # In the loop's next turn: the reply's bytes leave at the end of this one.
            asyncio.get_running_loop().call_soon(self._note_sent, call, _FIRST_CHECK_S)
        if call.record is not None:
            call.record.status, call.record.client_gone = 200, not delivered
            call.record.mark("sent")
            self._capture_record(call)
        # The connection may stay open for long and hold on to this object.
        call.body, call.lowered = {}, _NOTHING

    def _note_sent(self, call: Call[C], look_again_s: float) -> None:
        """Note a reply as sent in the journal, once the kernel has taken all of it. What is still in this process when
        it is killed reaches nobody, and the next process has to give the caller the same answer."""
        assert call.live is not None and call.delivery is not None and call.committed is not None
        if not call.delivery.counts_as_sent:
            return  # the caller is gone
        if not call.watch.left:
            later = min(2 * look_again_s, _LONGEST_CHECK_S)
            asyncio.get_running_loop().call_later(look_again_s, self._note_sent, call, later)
            return
        call.noted_as_sent = True
        if call.journaled is not None:  # the answer has left, and its turn is durable
            for text in call.large:
                text.let_go(call.journaled)
        call.large = ()
        self._sessions.journal.sent(call.live.session_id, call.committed.index)

    def _undelivered(self, call: Call[C]) -> None:
        """The caller cannot have read the answer that was handed over."""
        assert call.delivery is not None
        call.delivery.undelivered()
        if call.noted_as_sent and call.live is not None and call.committed is not None:
            self._sessions.journal.undelivered(call.live.session_id, call.committed.index)

    def _new_record(self, call: Call[C], request: CallRequest) -> CallRecord | None:
        if self._capture is None:
            return None
        session = call.live.session if call.live is not None else None
        retries = request.headers.get("x-stainless-retry-count", "")
        return CallRecord(
            call.call_id,
            str(call.dialect),
            ROUTES[call.dialect],
            session.session_id if session is not None else None,
            session.rollout.model_dump(mode="json") if session is not None else None,
            stream=bool(call.body.get("stream")),
            retry_count=int(retries) if retries.isdecimal() and len(retries) < 10 else None,
            user_agent=request.headers.get("user-agent"),
            request_bytes=int(request.headers.get("content-length") or 0),
            request=call.body if self._capture.bodies else None,
        )

    def _capture_record(self, call: Call[C]) -> None:
        if self._capture is not None and call.record is not None:
            self._capture.record(call.record)


def _release(share: SessionShare, size: int, watch: AnswerWatch, look_again_s: float) -> None:
    """End the claim of a reply that was handed over, once none of it is left in this process."""
    if watch.holds_bytes:
        later = min(2 * look_again_s, _LONGEST_CHECK_S)
        asyncio.get_running_loop().call_later(look_again_s, _release, share, size, watch, later)
    else:
        share.reply_left(size)


# One call on its way through the gateway.

_NOTHING = PolicyRequest(())


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An HTTP request without its body."""

    headers: Mapping[str, str]
    """By lower-case names."""
    connection: Connection | None
    receive: Receive
    """ASGI's ``receive``, after the body was read."""
    body_bytes: int = 0


@dataclass(slots=True)
class Call(Generic[C]):
    """The state of one call on its way through the gateway."""

    dialect: Dialect
    adapter: DialectAdapter
    body: Mapping[str, Any]
    live: LiveSession[C] | None
    """Its session; ``None`` for a caller that has none, such as a judge."""
    connection: Connection | None
    watch: AnswerWatch
    body_bytes: int
    record: CallRecord | None = None
    """For the capture, where there is one."""
    call_id: str = field(default_factory=lambda: token_hex(16))
    lowered: PolicyRequest = _NOTHING
    fingerprint: str = ""
    delivery: Delivery[Committed] | None = None
    committed: Committed | None = None
    conversations: C | None = None
    """Only for a call without a session."""
    noted_as_sent: bool = False
    """Whether the journal has the answer as sent."""
    large: Sequence[LargeText] = ()
    """The large texts of its turn, which stay in memory until the answer has left."""
    journaled: JournaledBody | None = None
    """Where the journal has its turn; set once the turn is durable."""

    def answered(self, committed: Committed, *, repeated: bool) -> None:
        self.committed = committed
        if (record := self.record) is not None:
            usage = committed.answer.usage
            record.repeated, record.finish, record.turn = repeated, str(committed.answer.end), committed.turn_id
            record.usage = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}

    def sampled(self, facts: TurnFacts) -> None:
        if (record := self.record) is not None:
            record.mark("committed")
            record.engines, record.weights_version = facts.engines, facts.weights_version
            record.split_reason = str(facts.split_reason) if facts.split_reason is not None else None

    def failed(self, error: BaseException) -> None:
        if (record := self.record) is None:
            return
        if isinstance(error, NemoGymError):
            record.status, record.code, record.error = status_of(error), error.code, error.message
        else:
            record.client_gone = True
