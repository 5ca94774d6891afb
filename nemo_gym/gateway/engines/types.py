"""What goes into an engine and comes out of it, whatever wire it speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The token budget of the request, or the engine's context, is used up."""
    ABORT = "abort"
    """The engine gave up by itself (preempted, weights updated); what it had sampled so far is in the answer."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. ``None`` leaves a parameter to the engine's own default."""

    max_tokens: int
    """Tokens to sample at most; always explicit, since engines' defaults are as small as 16."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Tokens; −1 is all of them."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None
    """JSON text of the schema that the engine holds the answer to (`nemo_gym.gateway.engines.constraints`)."""

    def given(self) -> dict[str, Any]:
        """The parameters that are set, except ``max_tokens``, ``seed`` and ``json_schema``: engines spell them
        differently."""
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


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One prompt as token ids. ``request_id`` is unique per try and appears in the engine's own log."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    image_data: tuple[str, ...] = ()
    """Images in order of their placeholders, as data URLs."""
    prompt_json: bytes | None = None
    """``prompt_ids`` as a JSON array without spaces, where somebody has it; it is then sent as it is."""


def prompt_of(request: TokenRequest) -> Any:
    """The prompt as a value for an engine's body."""
    return list(request.prompt_ids) if request.prompt_json is None else orjson.Fragment(request.prompt_json)


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """The weights version when sampling began and when it ended; they differ when weights were updated meanwhile.
    ``None`` where neither the engine nor the trainer has said."""

    first: str | None = None
    last: str | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly sampled tokens, each with the logprob the engine sampled it with."""

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
    """A complete answer. ``logprobs[i]`` belongs to ``token_ids[i]``; there are always as many of both. Long ones may
    be arrays."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    engine: str
    """The name of the engine that sampled it."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, where the engine says."""
    weights: WeightsSpan = field(default_factory=WeightsSpan)
    cached_tokens: int | None = None
    """Prompt tokens that came from the engine's prefix cache, where it says."""
    segments: tuple[Segment, ...] = ()
    """Who sampled which tokens, where the answer was continued after an interruption; else empty."""
    ids_json: bytes | None = None
    """``token_ids`` as a JSON array without spaces, where the engine wrote them so."""


@dataclass(frozen=True, slots=True)
class TextReply:
    """A successful reply of a text engine, untouched."""

    body: bytes | bytearray
    engine: str
    headers: Mapping[str, str] = field(default_factory=dict)
    weights: WeightsSpan = field(default_factory=WeightsSpan)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What an engine says before the first rollout."""

    engine: str
    problem: str | None = None
    """Why no call can succeed: the key, or the model's name."""
    unreachable: str | None = None
    """Why it gave no answer now; it may later."""
    context_tokens: int | None = None
    """Prompt and answer together, where the engine tells."""
    warning: str | None = None
    """What works, and may not be meant."""
