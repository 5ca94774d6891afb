"""Engines as the router sees them: whether one is in service, and what is running on it.

Whether an engine is in service, from what its calls and probes report. No clock and no I/O: a state machine.

UP ── a fatal failure, or several in a row ──▶ DOWN ── a probe succeeds ──▶ TRIAL ── one call is answered ──▶ UP
                                                 ▲                           │
                                                 └───── that call fails ─────┘

Several failures in a row that one session alone sees only make an engine suspected: its requests may be what the
engine fails at. The next probe decides then, and should come at once. Once another session was answered after that,
what this one sees is no news about the engine, in a trial neither, until it is answered itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from nemo_gym.gateway.engines.types import Engine, EngineError

PROBES_IN_TRIAL = 2
"""Successful ones during a trial call that are as good as its answer."""


_FAILING_AT_MOST = 1024
"""Sessions that are remembered as such."""


class HealthState(StrEnum):
    UP = "up"
    DOWN = "down"
    """Gets probes, and no call."""
    TRIAL = "trial"
    """Answers probes again; gets one call at a time until one is answered, or goes on for a while, since a server may
    be alive and yet unable to sample."""


class Health:
    """One engine's health. Reports carry the ``epoch`` in which their call began: what a call from before a restart
    has to say is no news about the engine after it."""

    def __init__(self, failures_to_down: int) -> None:
        self._failures_to_down = failures_to_down
        self._failures = 0
        """Of calls, since the last answer."""
        self._failed_for: set[object] = set()
        """Sessions of those calls."""
        self._failing: dict[str, int] = {}
        """Session → its failures in a row, also from before an outage."""
        self._to_blame: set[str] = set()
        """Those of them whose own requests fail: others were answered meanwhile."""
        self.suspected = False
        self._probe_failures = 0
        self.state = HealthState.UP
        self.epoch = 0
        self._trial_probes = 0
        self.rests = 0
        """Probes to leave out: after a trial that failed, so that probe and trial together are no more than one
        request in each interval."""
        self.last_error: str | None = None

    def admits(self, in_flight: int) -> bool:
        """Whether one more call may go there, beside ``in_flight`` others."""
        return self.state is HealthState.UP or (self.state is HealthState.TRIAL and in_flight == 0)

    def succeeded(self, epoch: int, session_id: str | None = None) -> bool:
        """A call was answered; also a refusal is an answer. Returns whether that put the engine into service."""
        if self._failing:
            self._failing.pop(session_id or "", None)
            self._to_blame = {one for one, count in self._failing.items() if count >= self._failures_to_down}
        if epoch != self.epoch or self.state is HealthState.DOWN:
            return False
        self._forget_failures()
        back = self.state is HealthState.TRIAL
        self.state = HealthState.UP
        return back

    def answering(self, epoch: int) -> bool:
        """A call is being answered. That ends a trial well, but on probation: the next failure, before any whole
        answer, takes the engine out again. Returns whether that put the engine into service."""
        if epoch != self.epoch or self.state is not HealthState.TRIAL:
            return False
        self.state = HealthState.UP
        self._failures = self._failures_to_down - 1
        self._failed_for = {object()}  # whose calls failed before its trial: not the next one's session
        return True

    def failed(self, epoch: int, error: EngineError, *, probe: bool = False, session_id: str | None = None) -> bool:
        """A call failed, or a probe; either alone can be enough. ``session_id``: of the call; one without a session
        stands for itself. Returns whether that took the engine out of service."""
        if not error.unhealthy or epoch != self.epoch:
            return False
        self.last_error = str(error)
        if self.state is HealthState.DOWN:
            return False
        if session_id is not None and not probe:
            self._failing[session_id] = self._failing.pop(session_id, 0) + 1
            if len(self._failing) > _FAILING_AT_MOST:
                del self._failing[next(iter(self._failing))]
            if session_id in self._to_blame and not error.fatal:
                return False
        if probe:
            self._probe_failures += 1
        else:
            self._failures += 1
            self._failed_for.add(session_id if session_id is not None else object())
        if self.state is HealthState.TRIAL:
            self.rests = 1
        in_a_row = self._failures >= self._failures_to_down
        many = self._probe_failures >= self._failures_to_down or (in_a_row and len(self._failed_for) > 1)
        confirmed = probe and self.suspected
        if error.fatal or many or confirmed or self.state is HealthState.TRIAL:
            self.state = HealthState.DOWN
            self.epoch += 1
            self._forget_failures()
            self._probe_failures = 0
            return True
        self.suspected = in_a_row
        return False

    def _forget_failures(self) -> None:
        self._failures = 0
        self._failed_for.clear()
        self.suspected = False

    def probe_succeeded(self, in_flight: int = 0) -> bool:
        """``in_flight``: calls running there. Returns whether the engine may have more calls now."""
        if self.state is HealthState.DOWN:
            self.state = HealthState.TRIAL
            self._trial_probes = 0
            return True
        self._probe_failures = 0
        if self.suspected:
            self._forget_failures()
        if self.state is HealthState.TRIAL and in_flight:
            self._trial_probes += 1
            # What cannot sample fails soon. A long answer must not hold back all calls but one for minutes.
            return self._trial_probes >= PROBES_IN_TRIAL and self.answering(self.epoch)
        return False


# One engine in a router: its place in the order of choice, and what is running on it.

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
