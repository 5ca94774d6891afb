"""Calls to engines with retries: the retry budgets, one call, and token answers that another engine finishes.

Budgets limit the retries of all calls of an engine pool, and of each session, including the harness's own retries.
Failing engines are therefore not flooded with retries, and one session does not use up the retries of others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym._util.tasks import Backoff
from nemo_gym.gateway.engines.router import E, Router
from nemo_gym.gateway.engines.types import (
    EngineError,
    EngineRateLimitedError,
    FinishReason,
    Generation,
    Sampling,
    Segment,
    TokenDelta,
    TokenEngine,
    TokenRequest,
    WeightsSpan,
)


class RetryBudget:
    """Each first try earns ``ratio`` of a retry, each retry spends one; at most ``capacity`` are saved, which is also
    the number at the start. If everything fails, engines get at most ``1 + ratio`` times the calls once the savings
    are spent."""

    def __init__(self, *, ratio: float, capacity: float) -> None:
        self._ratio = ratio
        self._capacity = capacity
        self._saved = capacity

    @property
    def saved(self) -> float:
        return self._saved

    def earn(self) -> None:
        """Add the share of a retry that a call earns."""
        self._saved = min(self._capacity, self._saved + self._ratio)

    def spend(self) -> bool:
        """Spend one retry if there is one; returns whether there was."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


# One call: routed to an engine, guarded, and tried again if that can help.
#
# A call is tried again only while no part of its answer has been handed on, only after failures that another try may
# overcome, and only within its own limit, its session's budget and the budget of all calls. Every failure at an engine
# in service is charged to the session's budget, even one that is handed on, because the harness's own retries use the
# same budget. Once it is spent, the response tells the harness not to try again.

T = TypeVar("T")
log = structlog.get_logger(__name__)


class RetryConfig(BaseModel):
    """How often a call is tried again. It is tried again only while no part of its answer has been handed on, and only
    after failures that another try may overcome."""

    model_config = ConfigDict(extra="forbid")

    max_tries: int = Field(3, ge=1)
    """Tries of one call, including the first; 1 means no retry."""
    first_backoff_s: float = Field(0.1, ge=0)
    """Seconds before the same engine is tried again, doubled each time; another engine is tried at once."""
    max_backoff_s: float = Field(5.0, ge=0)
    budget_ratio: float = Field(0.2, ge=0, le=1)
    """Retries that each call's first try earns. If everything fails, engines get at most ``1 + budget_ratio`` times
    the calls. Moving off an engine that has just gone out of service is free."""
    budget_capacity: float = Field(20.0, ge=0)
    """Limit of saved retries, which is also the number at the start."""
    session_budget_capacity: float = Field(10.0, ge=0)
    """The same for each session, whose answered calls earn ``budget_ratio`` each. Every failure at an engine in
    service costs one retry, whether the gateway or the harness tries again. Once they are spent, failures are handed
    on at once, with ``x-should-retry: false``."""
    max_resumes: int = Field(16, ge=0)
    """How often an answer that broke off after its first token is continued from there (token engines only)."""

    keep_partial_answers: bool = False
    """Whether answers are read from token engines while they are sampled, so that answers of a killed engine are
    continued elsewhere instead of sampled again. Costs this process about 40 µs per token."""


class EngineCalls(Generic[E]):
    """Calls through a router. ``operation`` makes one try on the engine it is given; each try must use another request
    id."""

    def __init__(self, router: Router[E], config: RetryConfig | None = None) -> None:
        self.router = router
        self.config = config or RetryConfig()
        self.budget = RetryBudget(ratio=self.config.budget_ratio, capacity=self.config.budget_capacity)
        self._sessions: dict[str, RetryBudget] = {}

    def forget(self, session_id: str) -> None:
        """Drop the budget of a session, which has ended."""
        self._sessions.pop(session_id, None)

    def answered(self, session_id: str | None) -> None:
        """Report an answered call, which earns for its session's budget."""
        if session_id is not None and (budget := self._sessions.get(session_id)) is not None:
            budget.earn()

    def pays(self, session_id: str | None) -> bool:
        """Charge a failure to a session's budget; returns whether the budget covered it."""
        if session_id is None:
            return True
        if (budget := self._sessions.get(session_id)) is None:
            config = self.config
            budget = RetryBudget(ratio=config.budget_ratio, capacity=config.session_budget_capacity)
            self._sessions[session_id] = budget
        return budget.spend()

    async def call(self, session_id: str | None, operation: Callable[[E], Awaitable[T]]) -> T:
        """Return the answer of the first successful try, or raise the `EngineError` of the last."""
        tries = _Tries(self, session_id)
        while True:
            reservation = await self.router.acquire(session_id, avoid=tries.avoid)
            try:
                with reservation:
                    async with reservation.guard():
                        answer = await operation(reservation.engine)
                        self.answered(session_id)
                        return answer
            except EngineError as error:
                await tries.failed(reservation.engine, error)

    async def stream(
        self,
        session_id: str | None,
        operation: Callable[[E], AsyncGenerator[T, None]],
        *,
        avoid: Collection[str] = (),
    ) -> AsyncGenerator[T, None]:
        """Yield the items of the first try that yields one. A failure after that is raised, because items have been
        handed on. ``avoid`` names engines to use only if no other is in service. Closing the generator ends the call
        at the engine."""
        tries = _Tries(self, session_id, avoid)
        while True:
            reservation = await self.router.acquire(session_id, avoid=tries.avoid)
            handed_on = False
            try:
                with reservation:
                    async with aclosing(operation(reservation.engine)) as items:
                        while True:
                            try:
                                async with reservation.guard():
                                    item = await anext(items)
                            except StopAsyncIteration:
                                self.answered(session_id)
                                return
                            if not handed_on:
                                reservation.answering()
                            handed_on = reservation.replica.heard_from = True
                            yield item
            except EngineError as error:
                if handed_on:
                    raise
                await tries.failed(reservation.engine, error)


