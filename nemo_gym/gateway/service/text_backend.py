"""Answers by an OpenAI-compatible endpoint: text in, text out. Its trajectories hold messages, not ids.

The endpoint renders and encodes by itself, so nobody here knows the exact tokens; where it offers logprobs, they and
the texts of the sampled tokens are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import orjson

from nemo_gym.gateway.engines import EngineAnswerError, OpenAIEngine, SampledText, TextReply, sampled_text
from nemo_gym.gateway.lowered import Answer, AnswerEnd, AnswerTokens, AnswerUsage, LoweredRequest
from nemo_gym.gateway.service.backend import CallContext, TurnFacts
from nemo_gym.gateway.service.pool import EnginePool
from nemo_gym.gateway.tokens import History, IncrementalEncoder, PolicyTokenizer, Sampled, TokenForest, trajectories_of
from nemo_gym.gateway.tokens.export import as_row
from nemo_gym.gateway.tokens.forest import Prepared
from nemo_gym.gateway.tokens.records import record_of, restore

ROUTE = "/chat/completions"
_ENDS = {
    "stop": AnswerEnd.STOP,
    "length": AnswerEnd.LENGTH,
    "tool_calls": AnswerEnd.TOOL_CALLS,
    "function_call": AnswerEnd.TOOL_CALLS,
    "content_filter": AnswerEnd.CONTENT_FILTER,
}


class _NoTokens:
    """Stands for encoder and policy in a forest of turns whose tokens nobody knows: every conversation is empty ids,
    and continues by its messages alone."""

    vocabulary_size = 0
    drops_reasoning: frozenset[str] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    def full(self, messages: Any, **_: Any) -> list[int]:
        return []

    def continuation(self, last: Any, new: Any, **_: Any) -> list[int]:
        return []


class TextConversations:
    """One session's forest of turns without ids, and what was said in each."""

    def __init__(self, now: datetime) -> None:
        nothing = _NoTokens()
        self.forest = TokenForest(
            cast("IncrementalEncoder", nothing), cast("PolicyTokenizer", nothing), History.VERBATIM, now
        )
        self.said: list[Mapping[str, Any]] = []
        """By turn: the ``messages`` since its parent, the answer last; ``tools`` where they are not the parent's."""

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        found = [*records]
        restore(self.forest, found)
        self.said = [record["said"] for record in found]

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """As for tokens, with empty ids; ``messages`` and ``tools`` of the whole conversation added."""
        turns = self.forest.turns
        trajectories = trajectories_of(turns, session_id, reward=reward, reward_info=reward_info)
        leaves = [turn for turn in turns if not turn.children]
        rows = []
        for trajectory, leaf in zip(trajectories, leaves, strict=True):
            path = [self.said[turn.turn_id] for turn in leaf.path()]
            messages = [message for said in path for message in said["messages"]]
            rows.append({**as_row(trajectory), "messages": messages, "tools": path[0].get("tools")})
        return rows

    def tokens_of(self, turn_id: int, *, texts: bool = True) -> AnswerTokens | None:
        details = self.forest.turns[turn_id].details
        if "token_logprobs" not in details:
            return None
        return AnswerTokens([], details.get("token_ids") or [], details["token_logprobs"], details["token_texts"])


@dataclass(frozen=True, slots=True)
class TextSample:
    """A completion of an endpoint."""

    prepared: Prepared
    reply: TextReply
    completion: Mapping[str, Any]
    context: CallContext
    seconds: float


