"""One call: lowered to what the policy is asked, answered once, raised to the caller's dialect, delivered.

    body ─▶ lower ─▶ the same as an earlier call whose answer was not delivered? ─ yes ─▶ that answer
                      └ no ─▶ sample ─▶ commit (journal) ─▶ answer ─▶ reply or stream ─▶ sent

A stream is cut from the whole answer after its commit, so nothing is delivered that is not durable; until then the
caller gets keep-alive pings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from secrets import token_hex
from typing import Any, Generic

from starlette.responses import Response
from starlette.types import Receive

from nemo_gym.contract.errors import FencedError, NemoGymError
from nemo_gym.contract.model_limits import (
    NONE_CHOSEN,
    REQUEST_TIMEOUT_S,
    ChosenLimits,
    ModelTimeoutError,
    limited_call,
)
from nemo_gym.gateway.backend import Backend, C, CallContext, D, TurnFacts
from nemo_gym.gateway.capture import CallCapture, CallRecord
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.dialects.adapters import DialectAdapter, adapter_of
from nemo_gym.gateway.dialects.conversation_cache import request_fingerprint
from nemo_gym.gateway.dialects.errors import status_of
from nemo_gym.gateway.durable_sessions import DurableSessions
from nemo_gym.gateway.engines import EngineAnswerTooLargeError, EngineTimeoutError
from nemo_gym.gateway.journal import JournaledBody, SessionState
from nemo_gym.gateway.limits import LARGE_BYTES, LONG_S, CallLimits, LoopTurns, step_begins
from nemo_gym.gateway.live_session import Committed, LargeText, LiveSession, encode_committed, large_texts
from nemo_gym.gateway.policy_request import PolicyRequest, Usage
from nemo_gym.gateway.repeated_requests import Delivery, RequestHints, request_hints
from nemo_gym.gateway.streaming import (
    FIRST_EVENT_GRACE_S,
    PING_INTERVAL_S,
    DeliveredEvents,
    DeliveredJson,
    DeliveredStream,
    KeepAlive,
    pieces,
)
from nemo_gym.gateway.telemetry import answered, model_call
from nemo_gym.gateway.wire_data import size_of
from nemo_gym.http.delivery import (
    CLIENT_CLOSED_REQUEST,
    DELIVERIES,
    AnswerWatch,
    CallerGoneError,
    Connection,
    while_connected,
)
from nemo_gym.http.json_bodies import check_values, json_object

_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.25
"""First and longest interval between two looks at the socket's send queue, for a reply that did not leave at once."""
_LARGE_BODY_BYTES = 1 << 20
ROUTES = {dialect: path for path, dialect in PATHS.items()}


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """In seconds."""

    ping_interval_s: float = PING_INTERVAL_S
    first_event_grace_s: float = FIRST_EVENT_GRACE_S
    """How long the headers of a stream wait for the answer; until then a failure is an HTTP status."""


