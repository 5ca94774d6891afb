"""The interface to engines: requests, the sampling that a session pins, results, and the ways a call can fail."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable
from uuid import uuid4

import orjson

from nemo_gym._util.tasks import waiting_s
from nemo_gym.contract.errors import InvalidBodyError, ModelError
from nemo_gym.gateway.policy_request import TOKEN_BUDGETS


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The token budget of the request, or the engine's context, is used up."""
    ABORT = "abort"
    """The engine gave up by itself (preempted, weights updated); the answer has the tokens sampled until then."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` leaves a parameter to the engine's own default."""

    max_tokens: int
    """Limit of sampled tokens; always explicit, since engines' defaults are as small as 16."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """A number of tokens; −1 is all of them."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def given(self) -> dict[str, Any]:
        """Return the parameters that are set, without ``max_tokens`` and ``seed``: engines name those differently."""
        values: dict[str, Any] = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            )
            if (value := getattr(self, name)) is not None
        }
        if self.stop:
            values["stop"] = list(self.stop)
        if self.stop_token_ids:
            values["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            values["ignore_eos"] = True
        return values


# Sampling parameters that a session pins, and those that its harness may choose.

_NUMBERS = {
    "temperature": (float, 0.0, None),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, None),
    "min_p": (float, 0.0, 1.0),
    "presence_penalty": (float, -2.0, 2.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, None),
    "seed": (int, None, None),
}


def pinned_sampling(
    asked: Mapping[str, Any], pinned: Mapping[str, Any], *, room_tokens: int, stop_token_ids: Sequence[int] = ()
) -> Sampling:
    """Return the parameters to sample with. ``pinned`` wins over ``asked`` (a body of any dialect) key by key, except
    that the smaller token budget wins: a harness may ask for a shorter answer. ``room_tokens`` is what the prompt
    leaves of the context; ``stop_token_ids`` end an answer in addition to the pinned ones. Raises `InvalidBodyError`
    for an invalid value."""
    values: dict[str, Any] = {}
    for name, (kind, low, high) in _NUMBERS.items():
        value = pinned.get(name)
        if value is None:
            value = asked.get(name)
        if value is not None:
            values[name] = _number(name, value, kind, low, high)
    budgets = [room_tokens]
    for source in (asked, pinned):
        for name in TOKEN_BUDGETS:
            if source.get(name) is not None:
                budgets.append(int(_number(name, source[name], int, 1, None)))
    stop = pinned.get("stop") or asked.get("stop") or asked.get("stop_sequences") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not _are(str, stop):
        raise InvalidBodyError("'stop' must be a string or a list of strings", param="stop")
    stop_ids = pinned.get("stop_token_ids") or []
    if not _are(int, stop_ids):
        raise InvalidBodyError("'stop_token_ids' must be a list of token ids", param="stop_token_ids")
    return Sampling(
        max_tokens=min(budgets),
        stop=tuple(stop),
        stop_token_ids=(*stop_ids, *(token for token in stop_token_ids if token not in stop_ids)),
        ignore_eos=bool(pinned.get("ignore_eos", False)),
        **values,
    )


