"""What every dialect is lowered to and raised from: one request for an answer, and the answer.

    body ──dialect.lower──▶ PolicyRequest ──sampled by the policy──▶ Answer ──dialect.reply──▶ body, or its events

Messages and tools have the shapes of Chat Completions, because chat templates are written for those. What nobody here
has to read passes through as it came: JSON as bytes, ids and logprobs as arrays.

A model call has limits (`limited_call`), and is a step with the attributes of OpenTelemetry's conventions for
generative AI (`model_call`).
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal
from uuid import uuid4

import orjson

from nemo_gym.contract.errors import ModelError
from nemo_gym.contract.session import NONE_CHOSEN, ChosenLimits, RolloutIdentity
from nemo_gym.http.telemetry import TRACEPARENT, Counter, SpanKind, attempt_context, is_on, step

# JSON that passes through as bytes: what nobody here has to read is neither parsed nor written again.

Buffer = bytes | memoryview
_WORTH_A_WRITE_BYTES = 64 * 1024
_PLACE = f"relayed-{uuid4().hex}"  # of this process, and never told to anybody: no text holds it
_QUOTED_PLACE = f'"{_PLACE}"'.encode()
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_NOTHING = (b"", b"null", b"[]", b"{}")


class JsonText:
    """A value as JSON, somewhere within plain data. False for nothing: no text, ``null``, and an empty list or
    object."""

    __slots__ = ("_data", "_read")  # no dataclass: orjson would write its fields

    def __init__(self, data: Buffer) -> None:
        self._data: Buffer | None = data
        self._read: Callable[[], Buffer] | None = None

    @property
    def data(self) -> Buffer:
        """The text; raises what reading it again does."""
        if self._data is not None:
            return self._data
        assert self._read is not None
        return self._read()

    def let_go(self, read: Callable[[], Buffer]) -> None:
        """Keep a text that says something no longer in memory: ``read`` has it."""
        self._read, self._data = read, None

    def __bool__(self) -> bool:
        return self._data is None or len(self._data) > 4 or bytes(self._data) not in _NOTHING

    def value(self) -> Any:
        """Raises `ValueError` where it is no JSON."""
        return orjson.loads(self.data)


def written(content: Any) -> list[Buffer]:
    """``content`` as JSON in pieces, which joined are the whole; the texts of every `JsonText` in it are pieces of
    their own, uncopied."""
    texts: list[Buffer] = []

    def place(value: Any) -> str:
        if not isinstance(value, JsonText):
            raise TypeError(f"{type(value).__name__} is no JSON data")
        texts.append(value.data)
        return _PLACE

    whole = orjson.dumps(content, default=place, option=_OPTIONS)
    if not texts:
        return [whole]
    found: list[Buffer] = []
    for part, text in zip(whole.split(_QUOTED_PLACE), (*texts, b""), strict=True):
        found += (part, text)
    return found


def size_of(pieces: Iterable[Buffer]) -> int:
    """In bytes."""
    return sum(map(len, pieces))


def coalesced(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in as few writes as are worth it: small neighbours joined, large pieces as they are."""
    held: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _WORTH_A_WRITE_BYTES:
            held.append(piece)
            continue
        if held:
            yield b"".join(held)
            held = []
        yield piece
    if held:
        yield b"".join(held)


# Token ids and logprobs as arrays.

LARGE = 1024
"""Numbers from which on numpy is worth its call."""


