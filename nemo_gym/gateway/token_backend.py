"""Answers by engines that take and return token ids: the policy's exact tokens from prompt to trajectory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import structlog

from nemo_gym.contract.errors import InvalidBodyError, ModelError
from nemo_gym.gateway.backend import CallContext, ForestConversations, TurnFacts, apart, call_details
from nemo_gym.gateway.dialects.content import json_at
from nemo_gym.gateway.dialects.errors import ContextOverflowError, overflow_of
from nemo_gym.gateway.engines import (
    EngineFailedError,
    EngineRefusedError,
    FinishReason,
    Generation,
    TokenRequest,
    pinned_sampling,
)
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.engines.types import TokenizerProbe
from nemo_gym.gateway.parsing import AnswerParser, ParsedAnswer
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerTokens, AnswerUsage, JsonText, PolicyRequest
from nemo_gym.gateway.tokens import (
    History,
    IncrementalEncoder,
    PolicyTokenizer,
    Prepared,
    Sampled,
    TokenForest,
    trajectories_of,
)
from nemo_gym.gateway.tokens.history import calls_of, is_long, text_of
from nemo_gym.gateway.tokens.trajectories import FIRST_WEIGHTS, as_row, record_of, restore
from nemo_gym.gateway.tokens.turns import json_of

PROBE_TEXT = "The quick brown fox jumps over 12345 lazy dogs.\n\tdef half(x): return x / 2  # naïve: 東京 🙂\n"
"""Words, digits, spaces, code and multi-byte letters: tokenizers that agree on all of it are taken to be the same."""
_BYTES_PER_TOKEN = 16
"""More than the average of any text."""
_TAIL_IDS = 96
"""How many ids at the prompt's end are decoded for the parser: a generation prompt is far shorter."""
log = structlog.get_logger(__name__)