def asked_otherwise(asked: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a harness asked for and did not get, because its session pins other values."""
    if not pinned:
        return {}
    overridden = {
        name: asked[name]
        for name in _NUMBERS
        if pinned.get(name) is not None and asked.get(name) is not None and asked[name] != pinned[name]
    }
    stop, asked_stop = pinned.get("stop"), asked.get("stop") or asked.get("stop_sequences")
    if stop and asked_stop and _listed(stop) != _listed(asked_stop):
        overridden["stop"] = _listed(asked_stop)
    bounds = [pinned[name] for name in TOKEN_BUDGETS if pinned.get(name) is not None]
    budgets = [asked[name] for name in TOKEN_BUDGETS if asked.get(name) is not None]
    if bounds and budgets and min(budgets) > min(bounds):
        overridden["max_output_tokens"] = min(budgets)
    return overridden


def _listed(values: Any) -> list[Any]:
    return [values] if isinstance(values, str) else [*values]


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def _number(name: str, value: Any, kind: type, low: float | None, high: float | None) -> int | float:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if wrong or (kind is int and int(value) != value):
        quoted = repr(value)[:100]
        raise InvalidBodyError(f"'{name}' must be {'a whole number' if kind is int else 'a number'}, not {quoted}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidBodyError(
            f"'{name}' is {value}; it must be at least {low}" + (f", at most {high}" if high else "")
        )
    number: int | float = kind(value)
    return number


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One prompt as token ids. ``request_id`` is unique per try and appears in the engine's own log."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    image_data: tuple[str, ...] = ()
    """Images in order of their placeholders, as data URLs."""
    prompt_json: bytes | None = None
    """``prompt_ids`` as a JSON array without spaces, if the caller has it; it is then sent unchanged."""


def one_token() -> TokenRequest:
    """Return a request for one token after the id 0, which every vocabulary has."""
    return TokenRequest(f"one-token-{uuid4().hex}", [0], Sampling(max_tokens=1))


def prompt_of(request: TokenRequest) -> Any:
    """Return the prompt as a value for an engine's body."""
    return list(request.prompt_ids) if request.prompt_json is None else orjson.Fragment(request.prompt_json)


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """The weights version when sampling began and when it ended; they differ if weights were updated meanwhile.
    ``None`` if neither the engine nor the trainer has reported one."""

    first: str | None = None
    last: str | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly sampled tokens, each with the logprob at which the engine sampled it."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one answer that one engine sampled."""

    engine: str
    tokens: int
    weights: WeightsSpan


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. ``logprobs[i]`` belongs to ``token_ids[i]``; both always have the same length, and may be
    arrays if they are long."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    engine: str
    """The name of the engine that sampled it."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if the engine reports it."""
    weights: WeightsSpan = field(default_factory=WeightsSpan)
    cached_tokens: int | None = None
    """Prompt tokens that came from the engine's prefix cache, if the engine reports them."""
    segments: tuple[Segment, ...] = ()
    """Which engine sampled which tokens, if the answer was continued after an interruption; otherwise empty."""
    ids_json: bytes | None = None
    """``token_ids`` as a JSON array without spaces, if the engine's reply has them in that form."""


@dataclass(frozen=True, slots=True)
class TextReply:
    """A successful reply of a text engine, unparsed."""

    body: bytes | bytearray
    engine: str
    headers: Mapping[str, str] = field(default_factory=dict)
    weights: WeightsSpan = field(default_factory=WeightsSpan)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The result of checking an engine before the first rollout."""

    engine: str
    problem: str | None = None
    """Why no call can succeed: the API key, or the model's name."""
    unreachable: str | None = None
    """Why the engine does not respond now; it may respond later."""
    context_tokens: int | None = None
    """Limit of prompt and answer together, if the engine reports it."""
    warning: str | None = None
    """A setting that may not be intended."""


@dataclass(frozen=True, slots=True)
class TokenizerProbe:
    """A text and its ids by the policy's tokenizer: an engine that serves the same model returns the same ids."""

    text: str
    token_ids: list[int]


# How an engine call can fail, classified by the possible reactions.
#
#     EngineError
#     ├── EngineRefusedError       the request itself is wrong; any engine would refuse it
#     │   └── EngineLacksModelError   the engine has no such model or route, for example since its restart
#     ├── EngineCredentialError    the engine does not accept the API key; the operator has to fix that
#     ├── EngineRateLimitedError   come back later, or ask another engine; the engine is healthy
#     ├── EngineUnreachableError   no connection: nothing was started, the engine is down
#     ├── EngineLostError          the connection broke: nothing of the answer was delivered or kept
#     ├── EngineTimeoutError       no answer, or no further byte, in time
#     ├── EngineFailedError        the engine answered 5xx
#     └── EngineAnswerError        an answer that breaks the engine's own protocol
#         └── EngineAnswerTooLargeError   an answer with more tokens than requested, or above the size limit
#
# Sampling has no side effect in the gateway until its answer is committed, so every retryable failure may be tried
# elsewhere as long as no token went to the harness.


class EngineError(ModelError):
    """``details`` hold ``engine`` and, for an HTTP response, ``upstream_status``."""

    code = "engine"

    elsewhere: ClassVar[bool] = False
    """Whether the same request may succeed on another engine."""
    fatal: ClassVar[bool] = False
    """Whether one such failure proves that the engine is down."""
    unhealthy: ClassVar[bool] = False
    """Whether such a failure counts against the engine's health at all."""


class EngineRefusedError(EngineError):
    """The engine refused the request. ``body`` is its response, which explains the reason to the harness."""

    code = "engine_refused"
    status = 400

    def __init__(self, message: str, *, body: bytes = b"", **details: Any) -> None:
        super().__init__(message, **details)
        self.body = body


class EngineLacksModelError(EngineRefusedError):
    """The gateway chooses route and model name, so a 404 for a call is not about its request."""

    code = "engine_lacks_model"
    status = 502
    elsewhere = True
    unhealthy = True


class EngineCredentialError(EngineError):
    code = "engine_credential"
    elsewhere = True
    unhealthy = True


class EngineRateLimitedError(EngineError):
    """``details['retry_after_s']`` is the time to wait, if the engine named one; see `waiting_s`."""

    code = "model_rate_limited"
    status = 429
    elsewhere = True

    def __init__(self, message: str, *, retry_after_s: float | None = None, **details: Any) -> None:
        self.retry_after_s = waiting_s(retry_after_s)
        super().__init__(message, retryable=True, retry_after_s=self.retry_after_s, **details)


class EngineUnreachableError(EngineError):
    code = "engine_unreachable"
    elsewhere = True
    fatal = True
    unhealthy = True


class EngineLostError(EngineError):
    code = "engine_lost"
    elsewhere = True
    unhealthy = True


class EngineTimeoutError(EngineError):
    code = "engine_timeout"
    status = 504
    elsewhere = True
    unhealthy = True


class EngineFailedError(EngineError):
    code = "engine_failed"
    elsewhere = True
    unhealthy = True


class EngineAnswerError(EngineError):
    code = "engine_answer"
    elsewhere = True
    unhealthy = True


class EngineAnswerTooLargeError(EngineAnswerError):
    """Not tried elsewhere: another try would cost as much again, and the request may be the cause, not the engine."""

    code = "engine_answer_too_large"
    elsewhere = False
    unhealthy = False


# The interfaces of the two kinds of engine.


@runtime_checkable
class Engine(Protocol):
    """Anything that samples from the policy. Cancelling a call (cancelling the awaiting task, or closing its iterator)
    closes the connection at once, which makes every supported engine stop sampling. Calls raise `EngineError` and no
    other error."""

    @property
    def name(self) -> str:
        """Unique among the engines of a router; appears in trajectories and logs."""
        ...

    weights_version: str | None
    """The version of the weights being served. The trainer sets it after an update; for an engine that reports its
    version, the adapter keeps it current."""

    @property
    def context_tokens(self) -> int | None:
        """Limit of prompt and answer together, as the engine reported it; ``None`` if it did not."""
        ...

    async def probe(self) -> None:
        """Send one cheap request that samples nothing. Raises `EngineError` unless the engine can serve."""
        ...

    async def sample_one(self) -> None:
        """Have one token sampled, which is dropped. An engine that hangs may answer probes, but not this."""
        ...


@runtime_checkable
class TokenEngine(Engine, Protocol):
    """Takes token ids and returns sampled token ids with their logprobs."""

    async def generate(self, request: TokenRequest) -> Generation:
        """Return the whole answer."""
        ...

    def stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta | Generation, None]:
        """Yield the answer while it is sampled: deltas, and last the whole `Generation`, whose tokens are exactly
        those of the deltas. A stream never ends without a `Generation`: a broken stream raises."""
        ...
