"""An inference request, independent of the engine's wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters, with the engines' defaults. Both wires use the same names."""

    temperature: float = 1.0
    """0 always chooses the likeliest token."""
    top_p: float = 1.0
    top_k: int = -1
    """Number of the likeliest tokens to choose from; ≤ 0 means all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Draw:
        """Read a body's sampling parameters; ``null`` means the default."""
        return cls(**{one.name: given[one.name] for one in fields(cls) if given.get(one.name) is not None})


@dataclass(frozen=True, slots=True)
class Asked:
    """One inference request."""

    prompt_ids: Sequence[int]
    max_tokens: int
    draw: Draw = field(default_factory=Draw)
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    """Stop tokens besides the policy's own."""
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    request_id: str | None = None
    stream: bool = False

    @classmethod
    def read(
        cls,
        given: Mapping[str, Any],
        prompt_ids: Sequence[int],
        max_tokens: int,
        seed: int | None,
        request_id: str | None,
        stream: bool = False,
    ) -> Asked:
        """Read the parameters that both wires name alike from ``given``; the others are passed one by one."""
        stop = given.get("stop") or ()
        return cls(
            prompt_ids,
            max_tokens,
            Draw.read(given),
            seed,
            frozenset(given.get("stop_token_ids") or ()),
            (stop,) if isinstance(stop, str) else tuple(stop),
            bool(given.get("ignore_eos")),
            request_id,
            stream,
        )
