"""Answers by an OpenAI-compatible endpoint: text in, text out. Its trajectories hold messages, not ids.

The endpoint renders and encodes by itself, so the gateway does not know the exact tokens. If it returns logprobs,
their bytes are relayed and journaled unchanged, and only parsed for trajectories and for replies of another shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

import orjson

from nemo_gym.gateway.backend import CallContext, ForestConversations, TurnFacts, call_details, step_begins
from nemo_gym.gateway.dialects.endpoint import BROKEN_OFF, chat_body, end_of, message_of, usage_of
from nemo_gym.gateway.dialects.errors import overflow_of
from nemo_gym.gateway.engines import EngineAnswerError, EngineFailedError, EngineRefusedError, OpenAIEngine, TextReply
from nemo_gym.gateway.engines.openai import Completion, completion_in, tokens_in
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.policy_request import (
    OVERRIDING,
    TOKEN_BUDGETS,
    Answer,
    AnswerTokens,
    AnswerUsage,
    JsonText,
    PolicyRequest,
)
from nemo_gym.gateway.tokens import History, IncrementalEncoder, PolicyTokenizer, Sampled, TokenForest, trajectories_of
from nemo_gym.gateway.tokens.forest import Prepared
from nemo_gym.gateway.tokens.history import Prefix
from nemo_gym.gateway.tokens.trajectories import as_row, record_of, restore

ROUTE = "/chat/completions"


class _NoTokens:
    """Replaces encoder and policy in a forest of turns with unknown tokens: every conversation has no ids, and its
    continuation depends on the messages alone."""

    vocabulary_size = 0
    drops_reasoning: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    def full(self, messages: Any, **_: Any) -> list[int]:
        return []

    def continuation(self, last: Any, new: Any, **_: Any) -> list[int]:
        return []


class HistoryJson:
    """A history as a JSON array. Caches the JSON of messages, because the next request repeats the same objects."""

    def __init__(self) -> None:
        self._messages: Prefix[Mapping[str, Any]] = Prefix()
        self._texts: list[bytes] = []

    def array(self, messages: Sequence[Mapping[str, Any]]) -> bytes:
        """Serialize messages, which must not be changed afterwards. Raises the errors of ``orjson.dumps``."""
        common = self._messages.common(messages)
        new = [orjson.dumps(message) for message in messages[common:]]  # an error here leaves the cache unchanged
        self._messages = self._messages.grown(common, messages[common:])
        self._texts[common:] = new
        return b"[%b]" % b",".join(self._texts)


class TextConversations(ForestConversations):
    """One session's forest of turns without ids, and the messages of each turn."""

    def __init__(self, now: datetime) -> None:
        nothing = _NoTokens()
        encoder, policy = cast("IncrementalEncoder", nothing), cast("PolicyTokenizer", nothing)
        super().__init__(TokenForest(encoder, policy, History.VERBATIM, now))
        self.turn_data: list[Mapping[str, Any]] = []
        """By turn: the ``messages`` since its parent, the answer last; the ``tools`` of a turn without a parent."""
        self.history_json = HistoryJson()
        self.relayed: list[Mapping[str, JsonText]] = []
        """By turn: ``entries`` and ``token_ids`` of the endpoint's answer, if it returned them."""

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        turn_records = [*records]
        restore(self.forest, turn_records)
        self.turn_data = [record["said"] for record in turn_records]
        self.relayed = [record["relayed"] for record in turn_records]

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Return the rows as a token backend does, with empty ids, and with the conversation's messages and tools."""
        turns = self.forest.turns
        trajectories = trajectories_of(turns, session_id, reward=reward, reward_info=reward_info)
        leaves = [turn for turn in turns if not turn.children]
        numbers = {turn.details["call_id"]: turn.turn_id for turn in turns}
        rows = []
        for trajectory, leaf in zip(trajectories, leaves, strict=True):
            path = [self.turn_data[turn.turn_id] for turn in leaf.path()]
            messages = [message for turn_data in path for message in turn_data["messages"]]
            row = as_row(trajectory)
            for turn in row["turns"]:
                turn["details"] |= self._token_details(numbers[turn["details"]["call_id"]])
            rows.append({**row, "messages": messages, "tools": path[0].get("tools")})
        return rows

    def tokens_of(self, turn_id: int, *, texts: bool = True, relayed: bool = False) -> AnswerTokens | None:
        token_json = self.relayed[turn_id]
        if "entries" not in token_json:
            return None
        if relayed and texts:
            return AnswerTokens([], [], ids_json=token_json.get("token_ids"), entries_json=token_json["entries"])
        details = self._token_details(turn_id)
        if "token_logprobs" not in details:
            return None
        return AnswerTokens([], details.get("token_ids") or [], details["token_logprobs"], details["token_texts"])

    def forget_requests(self) -> None:
        self.history_json = HistoryJson()

    def _token_details(self, turn_id: int) -> dict[str, Any]:
        """Return a turn's tokens as details of its trajectory."""
        token_json = self.relayed[turn_id]
        if "entries" not in token_json:
            return {}
        try:
            tokens = tokens_in(token_json["entries"], token_json.get("token_ids"))
        except ValueError as error:
            return {"token_error": f"the endpoint's logprobs cannot be read: {error}"}
        if tokens is None:
            return {}
        details: dict[str, Any] = {
            "token_texts": [token.decode(errors="replace") for token in tokens.tokens],
            "token_logprobs": [*tokens.logprobs],
        }
        if tokens.token_ids is not None:
            details["token_ids"] = [*tokens.token_ids]
        return details