class TextBackend:
    """An endpoint's answers, for a pool of endpoints that serve the same model."""

    def __init__(self, pool: EnginePool, *, model: str, extra_body: Mapping[str, Any] | None = None) -> None:
        """``extra_body``: parameters for every request that does not set them itself."""
        self._pool = pool
        self._model = model
        self._extra_body = dict(extra_body or {})

    def conversations(self, now: datetime) -> TextConversations:
        return TextConversations(now)

    async def sample(
        self, conversations: TextConversations, request: LoweredRequest, context: CallContext
    ) -> TextSample:
        prepared = conversations.forest.prepare(request.messages, request.tools)
        body = self._body(request, context)
        began = time.monotonic()
        reply, completion = await self._pool.text_calls.call(
            context.session_id, lambda engine: _complete(engine, body)
        )
        return TextSample(prepared, reply, completion, context, time.monotonic() - began)

    def commit(
        self, conversations: TextConversations, request: LoweredRequest, sampled: TextSample
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        choice = sampled.completion["choices"][0]
        message = _message(choice["message"], sampled.context.call_id)
        prepared, weights = sampled.prepared, sampled.reply.weights
        end = _ENDS.get(str(choice.get("finish_reason")), AnswerEnd.STOP)
        details = _details(sampled, sampled_text(choice))
        turn = conversations.forest.commit(
            prepared, Sampled((), None, str(end), weights.last or weights.first, details), message
        )
        start = prepared.reading.start_of(prepared.shared)
        said: dict[str, Any] = {"messages": [*prepared.reading.messages[start:], message]}
        if turn.parent is None and request.tools:
            said["tools"] = [*request.tools]
        conversations.said.append(said)
        answer = Answer(
            sampled.context.call_id,
            time.time(),
            self._model,
            message,
            end,
            _usage(sampled.completion.get("usage")),
        )
        facts = TurnFacts(turn.turn_id, (sampled.reply.engine,), turn.weights_version, turn.reason)
        return answer, {**record_of(turn), "said": said}, facts

    def count_tokens(self, request: LoweredRequest) -> None:
        return None

    def forget(self, session_id: str) -> None:
        self._pool.forget(session_id)

    def _body(self, request: LoweredRequest, context: CallContext) -> dict[str, Any]:
        body: dict[str, Any] = {**self._extra_body, **request.extra, **request.asked}
        pinned = {key: value for key, value in context.pinned.items() if value is not None}
        if (budget := pinned.pop("max_output_tokens", None)) is not None:
            pinned["max_tokens"] = min(budget, request.asked.get("max_tokens") or budget)
        body |= pinned
        body["messages"] = request.messages
        body.setdefault("model", self._model)
        if request.tools:
            body["tools"] = request.tools
            if request.tool_choice != "auto":
                body["tool_choice"] = _chat_choice(request.tool_choice)
        if request.response_format is not None:
            body["response_format"] = request.response_format
        if request.logprobs:
            body["logprobs"] = True
        return body


async def _complete(engine: OpenAIEngine, body: Mapping[str, Any]) -> tuple[TextReply, Mapping[str, Any]]:
    reply = await engine.complete(ROUTE, body)
    return reply, _parsed(reply)  # within the try: what is no completion may be one on another engine


def _parsed(reply: TextReply) -> Mapping[str, Any]:
    try:
        completion = orjson.loads(reply.body)
        message = completion["choices"][0]["message"]
        if not isinstance(message, dict):
            raise TypeError("'message' is no object")
        for call in message.get("tool_calls") or ():
            if not isinstance(call["function"]["name"], str):
                raise TypeError("a tool call has no name")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise EngineAnswerError(
            f"engine '{reply.engine}' answered {ROUTE} with something else than a completion"
            f" ({type(error).__name__}: {error}): {reply.body[:200].decode(errors='replace')}",
            engine=reply.engine,
        ) from error
    result: Mapping[str, Any] = completion
    return result


def _chat_choice(choice: str | Mapping[str, Any]) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}


def _message(given: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """The parts of an endpoint's message that any harness can be told, in one spelling."""
    message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or given.get("refusal")}
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{call_id[:20]}{number:02d}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _text(call["function"].get("arguments"))},
            }
            for number, call in enumerate(calls)
        ]
    return message


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


def _usage(usage: Any) -> AnswerUsage:
    if not isinstance(usage, Mapping):
        return AnswerUsage()
    prompt, output = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return AnswerUsage(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(prompt.get("cached_tokens") or 0),
        int(output.get("reasoning_tokens") or 0),
    )


def _details(sampled: TextSample, tokens: SampledText | None) -> dict[str, Any]:
    details: dict[str, Any] = {
        "call_id": sampled.context.call_id,
        "engine": sampled.reply.engine,
        "seconds": round(sampled.seconds, 4),
    }
    if tokens is not None:
        details["token_texts"] = [token.decode(errors="replace") for token in tokens.tokens]
        details["token_logprobs"] = [*tokens.logprobs]
        if tokens.token_ids is not None:
            details["token_ids"] = [*tokens.token_ids]
    return details