class Inference(Generic[C, D]):
    """Answers the calls of one gateway."""

    def __init__(
        self,
        backend: Backend[C, D],
        sessions: DurableSessions[C, D],
        *,
        model: str,
        return_token_ids: bool = False,
        timing: StreamTiming | None = None,
        capture: CallCapture | None = None,
        limits: CallLimits | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """``return_token_ids``: replies carry the exact tokens, as NeMo Gym's models do for training."""
        self._backend = backend
        self._sessions = sessions
        self._model = model
        self._return_token_ids = return_token_ids
        self._timing = timing or StreamTiming()
        self._capture = capture
        self.limits = limits or CallLimits()
        self._request_timeout_s = request_timeout_s
        self.turns = LoopTurns()
        self._captures_bodies = capture is not None and capture.bodies

    async def answer_session(
        self, dialect: Dialect, live: LiveSession[C], path: str, parts: list[bytes], request: CallRequest
    ) -> Response:
        """The reply to a call of a session, whose body came in ``parts``: the one way in, whichever route took it."""
        try:
            raw = parts[0] if len(parts) == 1 else await self._joined(parts, live)
            await self._admit(raw, live)
            working = step_begins(len(raw))
            body = json_object(raw, path, live.cache.parse)
            live.share.worked(working)
            return await self.answer(dialect, body, replace(request, body_bytes=len(raw)), live)
        except CallerGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _joined(self, parts: list[bytes], live: LiveSession[C]) -> bytes:
        await self.turns.wait(live.share)
        working = step_begins(sum(map(len, parts)))
        raw = b"".join(parts)
        live.share.worked(working)
        parts.clear()
        return raw

    async def _admit(self, raw: bytes, live: LiveSession[C]) -> None:
        """Before a session's body is parsed. Raises `TooManyValuesError`."""
        await check_values(raw, self.limits.max_body_values)
        if len(raw) > LARGE_BYTES:
            # So that several that come at the same time are not read in one turn of the loop.
            live.share.owed_s = max(live.share.owed_s, LONG_S)
        await self.turns.wait(live.share)

    async def answer(
        self, dialect: Dialect, body: dict[str, Any], request: CallRequest, live: LiveSession[C] | None
    ) -> Response:
        """The reply to one call, ``live`` being its session. A caller that leaves, and a cancellation, end the
        sampling, unless another caller waits for the same answer; the former raises `CallerGoneError`."""
        watch = DELIVERIES.watch(request.connection)
        call = Call(dialect, adapter_of(dialect), body, live, request.connection, watch, None, self._handed_over)
        call.taken_back = self._taken_back
        call.body_bytes = request.body_bytes
        call.record = self._begun(call, request)
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
            self._captured(call)
            if scope.expired():
                raise CallerGoneError from None
            raise
        except BaseException as error:
            if isinstance(error, EngineAnswerTooLargeError):
                self._sessions.memory_is_free = True
            call.failed(error)
            self._captured(call)
            raise
        finally:
            if call.body_bytes > _LARGE_BODY_BYTES:
                self._sessions.memory_is_free = True

    async def _answered(self, call: Call[C], request: CallRequest) -> Response:
        live = call.live
        self.limits.check_body(call.body)
        if live is not None:
            self.limits.check_kept(live.share)
            await self.turns.wait(live.share)
        working = step_begins(call.body_bytes)
        call.lowered = call.adapter.lower(call.body, live.cache if live is not None else None)
        if self._return_token_ids:
            call.lowered = replace(call.lowered, token_ids=True)
        if live is None:
            return await self._reply(call, self._observed(call, request, self._alone(call)))
        live.share.worked(working)
        await self.turns.wait(live.share)
        working = step_begins(call.body_bytes)
        call.fingerprint = request_fingerprint(call.dialect, call.body, live.cache)
        live.share.worked(working)
        hints = request_hints(request.headers, call.connection, live.answered_on(call.fingerprint))
        return await self._reply(call, self._observed(call, request, self._once(call, live, hints)))

    async def _observed(self, call: Call[C], request: CallRequest, work: Coroutine[Any, Any, None]) -> None:
        session = call.live.session if call.live is not None else None
        rollout, session_id = (session.rollout, session.session_id) if session is not None else (None, None)
        with model_call(self._model, str(call.dialect), call.body, request.headers, rollout, session_id) as calling:
            await work
            if call.committed is not None:
                answer, repeated = call.committed.answer, call.delivery is not None and call.delivery.repeated
                said = {"gen_ai.response.id": answer.answer_id, "gen_ai.response.finish_reasons": (str(answer.end),)}
                usage = Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
                answered(calling, None if repeated else usage, repeated=repeated, **said)

    async def _once(self, call: Call[C], live: LiveSession[C], hints: RequestHints) -> None:
        """The session's answer: sampled now, or the one that this call repeats."""
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
            raise refusal  # what is sampled now could not be kept
        await self.turns.wait(live.share)
        context = CallContext(
            live.session_id, call.call_id, live.session.sampling, call.body_bytes, live.share, self.turns
        )
        sampled = await self._sampled(live.conversations, call, context, live.session.limits)
        if call.record is not None:
            call.record.mark("sampled")
        return sampled

    async def _sampled(self, conversations: C, call: Call[C], context: CallContext, limits: ChosenLimits) -> D:
        """Raises `ModelTimeoutError` at the call's limit, and where no engine answered within its own."""
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
        # No await between here and the journal's own record: a turn that is kept is also on its way to the disk.
        conversations = live.conversations
        answer, turn, facts = self._backend.commit(conversations, call.lowered, sampled)
        try:
            pieces = encode_committed(answer, turn)
        except BaseException:
            self._backend.take_back(conversations, facts.turn_id)
            raise
        call.large = large_texts(turn, pieces)
        size = size_of(pieces) - sum(one.length for one in call.large)
        live.share.worked(working)
        index = await self._sessions.journal.commit_turn(
            live.session_id,
            pieces,
            fingerprint=call.fingerprint,
            key=key,
            kept=call.is_kept if call.large else None,
            undo=partial(self._backend.take_back, conversations, facts.turn_id),
        )
        self._sessions.committed(live.session, Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens))
        live.share.kept(turn, size)
        call.sampled(facts)
        return Committed(answer, facts.turn_id, index)

    async def _alone(self, call: Call[C]) -> None:
        """A call without a session: a judge's, or a NeMo Gym agent's. Nothing is kept."""
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
            return DeliveredJson(self._raised(call), call.sent)
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timing.first_event_grace_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            task.result()
            events = call.adapter.events(self._raised(call), call.lowered)
            return DeliveredEvents(b"".join(events), call.sent)
        return self._kept_alive(call, task)

    def _kept_alive(self, call: Call[C], task: asyncio.Future[None]) -> Response:
        async def source() -> AsyncGenerator[bytes, None]:
            try:
                await task
            except NemoGymError as error:
                call.failed(error)
                raise
            finally:
                task.cancel()
            # Under the id that a ping may have opened the stream with, also for an answer that repeats an earlier one.
            reply = self._raised(call, answer_id=call.call_id, created_at=opened_at)
            for piece in pieces(call.adapter.events(reply, call.lowered)):
                yield piece
            call.all_yielded = True

        opened_at = time.time()
        opening = call.adapter.opening(call.call_id, opened_at, self._model, call.lowered, call.body)
        stream = KeepAlive(
            call.dialect, source(), opening=opening, interval_s=self._timing.ping_interval_s, grace_s=0.0
        )

        def ended() -> None:
            if call.all_yielded:
                call.sent()
                return
            if call.record is not None:
                call.record.client_gone = call.record.code is None
            self._captured(call)

        return DeliveredStream(stream, task, ended)

    def _raised(self, call: Call[C], **changed: Any) -> dict[str, Any]:
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

    def _handed_over(self, call: Call[C], delivered: bool) -> None:
        if delivered and call.live is not None and call.delivery is not None and call.committed is not None:
            call.delivery.sent()
            call.live.sent_on(call.fingerprint, call.connection)
            # In the loop's next turn: the reply's bytes leave at the end of this one.
            asyncio.get_running_loop().call_soon(self._note_sent, call, _FIRST_LOOK_S)
        if call.record is not None:
            call.record.status, call.record.client_gone = 200, not delivered
            call.record.mark("sent")
            self._captured(call)

    def _note_sent(self, call: Call[C], look_again_s: float) -> None:
        """In the journal; only once the kernel has all of the reply. What is still here when this process is killed
        reaches nobody, and its caller has to get the same answer from the next."""
        assert call.live is not None and call.delivery is not None and call.committed is not None
        if not call.delivery.counts_as_sent:
            return  # its caller is gone
        if not call.watch.left:
            later = min(2 * look_again_s, _LAST_LOOK_S)
            asyncio.get_running_loop().call_later(look_again_s, self._note_sent, call, later)
            return
        call.noted_as_sent = True
        call.let_go()
        self._sessions.journal.sent(call.live.session_id, call.committed.index)

    def _taken_back(self, call: Call[C]) -> None:
        if call.noted_as_sent and call.live is not None and call.committed is not None:
            self._sessions.journal.undelivered(call.live.session_id, call.committed.index)

    def _begun(self, call: Call[C], request: CallRequest) -> CallRecord | None:
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

    def _captured(self, call: Call[C]) -> None:
        if self._capture is not None and call.record is not None:
            self._capture.record(call.record)