@dataclass(frozen=True, slots=True)
class TextSample:
    """A completion of an endpoint."""

    prepared: Prepared
    reply: TextReply
    completion: Completion
    usage: AnswerUsage
    context: CallContext
    seconds: float


class TextBackend:
    """The backend for a pool of endpoints that serve the same model."""

    def __init__(self, pool: EnginePool, *, model: str, extra_body: Mapping[str, Any] | None = None) -> None:
        """``extra_body``: parameters for every request that does not set them itself."""
        self._pool = pool
        self._model = model
        self._extra_body = dict(extra_body or {})

    @property
    def tokenizer_probe(self) -> None:
        return None

    @property
    def context_tokens(self) -> int | None:
        return None

    def conversations(self, now: datetime) -> TextConversations:
        return TextConversations(now)

    async def sample(
        self, conversations: TextConversations, request: PolicyRequest, context: CallContext
    ) -> TextSample:
        prepared = await conversations.prepared(request, context)
        await context.turns.wait(context.share)
        working = step_begins(context.body_bytes)
        body = self._body(request, context)
        body["messages"] = orjson.Fragment(conversations.history_json.array(request.messages))
        context.share.worked(working)
        await context.turns.wait(context.share)
        began = time.monotonic()
        try:
            reply, completion, usage = await self._pool.text_calls.call(
                context.session_id, lambda engine: _complete(engine, body, context.call_id)
            )
        except EngineRefusedError as error:
            if (overflow := overflow_of(error.body)) is not None:
                raise overflow from error
            raise
        return TextSample(prepared, reply, completion, usage, context, time.monotonic() - began)

    def commit(
        self, conversations: TextConversations, request: PolicyRequest, sampled: TextSample
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        completion = sampled.completion
        message = completion.message
        prepared, weights = sampled.prepared, sampled.reply.weights
        end = end_of(completion.finish_reason, message)
        details = call_details(request, sampled.context, sampled.reply.engine, sampled.seconds)
        turn = conversations.forest.commit(
            prepared,
            Sampled((), None, str(end), weights.last or weights.first, details, stop=completion.stop),
            message,
        )
        start = prepared.reading.start_of(prepared.shared)
        turn_data: dict[str, Any] = {"messages": [*prepared.reading.messages[start:], message]}
        if turn.parent is None and request.tools:
            turn_data["tools"] = [*request.tools]
        conversations.turn_data.append(turn_data)
        relayed: dict[str, JsonText] = {}
        if completion.entries:
            relayed["entries"] = completion.entries
            if completion.token_ids:
                relayed["token_ids"] = completion.token_ids
        conversations.relayed.append(relayed)
        answer = Answer(
            sampled.context.call_id,
            time.time(),
            self._model,
            message,
            end,
            sampled.usage,
            stop=completion.stop,
        )
        facts = TurnFacts(turn.turn_id, (sampled.reply.engine,), turn.weights_version, turn.reason)
        return answer, {**record_of(turn), "said": turn_data, "relayed": relayed}, facts

    def take_back(self, conversations: TextConversations, turn_id: int) -> None:
        conversations.forest.take_back(turn_id)
        conversations.turn_data.pop()
        conversations.relayed.pop()

    async def count_tokens(self, request: PolicyRequest) -> None:
        return None

    def forget(self, session_id: str) -> None:
        self._pool.forget(session_id)

    def _body(self, request: PolicyRequest, context: CallContext) -> dict[str, Any]:
        pinned = {key: value for key, value in context.pinned.items() if value is not None}
        asked = chat_body(request)
        if pinned:
            asked = {key: value for key, value in asked.items() if key not in OVERRIDING}
        body = {**self._extra_body, **asked}
        if bounds := [pinned.pop(key) for key in TOKEN_BUDGETS if key in pinned]:
            pinned["max_tokens"] = min(*bounds, request.asked.get("max_tokens") or bounds[0])
            for key in TOKEN_BUDGETS:
                body.pop(key, None)
        body |= pinned
        body.setdefault("model", self._model)
        return body


async def _complete(
    engine: OpenAIEngine, body: Mapping[str, Any], call_id: str
) -> tuple[TextReply, Completion, AnswerUsage]:
    """Return the reply, and its completion with the message as every dialect can carry it."""
    reply = await engine.complete(ROUTE, body)
    try:  # here, not at the commit: another engine may return a valid completion
        completion = completion_in(reply.body)
        if completion.finish_reason in BROKEN_OFF:
            raise EngineFailedError(
                f"engine '{reply.engine}' broke the answer off ('{completion.finish_reason}')",
                retryable=True,
                engine=reply.engine,
            )
        completion = replace(completion, message=message_of(completion.message, call_id))
        return reply, completion, usage_of(completion.usage)
    except (TypeError, ValueError) as error:
        if (told := engine.error_in(reply.body)) is not None:
            raise told from error
        raise EngineAnswerError(
            f"engine '{reply.engine}' answered {ROUTE} with something else than a completion"
            f" ({error}): {reply.body[:200].decode(errors='replace')}",
            engine=reply.engine,
        ) from error