class _Tries(Generic[E]):
    """The tries of one call so far."""

    def __init__(self, calls: EngineCalls[E], session_id: str | None, avoid: Collection[str] = ()) -> None:
        self._calls = calls
        self._session_id = session_id
        self._count = 0
        self.avoid: set[str] = {*avoid}
        """The engines that failed this call, or were to be avoided from the start."""
        self._refused: set[str] = set()
        self._backoff = Backoff(first_s=calls.config.first_backoff_s, longest_s=calls.config.max_backoff_s)
        calls.budget.earn()

    async def failed(self, engine: E, error: EngineError) -> None:
        """Return when the call is to be tried again; raise ``error`` if it is not."""
        if error.fatal and engine.name not in self._refused:
            self._refused.add(engine.name)  # not counted: no work was begun, and the engine is out of service now
        else:
            self._count += 1
        # Moving off an engine that is out of service is free: a killed engine fails many calls at the same moment.
        # If there is no other engine, the call waits until one is in service, which costs no engine anything.
        moving_off = not self._calls.router.in_service(engine.name)
        if error.unhealthy and not moving_off and not self._calls.pays(self._session_id):
            log.warning("no retry: the session's budget is spent", engine=engine.name, error=str(error))
            error.details["retries_spent"] = True
            raise error
        if not error.elsewhere or self._count >= self._calls.config.max_tries:
            raise error
        self.avoid.add(engine.name)
        another = bool(self._calls.router.skipped(self.avoid))
        if not another and (isinstance(error, EngineRateLimitedError) or not error.retryable):
            # The caller can wait as well as the gateway can, and knows better whether it wants to.
            raise error
        if not moving_off and not self._calls.budget.spend():
            log.warning("no retry: the budget is spent", engine=engine.name, error=str(error))
            raise error
        log.info("engine call failed, trying again", engine=engine.name, code=error.code, another_engine=another)
        if not another:
            await self._backoff.again()


# Token answers that outlive their engine: the sampled tokens are kept, and another engine continues after them.
#
# Each sampled token depends only on the ids before it. An answer that broke off after k tokens is therefore continued
# by sending the prompt and those k ids to any engine, and every token still has the logprob of the engine that sampled
# it. So no token is lost if an engine aborts its calls to load new weights, or if an engine is killed whose answers
# are read while they are sampled.

K = TypeVar("K", bound=TokenEngine)