# One call on its way through the gateway.

_NOTHING = PolicyRequest(())


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An HTTP request without its body."""

    headers: Mapping[str, str]
    """By their names in lower case."""
    connection: Connection | None
    receive: Receive
    """As in ASGI, with the body read."""
    body_bytes: int = 0


@dataclass(slots=True)
class Call(Generic[C]):
    """One call on its way through the gateway, and what becomes of it."""

    dialect: Dialect
    adapter: DialectAdapter
    body: Mapping[str, Any]
    live: LiveSession[C] | None
    """Its session; ``None`` for a caller that has none, such as a judge."""
    connection: Connection | None
    watch: AnswerWatch
    record: CallRecord | None
    """For the capture, where there is one."""
    handed_over: Callable[[Call[C], bool], None]
    """Called once the last byte of the answer has left; with whether its caller was still there."""
    body_bytes: int = 0
    call_id: str = field(default_factory=lambda: token_hex(16))
    lowered: PolicyRequest = _NOTHING
    fingerprint: str = ""
    delivery: Delivery[Committed] | None = None
    committed: Committed | None = None
    conversations: C | None = None
    """Only for a call without a session."""
    all_yielded: bool = False
    taken_back: Callable[[Call[C]], None] = lambda call: None
    """Called when it turns out that the caller cannot have read the answer that was handed over."""
    noted_as_sent: bool = False
    """In the journal."""
    large: Sequence[LargeText] = ()
    """What memory holds of its turn until its answer has left."""
    kept: JournaledBody | None = None
    """Where the journal holds that as well."""

    def sent(self) -> None:
        """The last byte of the reply was handed over."""
        self.handed_over(self, self.delivery is None or self.watch.all_sent(self._undelivered))
        # Its connection may stay open for long, and this with it.
        self.body, self.lowered = {}, _NOTHING

    def _undelivered(self) -> None:
        assert self.delivery is not None
        self.delivery.undelivered()
        self.taken_back(self)

    def is_kept(self, body: JournaledBody) -> None:
        """The journal has, or will have once it is durable, the body of this call's turn."""
        self.kept = body

    def let_go(self) -> None:
        """The answer has left, and its turn is durable."""
        if self.kept is not None:
            for one in self.large:
                one.let_go(self.kept)
        self.large, self.kept = (), None

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
