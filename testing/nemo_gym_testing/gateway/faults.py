"""What a fake engine does instead of answering."""

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
    """No answer, until the caller leaves."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The connection breaks after so many events of a stream, or before a whole answer."""

    after_events: int = 0


@dataclass(frozen=True, slots=True)
class Garbage:
    """A 200 whose body is not the protocol's."""

    body: bytes = b"<html>it works</html>"


@dataclass(frozen=True, slots=True)
class Abort:
    """The engine gives up by itself after so many tokens, as for an update of its weights, and says so."""

    after_tokens: int = 0


Fault = Status | Hang | CutOff | Garbage | Abort