def packed(typecode: Literal["i", "f"], values: Sequence[Any]) -> array[Any]:
    """An array of int32 or float32. Raises `TypeError` and `OverflowError` for what does not fit."""
    if len(values) < LARGE or isinstance(values, array):
        return array(typecode, values)
    made: array[Any] = array(typecode)
    try:
        # In one call, where an array converts each by itself.
        made.frombytes(struct.pack(f"{len(values)}{typecode}", *values))
    except struct.error as error:
        raise TypeError(str(error)) from error
    return made


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
class PolicyRequest:
    """One request, whatever dialect it came in."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages (`nemo_gym.gateway.tokens.history.Message`); images are ``image_url`` parts."""
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

    def asking(self, messages: Sequence[Mapping[str, Any]]) -> PolicyRequest:
        """The same request about other messages."""
        return PolicyRequest(  # in order, which takes a fraction of the time that naming the fields does
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


# Token usage, as each dialect reports it.

_COUNT_BELOW = 1 << 53
"""What every reader of JSON takes for the same number."""


def tokens_counted(reported: Any) -> int:
    """A number of tokens as somebody else reports it; 0 where nothing is reported. Raises `ValueError` for what
    counts nothing."""
    if reported is None:
        return 0
    if isinstance(reported, bool) or not isinstance(reported, int | float) or not 0 <= reported < _COUNT_BELOW:
        raise ValueError(f"a usage of {str(reported)[:40]!r} tokens")
    return int(reported)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or several calls."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)

    def as_dict(self) -> dict[str, int]:
        return {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.output_tokens,
        }

    @classmethod
    def of(cls, reported: Any) -> Usage:
        """From a ``usage`` object of Chat Completions, Responses or Messages; nothing where nothing is reported.
        Raises `ModelError` for one that counts nothing."""
        if not isinstance(reported, Mapping):
            return cls()
        try:
            # Messages counts the prompt's cached tokens beside its others.
            cached = sum(tokens_counted(reported.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
            return cls(
                tokens_counted(reported.get("input_tokens") or reported.get("prompt_tokens")) + cached,
                tokens_counted(reported.get("output_tokens") or reported.get("completion_tokens")),
            )
        except ValueError as error:
            raise ModelError(f"the model endpoint reported {error}", retryable=True) from None


class StreamedUsage:
    """Finds the usage in server-sent events while they pass by."""

    def __init__(self) -> None:
        self._rest = b""
        self._input = 0
        self._output = 0
        self.completed = False
        """Whether the stream said by itself that it is complete."""

    @property
    def usage(self) -> Usage:
        return Usage(self._input, self._output)

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.completed = True
            return
        if b'"usage"' not in data and b"message_stop" not in data and b"response." not in data:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(event, dict):
            return
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete", "message_stop"):
            self.completed = True
        inner = event.get("response") or event.get("message") or event
        try:
            usage = Usage.of(inner.get("usage") if isinstance(inner, dict) else None)
        except ModelError:
            return  # the event is on its way already
        self._input = max(self._input, usage.input_tokens)
        self._output = max(self._output, usage.output_tokens)


# -- One call: its limits, its step, its tokens --------------------------------------------------------------------


class ModelTimeoutError(ModelError):
    """A call reached its limit. Another try would have the same end, and its caller has waited long enough."""

    status = 504


def took_too_long(limit_s: float) -> ModelTimeoutError:
    return ModelTimeoutError(
        f"the model call took longer than {limit_s:g} s (request_timeout_s, or the run's model_request_timeout_s)"
    )


_limits: ContextVar[ChosenLimits] = ContextVar("nemo_gym_model_limits", default=NONE_CHOSEN)


def chosen_limits() -> ChosenLimits:
    """Those of the call that is being answered."""
    return _limits.get()


@contextlib.asynccontextmanager
async def limited_call(chosen: ChosenLimits, request_timeout_s: float) -> AsyncIterator[None]:
    """One call: inside, `chosen_limits` are ``chosen``, and it ends with `ModelTimeoutError` at its limit, which is
    ``request_timeout_s`` unless the run chose another."""
    limit_s = chosen.request_timeout_s or request_timeout_s
    before = _limits.set(chosen)
    try:
        async with asyncio.timeout(limit_s) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise took_too_long(limit_s) from error
    finally:
        _limits.reset(before)


MODEL_TOKENS = Counter("nemo_gym_model_tokens", "Tokens of model calls, by direction: input, output", ("direction",))
PROVIDER = "nemo_gym"
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
}


def model_call(
    model: str,
    dialect: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    rollout: RolloutIdentity | None,
    session_id: str | None,
) -> step:
    """The step around one call. Where its session knows the attempt, a header counts only for a span of the same
    attempt: it may come from a box."""
    if not is_on():
        return step("model_call")
    parent = attempt_context(rollout, headers.get(TRACEPARENT)) if rollout is not None else None
    given = {name: body[key] for key, name in _SAMPLING.items() if isinstance(body.get(key), int | float)}
    named: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": str(body.get("model") or model),
        "gen_ai.response.model": model,
        "gen_ai.conversation.id": session_id,
        "dialect": dialect,
        **given,
    }
    if rollout is not None:
        named |= {"rollout_id": rollout.rollout_id, "attempt": rollout.attempt}
    return step("model_call", title=f"chat {model}", kind=SpanKind.SERVER, parent=parent, **named)


def answered(calling: step, usage: Usage | None, **attributes: Any) -> None:
    """What came of a call; ``usage`` where it is known and counts."""
    if usage is not None:
        MODEL_TOKENS.add("input", amount=usage.input_tokens)
        MODEL_TOKENS.add("output", amount=usage.output_tokens)
        attributes |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
        }
    calling.set(**attributes)
