"""Faults of a fake engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Status:
    """An error status."""

    code: int
    body: bytes = b'{"error": {"message": "injected"}}'
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hang:
    """No response until the client disconnects."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The connection breaks after ``after_events`` events of a stream, or before a complete response."""

    after_events: int = 0


@dataclass(frozen=True, slots=True)
class Garbage:
    """A 200 response whose body does not follow the protocol."""

    body: bytes = b"<html>it works</html>"


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine aborts after ``after_tokens`` tokens, as for an update of its weights, and reports it."""

    after_tokens: int = 0


Fault = Status | Hang | CutOff | Garbage | Abort