class TokenCalls(Generic[K]):
    """Token requests through a router, retried before their first token and continued after it."""

    def __init__(self, calls: EngineCalls[K]) -> None:
        self.calls = calls
        self._max_resumes = calls.config.max_resumes
        self._keep_partial_answers = calls.config.keep_partial_answers

    async def generate(self, session_id: str | None, request: TokenRequest) -> Generation:
        """Return the whole answer. Raises the `EngineError` that retries could not overcome."""
        if not (self._keep_partial_answers and _resumable(request.sampling)):
            return await self._generate_whole(session_id, request)
        async with aclosing(self.stream(session_id, request)) as items:
            async for item in items:
                if isinstance(item, Generation):
                    return item
        raise AssertionError("unreachable: a stream ends with a generation or raises")

    async def _generate_whole(self, session_id: str | None, request: TokenRequest) -> Generation:
        answer = _PartialAnswer()
        for resumes in range(self._max_resumes + 1):
            piece = _Piece(request, answer, resumes)
            last = await self.calls.call(session_id, piece.whole)
            if last.finish_reason is not FinishReason.ABORT or not _resumable(request.sampling):
                return answer.joined(piece, last)
            piece.add(TokenDelta(last.token_ids, last.logprobs))
            if (full := await self._add_piece(request, answer, piece, resumes)) is not None:
                return full
        return answer.whole(FinishReason.ABORT)

    async def stream(
        self, session_id: str | None, request: TokenRequest
    ) -> AsyncGenerator[TokenDelta | Generation, None]:
        """Yield an answer as `TokenEngine.stream` does, over as many engines as needed."""
        answer = _PartialAnswer()
        avoid: tuple[str, ...] = ()
        for resumes in range(self._max_resumes + 1):
            piece = _Piece(request, answer, resumes)
            last: Generation | None = None
            try:
                async with aclosing(self.calls.stream(session_id, piece.open, avoid=avoid)) as items:
                    async for item in items:
                        if isinstance(item, Generation):
                            last = item
                        else:
                            piece.add(item)
                            yield item
            except EngineError as error:
                if not self._may_resume(request, piece, error, resumes):
                    raise
                avoid = (piece.engine,)
            else:
                avoid = ()
                assert last is not None
                if last.finish_reason is not FinishReason.ABORT or not _resumable(request.sampling):
                    yield answer.joined(piece, last)
                    return
            if (full := await self._add_piece(request, answer, piece, resumes)) is not None:
                yield full
                return
        yield answer.whole(FinishReason.ABORT)

    async def _add_piece(
        self, request: TokenRequest, answer: _PartialAnswer, piece: _Piece, resumes: int
    ) -> Generation | None:
        """Add a piece to its answer. Returns the whole answer if its token budget is used up; ``None`` to continue."""
        answer.keep(piece)
        if len(answer.token_ids) >= request.sampling.max_tokens:
            return answer.whole(FinishReason.LENGTH)
        if not piece.token_ids:
            await asyncio.sleep(self.calls.config.first_backoff_s)  # the engine may be paused for an update
        log.info("an answer goes on", engine=piece.engine, tokens=len(answer.token_ids), resumes=resumes + 1)
        return None

    def _may_resume(self, request: TokenRequest, piece: _Piece, error: EngineError, resumes: int) -> bool:
        return (
            bool(piece.token_ids)  # without a token, the call has been retried already
            and error.retryable
            and resumes < self._max_resumes
            and _resumable(request.sampling)
        )


@dataclass(slots=True)
class _Piece:
    """One engine's part of an answer."""

    request: TokenRequest
    before: _PartialAnswer
    number: int
    tries: int = 0
    engine: str = ""
    first_weights: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    source: TokenEngine | None = None

    def open(self, engine: TokenEngine) -> AsyncGenerator[TokenDelta | Generation, None]:
        return engine.stream(self._engine_request(engine))

    async def whole(self, engine: TokenEngine) -> Generation:
        return await engine.generate(self._engine_request(engine))

    def _engine_request(self, engine: TokenEngine) -> TokenRequest:
        self.engine, self.source, self.first_weights = engine.name, engine, engine.weights_version
        done = len(self.before.token_ids)
        request = self.request
        request_id = f"{request.request_id}-{self.number}-{self.tries}"
        self.tries += 1
        if not done:
            return replace(request, request_id=request_id)
        return replace(
            request,
            request_id=request_id,
            prompt_ids=[*request.prompt_ids, *self.before.token_ids],
            prompt_json=None,
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
        )

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def segment(self) -> Segment:
        last = self.source.weights_version if self.source is not None else None
        first = self.first_weights if self.first_weights is not None else last
        return Segment(self.engine, len(self.token_ids), WeightsSpan(first, last))


@dataclass(slots=True)
class _PartialAnswer:
    """The tokens of all pieces so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def keep(self, piece: _Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.token_ids:
            self.segments.append(piece.segment())

    def joined(self, piece: _Piece, last: Generation) -> Generation:
        """Return the whole answer, whose last piece is ``last``."""
        if not self.segments:
            return last
        if last.token_ids:
            self.segments.append(Segment(last.engine, len(last.token_ids), last.weights))
        return replace(
            last,
            token_ids=(*self.token_ids, *last.token_ids),
            logprobs=(*self.logprobs, *last.logprobs),
            weights=WeightsSpan(self.segments[0].weights.first, self.segments[-1].weights.last),
            segments=tuple(self.segments),
            ids_json=None,
        )

    def whole(self, finish: FinishReason) -> Generation:
        weights = WeightsSpan()
        if self.segments:
            weights = WeightsSpan(self.segments[0].weights.first, self.segments[-1].weights.last)
        return Generation(
            tuple(self.token_ids),
            tuple(self.logprobs),
            finish,
            self.segments[-1].engine if self.segments else "",
            weights=weights,
            segments=tuple(self.segments),
        )


def _resumable(sampling: Sampling) -> bool:
    """Return whether later tokens depend only on the ids before them. An engine searches for stop strings and
    counts for penalties only in the tokens that it sampled itself."""
    return (
        not sampling.stop
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty in (None, 1.0)
    )
