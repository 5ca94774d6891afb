"""One call: lowered to what the policy is asked, answered once, raised to the caller's dialect, delivered.

    body ─▶ lower ─▶ the same as an earlier call whose answer was not delivered? ─ yes ─▶ that answer
                      └ no ─▶ sample ─▶ commit (journal) ─▶ answer ─▶ reply or stream ─▶ sent

A stream is cut from the whole answer after its commit, so nothing is delivered that is not durable; until then the
caller gets keep-alive pings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nemo_gym.errors import FencedError
from nemo_gym.gateway.delivery import DELIVERIES, AnswerWatch
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import DialectAdapter, adapter_of
from nemo_gym.gateway.journal import SessionState
from nemo_gym.gateway.lowered import LoweredRequest
from nemo_gym.gateway.retries import Delivery, request_fingerprint, request_hints
from nemo_gym.gateway.retries.hints import Connection
from nemo_gym.gateway.service.backend import Backend, C, CallContext, D
from nemo_gym.gateway.service.committed import Committed, encode_committed
from nemo_gym.gateway.service.live import LiveSession
from nemo_gym.gateway.service.sessions import DurableSessions
from nemo_gym.gateway.streaming import FIRST_EVENT_GRACE_S, PING_INTERVAL_S, KeepAlive
from nemo_gym.gateway.usage import Usage
from nemo_gym.serving.disconnect import CallerGoneError, while_connected
from nemo_gym.serving.problems import JsonResponse

EVENT_STREAM = "text/event-stream"
_PIECE_BYTES = 64 * 1024


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
    ) -> None:
        """``return_token_ids``: replies carry the exact tokens, as NeMo Gym's models do for training."""
        self._backend = backend
        self._sessions = sessions
        self._model = model
        self._return_token_ids = return_token_ids
        self._timing = timing or StreamTiming()

    async def answer(
        self, dialect: Dialect, body: dict[str, Any], request: Request, live: LiveSession[C] | None
    ) -> Response:
        """The reply to one call, ``live`` being its session. A caller that leaves, and a cancellation, end the
        sampling, unless another caller waits for the same answer; the former raises `CallerGoneError`."""
        watch = DELIVERIES.watch(_connection(request))
        if not watch.watched:
            return await while_connected(request, lambda: self._answered(dialect, body, request, live, watch))
        try:
            async with asyncio.timeout(None) as scope:
                loop = asyncio.get_running_loop()
                watch.when_lost(lambda: scope.reschedule(loop.time()))
                try:
                    return await self._answered(dialect, body, request, live, watch)
                finally:
                    watch.when_lost(None)
        except TimeoutError:
            if scope.expired():
                raise CallerGoneError from None
            raise

    async def _answered(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        request: Request,
        live: LiveSession[C] | None,
        watch: AnswerWatch,
    ) -> Response:
        adapter = adapter_of(dialect)
        lowered = adapter.lower(body)
        call = _Call(self, dialect, adapter, body, lowered, live, _connection(request), watch)
        if live is None:
            return await self._reply(call, self._alone)
        fingerprint = request_fingerprint(dialect, body)
        hints = request_hints(request.headers, call.connection, live.answered_on(fingerprint))
        call.fingerprint = fingerprint

        async def once(call: _Call[C, D]) -> None:
            live.in_flight += 1
            try:
                call.delivery = await live.answers.once(
                    fingerprint,
                    lambda: self._sample(live, call),
                    lambda sampled: self._commit(live, call, sampled, hints.key),
                    key=hints.key,
                    repeat=hints.repeat,
                )
                call.committed = call.delivery.answer
            finally:
                live.in_flight -= 1

        return await self._reply(call, once)

    async def _sample(self, live: LiveSession[C], call: _Call[C, D]) -> D:
        context = CallContext(live.session_id, call.call_id, live.session.sampling)
        return await self._backend.sample(live.conversations, call.lowered, context)

    async def _commit(self, live: LiveSession[C], call: _Call[C, D], sampled: D, key: str | None) -> Committed:
        if live.state is not SessionState.OPEN:
            raise FencedError(f"session '{live.session_id}' is {live.state}", session_id=live.session_id)
        # No await between here and the journal's own record: a turn that is kept is also on its way to the disk.
        answer, turn, facts = self._backend.commit(live.conversations, call.lowered, sampled)
        index = await self._sessions.journal.commit_turn(
            live.session_id, encode_committed(answer, turn), fingerprint=call.fingerprint, key=key
        )
        self._sessions.committed(live.session, Usage(answer.usage.prompt_tokens, answer.usage.completion_tokens))
        return Committed(answer, facts.turn_id, index)

    async def _alone(self, call: _Call[C, D]) -> None:
        """A call without a session: a judge's, or a NeMo Gym agent's. Nothing is kept."""
        conversations = self._backend.conversations(datetime.now().astimezone())
        sampled = await self._backend.sample(conversations, call.lowered, CallContext(None, call.call_id))
        answer, _, facts = self._backend.commit(conversations, call.lowered, sampled)
        call.committed = Committed(answer, facts.turn_id)
        call.conversations = conversations

    async def _reply(self, call: _Call[C, D], work: Callable[[_Call[C, D]], Awaitable[None]]) -> Response:
        if not call.lowered.stream:
            await work(call)
            return DeliveredJson(self._raised(call), call.sent)
        task = asyncio.ensure_future(work(call))
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

    def _kept_alive(self, call: _Call[C, D], task: asyncio.Future[None]) -> Response:
        async def source() -> AsyncGenerator[bytes, None]:
            try:
                await task
            finally:
                task.cancel()
            # Under the id that a ping may have opened the stream with, also for an answer that repeats an earlier one.
            reply = self._raised(call, answer_id=call.call_id, created_at=opened_at)
            for piece in _pieces(call.adapter.events(reply, call.lowered)):
                yield piece
            call.all_yielded = True

        opened_at = time.time()
        opening = call.adapter.opening(call.call_id, opened_at, self._model, call.lowered, call.body)
        stream = KeepAlive(
            call.dialect, source(), opening=opening, interval_s=self._timing.ping_interval_s, grace_s=0.0
        )
        return DeliveredStream(stream, task, call.sent_if_complete)

    def _raised(self, call: _Call[C, D], **changed: Any) -> dict[str, Any]:
        assert call.committed is not None
        answer = replace(call.committed.answer, **changed) if changed else call.committed.answer
        if call.lowered.logprobs or self._return_token_ids:
            conversations = call.live.conversations if call.live is not None else call.conversations
            assert conversations is not None
            answer = replace(answer, tokens=conversations.tokens_of(call.committed.turn_id))
        return call.adapter.reply(answer, call.lowered, call.body)

    def sent(self, live: LiveSession[C], committed: Committed) -> None:
        self._sessions.journal.sent(live.session_id, committed.index)


