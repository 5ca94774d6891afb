"""What every dialect is lowered to and raised from: one request for an answer, and the answer.

    body ──dialect.lower──▶ LoweredRequest ──sampled by the policy──▶ Answer ──dialect.reply──▶ body, or its events

Messages and tools have the shapes of Chat Completions, because chat templates are written for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nemo_gym.gateway.relayed import JsonText


class AnswerEnd(StrEnum):
    """Why an answer ended, in the words of Chat Completions."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class CallName:
    """How the harness knows a tool that the policy calls by one flat name."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Whether its calls carry free text instead of JSON arguments."""
    local_shell: bool = False
    """Whether its calls are the ``local_shell_call`` items of Responses."""


@dataclass(frozen=True, slots=True)
class LoweredRequest:
    """One request, whatever dialect it came in."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages (`nemo_gym.gateway.tokens.messages.Message`); images are ``image_url`` parts."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Function tools as in Chat Completions, by the flat names that the policy sees; nothing when none are offered."""
    names: Mapping[str, CallName] = field(default_factory=dict)
    """Flat name → the harness's own, for tools where they differ."""
    deferred: Sequence[Mapping[str, Any]] = ()
    """Function tools that are no part of the prompt's tools but may be called: their definitions are in the
    conversation, where the harness searched for them. For the parser of calls."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters as `pinned_sampling` reads them: ``temperature``, ``top_p``, ``top_k``, ``max_tokens``,
    ``stop``, ``seed``…"""
    stream: bool = False
    stream_usage: bool = False
    """Chat Completions only: whether the stream's last chunk reports usage."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """``auto``, ``none``, ``required``, or the tool to call as ``{"name": …}``."""
    response_format: Mapping[str, Any] | None = None
    """As in Chat Completions; nothing for plain text."""
    logprobs: bool = False
    """Whether the reply is to carry the logprobs of the sampled tokens."""
    token_ids: bool = False
    """Whether the reply is to carry token ids."""
    reasoning: bool = True
    """Whether the reply may carry the policy's reasoning; Messages: only where the request enables thinking."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further Chat Completions parameters that mean something to some endpoints and change nothing here
    (``reasoning_effort``, ``parallel_tool_calls``, ``user``…)."""

    def asking(self, messages: Sequence[Mapping[str, Any]]) -> LoweredRequest:
        """The same request about other messages."""
        return LoweredRequest(  # in order, which takes a fraction of the time that naming the fields does
            messages,
            self.tools,
            self.names,
            self.deferred,
            self.asked,
            self.stream,
            self.stream_usage,
            self.tool_choice,
            self.response_format,
            self.logprobs,
            self.token_ids,
            self.reasoning,
            self.extra,
        )


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that came from the engine's prefix cache."""
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The exact tokens of an answer, for callers that asked for them. Shapes: ``[P]``, ``[R]``, ``[R]``. An endpoint
    that told logprobs but no ids has ``texts`` and ``logprobs`` of one length, and no ids."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    texts: Sequence[str] | None = None
    """The text of each of ``ids``, where the reply is to show logprobs."""
    prompt_json: JsonText | None = None
    """``prompt_ids`` as JSON, for a reply that only relays them; ``prompt_ids`` are then empty."""
    ids_json: JsonText | None = None
    """``ids``, likewise."""
    logprobs_json: JsonText | None = None
    """``logprobs``, likewise."""
    entries_json: JsonText | None = None
    """The ``logprobs`` entries of OpenAI's dialects, as an endpoint wrote them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the policy. Raising it twice gives equal bodies: whatever a body makes up is derived from
    ``answer_id`` and ``created_at``."""

    answer_id: str
    """32 hexadecimal digits, unique."""
    created_at: float
    """Unix seconds."""
    model: str
    message: Mapping[str, Any]
    """A chat message of the assistant: ``content`` (text or ``None``), ``tool_calls`` (``{id, type, function: {name,
    arguments: JSON text}}``, flat names), ``reasoning_content``."""
    end: AnswerEnd
    usage: AnswerUsage
    stop: str | None = None
    """The stop string that ended it, if one did."""
    tokens: AnswerTokens | None = None