class TokenConversations(ForestConversations):
    """One session's forest of token turns."""

    def __init__(self, forest: TokenForest, policy: PolicyTokenizer) -> None:
        super().__init__(forest)
        self._policy = policy

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        restore(self.forest, records)

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        trajectories = trajectories_of(self.forest.turns, session_id, reward=reward, reward_info=reward_info)
        return [as_row(trajectory) for trajectory in trajectories]

    def tokens_of(self, turn_id: int, *, texts: bool = True, relayed: bool = False) -> AnswerTokens:
        turn = self.forest.turns[turn_id]
        if relayed and not texts:
            return AnswerTokens(
                [],
                [],
                prompt_json=JsonText(turn.prompt_json()),
                ids_json=JsonText(turn.sampled_json()),
                logprobs_json=JsonText(json_of(turn.logprobs)) if turn.logprobs is not None else None,
            )
        ids: list[int] = turn.sampled_ids.tolist()
        text_of = {token_id: self._policy.decode([token_id]) for token_id in set(ids)} if texts else {}
        return AnswerTokens(
            turn.tokens[: turn.context_end].tolist(),
            ids,
            turn.logprobs.tolist() if turn.logprobs is not None else None,
            [text_of[token_id] for token_id in ids] if texts else None,
        )

    def forget_requests(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A prompt and the generation that was sampled for it."""

    prepared: Prepared
    generation: Generation
    context: CallContext
    seconds: float


class TokenBackend:
    """The backend with exact tokens: one policy over a pool of token engines."""

    def __init__(
        self,
        policy: PolicyTokenizer,
        parser: AnswerParser,
        pool: EnginePool,
        *,
        model: str,
        max_context_tokens: int,
        max_answer_tokens: int | None = None,
        history: History = History.VERBATIM,
    ) -> None:
        """``max_context_tokens``: limit of prompt and answer together. ``max_answer_tokens``: limit of one answer;
        ``None``: what the prompt leaves of the context."""
        self._policy = policy
        self._parser = parser
        self._pool = pool
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._max_answer_tokens = max_answer_tokens
        self._history = history
        self._encoder = IncrementalEncoder(policy)
        self._stops = tuple(sorted(policy.stop_ids))
        self._told_of_template = False

    @property
    def context_tokens(self) -> int | None:
        return self._max_context_tokens

    @property
    def tokenizer_probe(self) -> TokenizerProbe:
        return TokenizerProbe(PROBE_TEXT, self._policy.encode(PROBE_TEXT))

    def _context(self) -> int:
        """Return the context limit: the smaller of the configured one and the one that the engines report."""
        engine_limit = self._pool.context_tokens
        return self._max_context_tokens if engine_limit is None else min(engine_limit, self._max_context_tokens)

    def conversations(self, now: datetime) -> TokenConversations:
        return TokenConversations(TokenForest(self._encoder, self._policy, self._history, now), self._policy)

    async def sample(
        self, conversations: TokenConversations, request: PolicyRequest, context: CallContext
    ) -> TokenSample:
        _refuse_constraints(request)
        if "chat_template_kwargs" in request.extra and not self._told_of_template:
            self._told_of_template = True
            log.warning("chat_template_kwargs are not applied: all prompts are rendered by policy.template_variables")
        if context.body_bytes > self._context() * _BYTES_PER_TOKEN:
            self._refuse_overflow(request)
        prepared = await conversations.prepared(request, context)
        await context.turns.wait(context.share)
        prompt = prepared.prompt
        context_tokens = self._context()
        room = context_tokens - len(prompt)
        if room < 1:
            raise ContextOverflowError(len(prompt), context_tokens)
        if self._max_answer_tokens is not None:
            room = min(room, self._max_answer_tokens)
        sampling = pinned_sampling(request.asked, context.pinned, room_tokens=room, stop_token_ids=self._stops)
        began = time.monotonic()
        try:
            generation = await self._pool.token_calls.generate(
                context.session_id,
                TokenRequest(context.call_id, prompt, sampling, prepared.images(), prompt.json()),
            )
        except EngineRefusedError as error:  # the engine counts an image as more tokens than its placeholder
            if (overflow := overflow_of(error.body)) is not None:
                raise overflow from error
            raise
        if generation.finish_reason is FinishReason.ABORT:
            name = generation.engine
            raise EngineFailedError(f"engine '{name}' aborted the answer", retryable=True, engine=name)
        return TokenSample(prepared, generation, context, time.monotonic() - began)

    def _refuse_overflow(self, request: PolicyRequest) -> None:
        """Raise `ContextOverflowError` for a request that cannot fit, without encoding megabytes of text."""
        written = sum(
            len(text_of(message.get("content"))) + sum(len(str(call)) for call in calls_of(message))
            for message in request.messages
        ) + sum(len(json_at(tool, "tools")) for tool in request.tools or ())
        if written > self._context() * _BYTES_PER_TOKEN:
            raise ContextOverflowError(written // _BYTES_PER_TOKEN, self._context())

    def commit(
        self, conversations: TokenConversations, request: PolicyRequest, sampled: TokenSample
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        generation, prepared = sampled.generation, sampled.prepared
        text, stop = self._text(generation)
        offered = [*(request.tools or ()), *request.deferred]
        parsed = self._parser.parse(
            text,
            prompt_tail=self._policy.decode(prepared.prompt.tail(_TAIL_IDS)),
            tools=offered,
            parse_calls=bool(offered) and request.tool_choice != "none",
        )
        message = _message(parsed, sampled.context.call_id)
        turn = conversations.forest.commit(
            prepared,
            Sampled(
                generation.token_ids,
                generation.logprobs,
                str(generation.finish_reason),
                generation.weights.last or generation.weights.first,
                _details(sampled, request),
                generation.ids_json,
                stop,
            ),
            _with_own_ids(message, parsed),
        )
        answer = Answer(
            sampled.context.call_id,
            time.time(),
            self._model,
            message,
            _end(generation.finish_reason, parsed),
            AnswerUsage(len(prepared.prompt), len(generation.token_ids), generation.cached_tokens or 0),
            stop,
        )
        engines = tuple(segment.engine for segment in generation.segments) or (generation.engine,)
        facts = TurnFacts(turn.turn_id, engines, turn.weights_version, turn.reason)
        return answer, record_of(turn), facts

    def take_back(self, conversations: TokenConversations, turn_id: int) -> None:
        conversations.forest.take_back(turn_id)

    async def count_tokens(self, request: PolicyRequest) -> int:
        self._refuse_overflow(request)
        encode = partial(self._encoder.full, request.messages, tools=request.tools)
        return len(await apart(encode) if request.tools or is_long(request.messages) else encode())

    def forget(self, session_id: str) -> None:
        self._pool.forget(session_id)

    def _text(self, generation: Generation) -> tuple[str, str | None]:
        """Return the sampled text without the stop token or string that ended it, and the stop string if there was
        one. The turn keeps all tokens."""
        ids = generation.token_ids
        if ids and generation.finish_reason is FinishReason.STOP and ids[-1] in self._policy.stop_ids:
            ids = ids[:-1]
        try:
            text = self._policy.decode(ids)
        except OverflowError as error:
            raise ModelError(f"the engine returned invalid token ids ({error})") from error
        stop = generation.stop_reason if isinstance(generation.stop_reason, str) else None
        if stop is not None and (at := text.rfind(stop)) >= 0:
            return text[:at], stop
        return text, None


def _refuse_constraints(request: PolicyRequest) -> None:
    if request.tool_choice not in ("auto", "none"):
        raise InvalidBodyError(
            "tool_choice: only 'auto' and 'none' are possible: forcing a tool would change what the policy samples",
            param="tool_choice",
        )
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise InvalidBodyError(
            "response_format: only text is possible: constrained decoding would change what the policy samples",
            param="response_format",
        )


def _message(parsed: ParsedAnswer, call_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{call_id[:20]}{number:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message


def _with_own_ids(message: dict[str, Any], parsed: ParsedAnswer) -> dict[str, Any]:
    """Return the message with the ids that the policy wrote, which are not always unique, so that only the policy sees
    them; ``given_id`` is the harness's. It is the same object if the policy wrote none: then it is kept only once."""
    if not any(call.call_id for call in parsed.calls):
        return message
    calls = [
        {**call, "id": own.call_id, "given_id": call["id"]} if own.call_id else call
        for call, own in zip(message["tool_calls"], parsed.calls, strict=True)
    ]
    return {**message, "tool_calls": calls}


def _end(finish: FinishReason, parsed: ParsedAnswer) -> AnswerEnd:
    if finish is FinishReason.LENGTH:
        return AnswerEnd.LENGTH
    return AnswerEnd.TOOL_CALLS if parsed.calls else AnswerEnd.STOP


def _details(sampled: TokenSample, request: PolicyRequest) -> dict[str, Any]:
    generation = sampled.generation
    details = call_details(request, sampled.context, generation.engine, sampled.seconds)
    if generation.weights.first != generation.weights.last:
        details[FIRST_WEIGHTS] = generation.weights.first
    if generation.cached_tokens is not None:
        details["cached_tokens"] = generation.cached_tokens
    if generation.segments:
        details["segments"] = [
            {"engine": s.engine, "tokens": s.tokens, "weights": [s.weights.first, s.weights.last]}
            for s in generation.segments
        ]
    return details
