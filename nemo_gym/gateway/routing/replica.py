"""One engine in a router: its place in the order of choice, and what is running on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nemo_gym.gateway.engines.base import Engine
from nemo_gym.gateway.routing.health import Health, HealthState

E = TypeVar("E", bound=Engine)


@dataclass(slots=True, eq=False)
class Replica(Generic[E]):
    engine: E
    health: Health
    weight: float = 1.0
    """Its share relative to the others'."""
    max_in_flight: int | None = None
    in_flight: int = 0
    draining: bool = False
    removed: bool = False
    cooling_until: float = 0.0
    """The router's clock; until then the engine has asked not to be called."""
    turn: float = 0.0
    """Virtual time at which it is due again: its last placement's plus 1/weight."""
    last: int = 0
    """Number of its last placement among all; the longest ago wins a tie."""
    heard_from: bool = False
    """Whether any call ended since the last look of the prober."""
    placed: int = 0
    """Calls ever sent here."""
    calling: set[str] = field(default_factory=set)
    """Sessions with a call here."""
    expected: set[str] = field(default_factory=set)
    """Sessions that were moved here in the middle of a call elsewhere: running calls of the next moment."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing is in flight."""
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    """Awaits that end when the engine is given up."""
    name: str = field(init=False)
    """The engine's, which does not change."""

    def __post_init__(self) -> None:
        self.idle.set()
        self.name = self.engine.name

    def load(self, more: int = 0) -> float:
        """Calls running now, or as good as, and ``more`` of them; for its weight."""
        return (self.in_flight + len(self.expected) + more) / self.weight

    def admits(self) -> bool:
        room = self.max_in_flight is None or self.in_flight < self.max_in_flight
        return room and not self.draining and self.health.admits(self.in_flight)

    def abandon(self) -> None:
        """End every await that is guarded by a reservation here: their engine will not answer any more."""
        abandoned, self.scopes = self.scopes, set()
        for scope in abandoned:
            scope.reschedule(0)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One engine as operators see it."""

    name: str
    state: HealthState
    in_flight: int
    placed: int
    weight: float
    draining: bool
    sessions: int
    weights_version: str | None
    last_error: str | None
