"""Token answers that outlive their engine: what was sampled is kept, and another engine goes on from there.

Sampling token by token, the next one depends on nothing but the ids before it. An answer that broke off after k tokens
is therefore continued by giving prompt and those k ids to any engine, and every token still has the logprob of the
engine that sampled it. So an engine that aborts its calls to take new weights costs no token; neither does a killed
one, if its answers are read as they are sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import structlog

from nemo_gym.gateway.engines.base import TokenEngine
from nemo_gym.gateway.engines.errors import EngineError
from nemo_gym.gateway.engines.types import (
    FinishReason,
    Generation,
    Sampling,
    Segment,
    TokenDelta,
    TokenRequest,
    WeightsSpan,
)
from nemo_gym.gateway.retries.calls import EngineCalls

K = TypeVar("K", bound=TokenEngine)
MAX_RESUMES = 16
log = structlog.get_logger(__name__)


class TokenCalls(Generic[K]):
    """Token requests through a router, retried before their first token and continued after it."""

    def __init__(
        self, calls: EngineCalls[K], *, max_resumes: int = MAX_RESUMES, keep_partial_answers: bool = False
    ) -> None:
        """``keep_partial_answers``: `generate` reads answers token by token, so that those of a killed engine go on
        elsewhere. Otherwise they are sampled again there, and a token costs a fraction of the work here."""
        self.calls = calls
        self._max_resumes = max_resumes
        self._keep_partial_answers = keep_partial_answers

    async def generate(self, session_id: str | None, request: TokenRequest) -> Generation:
        """The whole answer. Raises the `EngineError` that could not be overcome."""
        if not self._keep_partial_answers:
            return await self._in_wholes(session_id, request)
        async with aclosing(self.stream(session_id, request)) as items:
            async for item in items:
                if isinstance(item, Generation):
                    return item
        raise AssertionError("unreachable: a stream ends with a generation or raises")

    async def _in_wholes(self, session_id: str | None, request: TokenRequest) -> Generation:
        answer = _Answer()
        for resumes in range(self._max_resumes + 1):
            piece = _Piece(request, answer, resumes)
            last = await self.calls.call(session_id, piece.whole)
            if last.finish_reason is not FinishReason.ABORT or not _resumable(request.sampling):
                return answer.joined(piece, last)
            piece.add(TokenDelta(last.token_ids, last.logprobs))
            if (full := await self._kept(request, answer, piece, resumes)) is not None:
                return full
        return answer.whole(FinishReason.ABORT)

    async def stream(
        self, session_id: str | None, request: TokenRequest
    ) -> AsyncGenerator[TokenDelta | Generation, None]:
        """As `TokenEngine.stream`, over as many engines as it takes."""
        answer = _Answer()
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
                if not self._may_go_on(request, piece, error, resumes):
                    raise
                avoid = (piece.engine,)
            else:
                avoid = ()
                assert last is not None
                if last.finish_reason is not FinishReason.ABORT or not _resumable(request.sampling):
                    yield answer.joined(piece, last)
                    return
            if (full := await self._kept(request, answer, piece, resumes)) is not None:
                yield full
                return
        yield answer.whole(FinishReason.ABORT)

    async def _kept(self, request: TokenRequest, answer: _Answer, piece: _Piece, resumes: int) -> Generation | None:
        """Add a piece to its answer: the whole answer if that used up its tokens, else nothing when it may go on."""
        answer.keep(piece)
        if len(answer.token_ids) >= request.sampling.max_tokens:
            return answer.whole(FinishReason.LENGTH)
        if not piece.token_ids:
            await asyncio.sleep(self.calls.options.first_backoff_s)  # an engine that is paused for an update
        log.info("an answer goes on", engine=piece.engine, tokens=len(answer.token_ids), resumes=resumes + 1)
        return None

    def _may_go_on(self, request: TokenRequest, piece: _Piece, error: EngineError, resumes: int) -> bool:
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
    before: _Answer
    number: int
    tries: int = 0
    engine: str = ""
    first_weights: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    source: TokenEngine | None = None

    def open(self, engine: TokenEngine) -> AsyncGenerator[TokenDelta | Generation, None]:
        return engine.stream(self._asked(engine))

    async def whole(self, engine: TokenEngine) -> Generation:
        return await engine.generate(self._asked(engine))

    def _asked(self, engine: TokenEngine) -> TokenRequest:
        self.engine, self.source, self.first_weights = engine.name, engine, engine.weights_version
        done = len(self.before.token_ids)
        request = self.request
        request_id = f"{request.request_id}-{self.number}-{self.tries}"
        if done:
            asked = replace(
                request,
                request_id=request_id,
                prompt_ids=[*request.prompt_ids, *self.before.token_ids],
                prompt_json=None,
                sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - done),
            )
        else:
            asked = TokenRequest(
                request_id, request.prompt_ids, request.sampling, request.image_data, request.prompt_json
            )
        self.tries += 1
        return asked

    def add(self, delta: TokenDelta) -> None:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def segment(self) -> Segment:
        last = self.source.weights_version if self.source is not None else None
        first = self.first_weights if self.first_weights is not None else last
        return Segment(self.engine, len(self.token_ids), WeightsSpan(first, last))


@dataclass(slots=True)
class _Answer:
    """What the pieces so far have sampled."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def keep(self, piece: _Piece) -> None:
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.token_ids:
            self.segments.append(piece.segment())

    def joined(self, piece: _Piece, last: Generation) -> Generation:
        """The whole answer, whose last piece ended with ``last``."""
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
    """Whether a later token depends on the earlier ones as ids only: engines search for stop strings, count for
    penalties, and follow a schema, in what they sampled themselves."""
    return (
        not sampling.stop
        and sampling.json_schema is None
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty in (None, 1.0)
    )
