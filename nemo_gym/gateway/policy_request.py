"""The common form of all dialects: a request for one answer, and the answer.

    body ──dialect.lower──▶ PolicyRequest ──sampled by the policy──▶ Answer ──dialect.reply──▶ body, or its events

Messages and tools have the shapes of Chat Completions, because chat templates are written for those. Data that the
gateway need not read is passed on unparsed: JSON as bytes, ids and logprobs as arrays.

A model call has a time limit (`limited_call`), and is a telemetry step with the attributes of OpenTelemetry's
conventions for generative AI (`model_call`).
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal
from uuid import uuid4

import orjson

from nemo_gym.contract.errors import InvalidBodyError, ModelError
from nemo_gym.contract.session import NONE_CHOSEN, ChosenLimits, RolloutIdentity
from nemo_gym.contract.verdict import MODEL_METADATA_KEYS, without
from nemo_gym.http.telemetry import TRACEPARENT, Counter, SpanKind, attempt_context, is_on, step

# JSON that is passed on as bytes: data that the gateway need not read is neither parsed nor serialized again.

Buffer = bytes | memoryview
_WORTH_A_WRITE_BYTES = 64 * 1024
_PLACE = f"relayed-{uuid4().hex}"  # new in each process and never sent to anybody: no text contains it
_QUOTED_PLACE = f'"{_PLACE}"'.encode()
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_NOTHING = (b"", b"null", b"[]", b"{}")


class JsonText:
    """A JSON text as a value inside plain data. False if it is empty: no text, ``null``, ``[]`` or ``{}``."""

    __slots__ = ("_data", "_read")  # no dataclass: orjson would write its fields

    def __init__(self, data: Buffer) -> None:
        self._data: Buffer | None = data
        self._read: Callable[[], Buffer] | None = None

    @property
    def data(self) -> Buffer:
        """The text. After `let_go`, raises the errors of reading it again."""
        if self._data is not None:
            return self._data
        assert self._read is not None
        return self._read()

    def let_go(self, read: Callable[[], Buffer]) -> None:
        """Drop a text that is not empty from memory; ``read`` returns it again."""
        self._read, self._data = read, None

    def __bool__(self) -> bool:
        return self._data is None or len(self._data) > 4 or bytes(self._data) not in _NOTHING

    def value(self) -> Any:
        """Parse the text. Raises `ValueError` if it is not JSON."""
        return orjson.loads(self.data)


def written(content: Any) -> list[Buffer]:
    """Serialize ``content`` to JSON in pieces; joined, they are the whole. The text of each `JsonText` in it is a
    piece of its own and not copied."""
    texts: list[Buffer] = []

    def place(value: Any) -> str:
        if not isinstance(value, JsonText):
            raise TypeError(f"{type(value).__name__} is no JSON data")
        texts.append(value.data)
        return _PLACE

    whole = orjson.dumps(content, default=place, option=_OPTIONS)
    if not texts:
        return [whole]
    pieces: list[Buffer] = []
    for part, text in zip(whole.split(_QUOTED_PLACE), (*texts, b""), strict=True):
        pieces += (part, text)
    return pieces


_MAX_LEVELS = 200


def nests_too_deeply(text: str, data: Any) -> bool:
    """Whether ``data``, which ``text`` was parsed to, cannot be written again inside a body: parsers take more levels
    than writers. A policy can sample such arguments of a call; they are text then, as if they were not JSON."""
    level = [data] if text.count("{") + text.count("[") > _MAX_LEVELS else []
    for _ in range(_MAX_LEVELS):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)


def size_of(pieces: Iterable[Buffer]) -> int:
    """Return the total size in bytes."""
    return sum(map(len, pieces))


def coalesced(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """Join small neighbouring pieces for fewer writes; large pieces stay as they are."""
    buffered: list[Buffer] = []
    size = 0
    for piece in pieces:
        is_large = len(piece) >= _WORTH_A_WRITE_BYTES
        if buffered and (is_large or size >= _WORTH_A_WRITE_BYTES):
            yield b"".join(buffered)
            buffered, size = [], 0
        if is_large:
            yield piece
        else:
            buffered.append(piece)
            size += len(piece)
    if buffered:
        yield b"".join(buffered)


# Token ids and logprobs as arrays.

LARGE = 1024
"""From this many numbers on, numpy is worth its call."""


def packed(typecode: Literal["i", "f"], values: Sequence[Any]) -> array[Any]:
    """Return an array of int32 or float32. Raises `TypeError` and `OverflowError` for values that do not fit."""
    if len(values) < LARGE or isinstance(values, array):
        return array(typecode, values)
    result: array[Any] = array(typecode)
    try:
        # `struct` converts all values in one call, ``array`` one by one.
        result.frombytes(struct.pack(f"{len(values)}{typecode}", *values))
    except struct.error as error:
        raise TypeError(str(error)) from error
    return result


TOKEN_BUDGETS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict")
"""The names of the limit of sampled tokens at endpoints; a request's first one counts. An endpoint that gets several
may obey any of them."""
OVERRIDING = frozenset(
    {
        *("min_tokens", "min_new_tokens", "min_length", "max_length", "length_penalty", "early_stopping"),
        *("ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias", "logits_processors"),
        *("custom_logit_processor", "custom_params", "best_of", "use_beam_search", "num_beams", "beam_width"),
        *("do_sample", "sampling_params"),
        *("samplers", "sampler_seed", "typical_p", "tfs_z", "top_a", "penalty_alpha", "no_repeat_ngram_size"),
        *("epsilon_cutoff", "eta_cutoff", "smoothing_factor", "temperature_last", "dynamic_temperature"),
        *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "mirostat_mode"),
        *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "top_n_sigma"),
        *("repeat_penalty", "repeat_last_n", "encoder_repetition_penalty", "n_keep", "t_max_predict_ms"),
        *("generation_config", "options", "extra_body"),
    }
)
"""Fields by which endpoints (vLLM, SGLang, llama.cpp, TGI) change the sampling or the length of an answer beside the
parameters that a session pins. Where a session pins any, a request's own are not passed on."""


