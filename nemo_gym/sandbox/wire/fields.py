"""What all bodies of the broker's API share: their base, and bounds of their fields."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from nemo_gym.contract.session import IDENTIFIER

MAX_TTL_S = 30 * 24 * 3600.0
"""Longest lease the wire can express; a broker's own limit may be shorter."""
MAX_LABELS = 64
MAX_DOORS = 64
"""Of one box; each is a listener of the process that serves it."""
MAX_STDIN_BYTES = 256 * 1024 * 1024
MAX_OUTPUT_BYTES = 2**40

Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER.pattern, max_length=128)]
"""An id that is a path segment: of execs (chosen by the client), boxes and leases (by the broker)."""
Text = Annotated[str, StringConstraints(max_length=8192)]
"""A path, a name, a value: never a document."""
LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Labels = Annotated[dict[LabelKey, Text], Field(max_length=MAX_LABELS)]
TtlS = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class WireModel(BaseModel):
    """Immutable, and without room for keys that nobody reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are, not copied and not turned into dictionaries."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