@dataclass(slots=True)
class _Call(Generic[C, D]):
    """One call on its way."""

    inference: Inference[C, D]
    dialect: Dialect
    adapter: DialectAdapter
    body: Mapping[str, Any]
    lowered: LoweredRequest
    live: LiveSession[C] | None
    connection: Connection | None
    watch: AnswerWatch
    call_id: str = field(default_factory=lambda: uuid4().hex)
    fingerprint: str = ""
    delivery: Delivery[Committed] | None = None
    committed: Committed | None = None
    conversations: C | None = None
    all_yielded: bool = False

    def sent(self) -> None:
        """The last byte of the reply was handed over."""
        if self.live is None or self.delivery is None or self.committed is None:
            return
        if self.watch.all_sent(self.delivery.undelivered):
            self.delivery.sent()
            self.live.sent_on(self.fingerprint, self.connection)
            self.inference.sent(self.live, self.committed)

    def sent_if_complete(self) -> None:
        if self.all_yielded:
            self.sent()


class DeliveredJson(JsonResponse):
    """A reply that says when its last byte was handed over."""

    def __init__(self, content: Any, sent: Callable[[], None]) -> None:
        super().__init__(content)
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
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


def _connection(request: Request) -> Connection | None:
    client = request.scope.get("client")
    return (client[0], client[1]) if client else None


def _pieces(events: Iterable[bytes]) -> Iterable[bytes]:
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