_OF_THE_REQUEST = frozenset({"model", "messages", "input", "tools", "stream", "stream_options", "n", "metadata"})
"""What only the request itself says, and no ``extra_body`` in its metadata."""


def metadata_parameters(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters that NeMo Gym's rows put into a request's ``metadata`` (``extra_body``, whose members are
    parameters, and ``chat_template_kwargs``), and the rest of the metadata. Raises `InvalidBodyError`."""
    metadata = body["metadata"] if isinstance(body.get("metadata"), Mapping) else {}
    read = {key: _object_in(metadata, key) for key in MODEL_METADATA_KEYS & metadata.keys()}
    parameters = without({**read.pop("extra_body", {}), **read}, _OF_THE_REQUEST)
    return parameters, without(metadata, MODEL_METADATA_KEYS)


def without_metadata_parameters(body: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the body without these members of ``metadata.extra_body``. Raises `InvalidBodyError`."""
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or "extra_body" not in metadata:
        return dict(body)
    left = without(_object_in(metadata, "extra_body"), _OF_THE_REQUEST.union(names))
    return {**body, "metadata": {**metadata, "extra_body": orjson.dumps(left).decode()}}


def _object_in(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    try:
        value = orjson.loads(metadata[key]) if isinstance(metadata[key], str) else metadata[key]
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise InvalidBodyError(f"'metadata.{key}' must be a JSON object, as text", param=f"metadata.{key}")
    return value


class AnswerEnd(StrEnum):
    """Why an answer ended, as in Chat Completions."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class CallName:
    """The harness's name of a tool that the policy calls by one flat name."""

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
    """Function tools as in Chat Completions, under the policy's flat names; ``None`` or empty if none are offered."""
    names: Mapping[str, CallName] = field(default_factory=dict)
    """Flat name → the harness's own name, for tools where they differ."""
    deferred: Sequence[Mapping[str, Any]] = ()
    """For the parser of calls: function tools that may be called without being among the prompt's tools. Their
    definitions are in the conversation, as results of the harness's tool search."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters as `pinned_sampling` reads them: ``temperature``, ``top_p``, ``top_k``, ``max_tokens``,
    ``stop``, ``seed``…"""
    stream: bool = False
    stream_usage: bool = False
    """Chat Completions only: whether the stream's last chunk reports usage."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """``auto``, ``none``, ``required``, or the tool to call as ``{"name": …}``."""
    response_format: Mapping[str, Any] | None = None
    """As in Chat Completions; ``None`` for plain text."""
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
        """Return the same request with other messages."""
        return PolicyRequest(  # positional arguments take a fraction of the time of keywords
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
    """Prompt tokens that came from the engine's prefix cache."""
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The exact tokens of an answer, for callers that asked for them. Shapes: ``[P]``, ``[R]``, ``[R]``. If an
    endpoint returned logprobs without ids, ``texts`` and ``logprobs`` have one length, and ``ids`` is empty."""

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
    """One answer of the policy. Raising it to a dialect twice gives equal bodies: generated ids and times are derived
    from ``answer_id`` and ``created_at``."""

    answer_id: str
    """32 hexadecimal digits, unique."""
    created_at: float
    """Unix seconds."""
    model: str
    message: Mapping[str, Any]
    """A chat message of the assistant: ``content`` (text or ``None``), ``tool_calls`` (``{id, type, function: {name,
    arguments: JSON text}}``, flat names), ``reasoning_content``. If the policy refused, ``refusal`` is the text, too:
    harnesses send a refusal back as text."""
    end: AnswerEnd
    usage: AnswerUsage
    stop: str | None = None
    """The stop string that ended the answer, if one did."""
    tokens: AnswerTokens | None = None


# Token usage, as each dialect reports it.

_COUNT_BELOW = 1 << 53
"""Integers below this are exact for every JSON parser."""


def tokens_counted(reported: Any) -> int:
    """Check a number of tokens that an endpoint reported; 0 if it reported none. Raises `ValueError` for anything that
    is not a count."""
    if reported is None:
        return 0
    if isinstance(reported, bool) or not isinstance(reported, int | float) or not 0 <= reported < _COUNT_BELOW:
        raise ValueError(f"an invalid token count {str(reported)[:40]!r}")
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
        """Read a ``usage`` object of Chat Completions, Responses or Messages; zeros if nothing is reported. Raises
        `ModelError` for values that are not counts."""
        if not isinstance(reported, Mapping):
            return cls()
        try:
            # In Messages, ``input_tokens`` does not include the prompt's cached tokens.
            cached = sum(tokens_counted(reported.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
            return cls(
                tokens_counted(reported.get("input_tokens") or reported.get("prompt_tokens")) + cached,
                tokens_counted(reported.get("output_tokens") or reported.get("completion_tokens")),
            )
        except ValueError as error:
            raise ModelError(f"the model endpoint reported {error}", retryable=True) from None


class StreamedUsage:
    """Reads the usage from server-sent events while they are streamed."""

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._input = 0
        self._output = 0
        self.completed = False
        """Whether the stream's end event has arrived."""

    @property
    def usage(self) -> Usage:
        return Usage(self._input, self._output)

    def feed(self, chunk: bytes) -> None:
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
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
            return  # too late for an error: the event is already being sent
        self._input = max(self._input, usage.input_tokens)
        self._output = max(self._output, usage.output_tokens)


# -- One call: its limits, its step, its tokens --------------------------------------------------------------------


class ModelTimeoutError(ModelError):
    """A call reached its time limit. It is not retryable: a retry would end the same way, and the caller has waited
    long enough."""

    status = 504


def took_too_long(limit_s: float) -> ModelTimeoutError:
    return ModelTimeoutError(
        f"the model call took longer than {limit_s:g} s (request_timeout_s, or the run's model_request_timeout_s)"
    )


_limits: ContextVar[ChosenLimits] = ContextVar("nemo_gym_model_limits", default=NONE_CHOSEN)


def chosen_limits() -> ChosenLimits:
    """Return the limits of the call that is being answered."""
    return _limits.get()


@contextlib.asynccontextmanager
async def limited_call(chosen: ChosenLimits, request_timeout_s: float) -> AsyncIterator[None]:
    """Run one call in this context: `chosen_limits` returns ``chosen``, and the call ends with `ModelTimeoutError` at
    its limit, which is ``request_timeout_s`` unless the run chose another."""
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
    """Return the telemetry step around one call. If the session's attempt is known, the ``traceparent`` header counts
    only if it names a span of the same attempt, because it may come from a sandbox."""
    if not is_on():
        return step("model_call")
    parent = attempt_context(rollout, headers.get(TRACEPARENT)) if rollout is not None else None
    sampling = {name: body[key] for key, name in _SAMPLING.items() if isinstance(body.get(key), int | float)}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": str(body.get("model") or model),
        "gen_ai.response.model": model,
        "gen_ai.conversation.id": session_id,
        "dialect": dialect,
        **sampling,
    }
    if rollout is not None:
        attributes |= {"rollout_id": rollout.rollout_id, "attempt": rollout.attempt}
    return step("model_call", title=f"chat {model}", kind=SpanKind.SERVER, parent=parent, **attributes)


def answered(calling: step, usage: Usage | None, **attributes: Any) -> None:
    """Add the outcome of a call to its step. ``usage`` is ``None`` if it is unknown or must not be counted again."""
    if usage is not None:
        MODEL_TOKENS.add("input", amount=usage.input_tokens)
        MODEL_TOKENS.add("output", amount=usage.output_tokens)
        attributes |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
        }
    calling.set(**attributes)
