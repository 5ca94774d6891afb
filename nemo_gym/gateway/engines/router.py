"""Chooses the engine for a call: the session's own unless it is overloaded, otherwise one of the least loaded in turn.

Reports of calls and probes decide whether an engine is in service: a state machine (`Health`), without clock and I/O.

UP ── a fatal failure, or several in a row ──▶ DOWN ── a probe succeeds ──▶ TRIAL ── one call is answered ──▶ UP
                                                 ▲                           │
                                                 └───── that call fails ─────┘

If several failures in a row are of one session alone, the engine is only suspected, because that session's requests
may be the cause. The next probe, which should come at once, decides. Once another session got an answer after that,
further failures of this session do not count against the engine, not even in a trial, until it gets an answer itself.

An engine that hangs may still answer probes. If one with calls says nothing for long, and then not even the one token
that it is asked for, it is SILENT until it says something. It gets calls only if no other engine is in service, and
keeps those that it has: a server with a long queue is as silent as one that hangs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines.types import (
    Engine,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRateLimitedError,
)

PROBES_IN_TRIAL = 2
"""So many successful probes during a trial call count like its answer."""


_MAX_FAILING_SESSIONS = 1024
"""Limit of sessions whose failures are remembered."""


class HealthState(StrEnum):
    UP = "up"
    DOWN = "down"
    """Gets probes, but no calls."""
    TRIAL = "trial"
    """Answers probes again; gets one call at a time until one is answered, or has run for a while, because a server
    may be alive and yet unable to sample."""
    SILENT = "silent"
    """Answers probes, but none of its calls, and not within time a request for one token either."""


class Health:
    """One engine's health. Reports carry the ``epoch`` in which their call began: a call from before an outage proves
    nothing about the engine after it."""

    def __init__(self, failures_to_down: int) -> None:
        self._failures_to_down = failures_to_down
        self._failures = 0
        """Failed calls since the last answer."""
        self._failed_sessions: set[object] = set()
        """Sessions of those calls."""
        self._failures_by_session: dict[str, int] = {}
        """Session → its failures in a row, including those before an outage."""
        self._blamed_sessions: set[str] = set()
        """The sessions whose own requests cause their failures: other sessions were answered meanwhile."""
        self.suspected = False
        self._probe_failures = 0
        self.state = HealthState.UP
        self.epoch = 0
        self._trial_probes = 0
        self.rests = 0
        """Probes to skip after a failed trial, so that probe and trial together are at most one request per
        interval."""
        self.last_error: str | None = None

    def admits(self, in_flight: int) -> bool:
        """Return whether the engine may get a call in addition to ``in_flight`` others."""
        if self.state is HealthState.TRIAL:
            return in_flight == 0
        return self.state is not HealthState.DOWN

    def succeeded(self, epoch: int, session_id: str | None = None) -> bool:
        """Report an answered call; a refusal is an answer too. Returns whether that put the engine into service."""
        if self._failures_by_session:
            self._failures_by_session.pop(session_id or "", None)
            self._blamed_sessions = {
                session for session, count in self._failures_by_session.items() if count >= self._failures_to_down
            }
        if epoch != self.epoch or self.state is HealthState.DOWN:
            return False
        self._forget_failures()
        back = self.state is not HealthState.UP
        self.state = HealthState.UP
        return back

    def fell_silent(self, silence_s: float) -> bool:
        """Report that the engine says nothing to anybody. Returns whether that is news."""
        if self.state is HealthState.SILENT:
            return False
        self.last_error = f"it has calls, and answered nothing for {silence_s:g} s, then not even with one token"
        self.state = HealthState.SILENT
        return True

    def answering(self, epoch: int) -> bool:
        """Report that a call is being answered. That ends a trial with success, but on probation: a failure before the
        next whole answer takes the engine out of service. Returns whether that put the engine into service."""
        if epoch != self.epoch or self.state is not HealthState.TRIAL:
            return False
        self.state = HealthState.UP
        self._failures = self._failures_to_down - 1
        self._failed_sessions = {object()}  # for the sessions that failed before the trial; unequal to any session
        return True

    def failed(self, epoch: int, error: EngineError, *, probe: bool = False, session_id: str | None = None) -> bool:
        """Report a failed call or probe; failures of either kind alone can be enough. ``session_id``: the call's; a
        call without one counts as a session of its own. Returns whether that took the engine out of service."""
        if not error.unhealthy or epoch != self.epoch:
            return False
        self.last_error = str(error)
        if self.state is HealthState.DOWN:
            return False
        if self.state is HealthState.SILENT and not (probe or error.fatal):
            return False  # no news: after a probe it would be on trial, as if it had spoken
        if session_id is not None and not probe:
            self._failures_by_session[session_id] = self._failures_by_session.pop(session_id, 0) + 1
            if len(self._failures_by_session) > _MAX_FAILING_SESSIONS:
                del self._failures_by_session[next(iter(self._failures_by_session))]
            if session_id in self._blamed_sessions and not error.fatal:
                return False
        if probe:
            self._probe_failures += 1
        else:
            self._failures += 1
            self._failed_sessions.add(session_id if session_id is not None else object())
        if self.state is HealthState.TRIAL:
            self.rests = 1
        in_a_row = self._failures >= self._failures_to_down
        many = self._probe_failures >= self._failures_to_down or (in_a_row and len(self._failed_sessions) > 1)
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
        self._failed_sessions.clear()
        self.suspected = False

    def probe_succeeded(self, in_flight: int = 0) -> bool:
        """Report a successful probe, of a silent engine one that it answered with a token, or after an answer.
        ``in_flight``: the engine's running calls. Returns whether it may get more."""
        if self.state is HealthState.DOWN:
            self.state = HealthState.TRIAL
            self._trial_probes = 0
            return True
        self._probe_failures = 0
        if self.state is HealthState.SILENT:
            self.state = HealthState.UP
            return True
        if self.suspected:
            self._forget_failures()
        if self.state is HealthState.TRIAL and in_flight:
            self._trial_probes += 1
            # An engine that cannot sample fails soon. A long answer must not hold back all other calls for minutes.
            return self._trial_probes >= PROBES_IN_TRIAL and self.answering(self.epoch)
        return False


# One engine in a router: its place in the order of choice, and its running calls.

E = TypeVar("E", bound=Engine)


@dataclass(slots=True, eq=False)
class Replica(Generic[E]):
    engine: E
    health: Health
    weight: float = 1.0
    """Its share of the calls relative to the others'."""
    max_in_flight: int | None = None
    in_flight: int = 0
    draining: bool = False
    removed: bool = False
    cooling_until: float = 0.0
    """Until this time of the router's clock, the engine asked not to be called."""
    turn: float = 0.0
    """Virtual time at which it is due again: the time of its last placement plus 1/weight."""
    last: int = 0
    """Sequence number of its last placement; in a tie, the engine with the lowest wins."""
    heard_from: bool = False
    """Whether a call was answered, at least in part, since the prober's last check."""
    silent_checks: int = 0
    """The prober's checks since it was heard from last, without those that found no call."""
    placed: int = 0
    """Number of calls so far."""
    calling: set[str] = field(default_factory=set)
    """Sessions with a running call here."""
    expected: set[str] = field(default_factory=set)
    """Sessions that were moved here during a call elsewhere; their next calls will run here."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no call is in flight."""
    scopes: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts that end the awaits on the engine when it is given up."""
    name: str = field(init=False)
    """The engine's name, which does not change."""

    def __post_init__(self) -> None:
        self.idle.set()
        self.name = self.engine.name

    def load(self, more: int = 0) -> float:
        """Return the number of running and expected calls plus ``more``, divided by the weight."""
        return (self.in_flight + len(self.expected) + more) / self.weight

    def admits(self) -> bool:
        room = self.max_in_flight is None or self.in_flight < self.max_in_flight
        return room and not self.draining and self.health.admits(self.in_flight)

    def abandon(self) -> None:
        """End every await that is guarded by a reservation here, because the engine will not answer any more."""
        abandoned, self.scopes = self.scopes, set()
        for scope in abandoned:
            scope.reschedule(0)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One engine's status, for operators."""

    name: str
    state: HealthState
    in_flight: int
    placed: int
    weight: float
    draining: bool
    sessions: int
    weights_version: str | None
    last_error: str | None


RETRY_AFTER_S = 5
"""``Retry-After`` if no engine is available."""


class NoEngineError(EngineError):
    """No engine is in service, or none had room in time."""

    code = "no_engine"
    status = 503


class RoutingConfig(BaseModel):
    """How an engine is chosen, and when an engine counts as dead."""

    model_config = ConfigDict(extra="forbid")

    probe_interval_s: float = Field(5.0, gt=0)
    """Seconds between two probes of an engine that is out of service, or that answered no call meanwhile. A dead
    engine gets no other request."""
    failures_to_down: int = Field(3, ge=1)
    """Failures in a row (probes and calls) that take an engine out of service; a refused connection does so at once.
    An engine that answers no probes is given up after about
    ``failures_to_down × (probe_interval_s + probe_timeout_s)``."""
    silence_s: float = Field(60.0, gt=0)
    """An engine that has calls and says nothing for so long is asked for one token. If that takes as long again, the
    engine gets calls only if no other one is in service, until it says something."""
    spill_factor: float = Field(1.25, ge=1, allow_inf_nan=False)
    spill_slack: int = Field(4, ge=0)
    """A session leaves its engine, and the prefix cache there, if that engine runs more than ``spill_factor`` times
    its fair share of the calls, plus ``spill_slack``."""
    queue_timeout_s: float = Field(60.0, ge=0)
    """Seconds that a call waits for an engine with room, for example while all of them restart. After that it gets
    503 with ``Retry-After``."""


class Reservation(Generic[E]):
    """Use ``with reservation:`` around one call. The end of the block reports to the engine's health: no exception or
    a refusal counts as an answer, other `EngineError` by their class, any other exception (a cancellation) not at
    all."""

    def __init__(self, replica: Replica[E], router: Router[E], session_id: str | None = None) -> None:
        self.replica = replica
        self._router = router
        self._session_id = session_id
        self._epoch = replica.health.epoch
        self._open = True

    @property
    def engine(self) -> E:
        return self.replica.engine

    def release(self, outcome: EngineError | bool = False) -> None:
        """Give the place back; repeated calls do nothing. ``outcome``: the failure, ``True`` for an answer, ``False``
        if the call proved nothing."""
        if self._open:
            self._open = False
            if self._session_id is not None:
                self.replica.calling.discard(self._session_id)
            self._router.ended(self.replica, self._epoch, outcome, self._session_id)

    def answering(self) -> None:
        """Report that a part of the answer has arrived: the engine samples."""
        self._router.answering(self.replica, self._epoch)

    def guard(self) -> _Guard:
        """Return a context for an await on the engine. It raises `EngineLostError` if the router gives the engine up,
        so that a machine that vanished silently does not hold its callers until their deadlines."""
        return _Guard(self.replica)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release(error if isinstance(error, EngineError) else kind is None)


class _Guard:
    """A class, because each call enters one and a generator's context costs several times as much."""

    __slots__ = ("_replica", "_scope")

    def __init__(self, replica: Replica[Any]) -> None:
        self._replica = replica
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        if self._replica.removed:
            self._scope.reschedule(0)
        self._replica.scopes.add(self._scope)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._replica.scopes.discard(self._scope)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as expired:
            name = self._replica.name
            raise EngineLostError(
                f"engine '{name}' was given up while it was answering", retryable=True, engine=name
            ) from expired


@dataclass(slots=True, eq=False)
class _Waiter(Generic[E]):
    session_id: str | None
    avoid: Collection[str]
    future: asyncio.Future[Reservation[E]]


class Router(Generic[E]):
    """Engines and their running calls. Belongs to one event loop. No await separates a choice from its bookkeeping, so
    that simultaneous calls take each other into account."""

    def __init__(self, config: RoutingConfig | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config or RoutingConfig()
        self._clock = clock
        self._replicas: dict[str, Replica[E]] = {}
        self._now_turn = 0.0
        self._choices = 0
        self._homes: dict[str, str] = {}
        self._pins: dict[str, str] = {}
        self._waiters: list[_Waiter[E]] = []
        self._silent: set[Replica[E]] = set()
        """Those that fell silent, until `skipped` finds that they are no more."""
        self.ask_now: Callable[[Replica[E]], None] = lambda replica: None
        """Probes an engine now. Called for an engine that answers with failures, whose cause may be the requests: the
        other sessions should not wait for its next probe."""

    # -- membership ----------------------------------------------------------------------------------------------

    def add(self, engine: E, *, weight: float = 1.0, max_in_flight: int | None = None) -> None:
        """Put an engine into service at once, and move sessions to it until it has its share of them. Raises
        `ConfigError` for a name in use."""
        if engine.name in self._replicas:
            raise ConfigError(f"there is an engine '{engine.name}' already; engines' names are unique")
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"engine '{engine.name}': weight must be more than 0, not {weight}")
        replica = Replica(engine, Health(self.config.failures_to_down), weight, max_in_flight)
        self._replicas[engine.name] = replica
        self._settle()
        self._place_waiters()

    def remove(self, name: str) -> E:
        """Remove an engine. Its running calls fail as lost, and their callers try elsewhere; `drain` first to let them
        finish."""
        replica = self.replica(name)
        del self._replicas[name]
        replica.removed = True
        replica.health.epoch += 1
        self._leave(name)
        replica.abandon()
        self._place_waiters()
        return replica.engine

    async def drain(self, name: str, *, timeout_s: float | None = None) -> bool:
        """Stop new calls to an engine until `undrain`, and wait at most ``timeout_s`` seconds for the running ones.
        Returns whether it is idle now."""
        replica = self.replica(name)
        replica.draining = True
        self._leave(name)
        self._place_waiters()
        try:
            async with asyncio.timeout(timeout_s):
                await replica.idle.wait()
        except TimeoutError:
            return False
        return True

    def undrain(self, name: str) -> None:
        """Put an engine back into service, for example after its weights were updated."""
        replica = self.replica(name)
        replica.draining = False
        self._settle()
        self._place_waiters()

    def set_weight(self, name: str, weight: float) -> None:
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"engine '{name}': weight must be more than 0, not {weight}")
        self.replica(name).weight = weight
        self._settle()

    @property
    def replicas(self) -> list[Replica[E]]:
        """For the prober."""
        return [*self._replicas.values()]

    def replica(self, name: str) -> Replica[E]:
        """Return the engine of a name. Raises `ConfigError` for an unknown name."""
        if name not in self._replicas:
            raise ConfigError(f"there is no engine '{name}'; there are: {', '.join(self._replicas) or 'none'}")
        return self._replicas[name]

    @property
    def waiting(self) -> int:
        """The number of calls that wait for an engine."""
        return len(self._waiters)

    def status(self) -> list[ReplicaStatus]:
        sessions = Counter(self._homes.values())
        return [
            ReplicaStatus(
                replica.name,
                replica.health.state,
                replica.in_flight,
                replica.placed,
                replica.weight,
                replica.draining,
                sessions[replica.name],
                replica.engine.weights_version,
                replica.health.last_error,
            )
            for replica in self._replicas.values()
        ]

    # -- calls ---------------------------------------------------------------------------------------------------

    def reserve(self, session_id: str | None = None, *, without: Collection[str] = ()) -> Reservation[E] | None:
        """Reserve a place on an engine not named in ``without``; ``None`` if there is none right now. Never waits."""
        now = self._clock()
        pin = self._pinned(session_id) if self._pins and session_id is not None else None
        usable = [
            replica
            for replica in self._replicas.values()
            if replica.cooling_until <= now
            and replica.admits()
            and (replica.name == pin if pin is not None else not (without and replica.name in without))
        ]
        if not usable:
            return None
        home = self._replicas.get(self._homes.get(session_id, "")) if session_id is not None else None
        if home is not None and home in usable and not self._overloaded(home, usable):
            chosen = home
        else:
            # Start-time fair queueing among the least loaded. An engine that was away (down, draining, full, not yet
            # added) starts at the present: it gets its share of new calls, and does not catch up on past ones.
            lowest = min(replica.load(1) for replica in usable)
            # With one more call, the best engine would have this load: every engine below it is as good a choice.
            least = [replica for replica in usable if replica.load() < lowest]
            chosen = min(least, key=lambda replica: (max(replica.turn, self._now_turn), replica.last))
            self._now_turn = max(chosen.turn, self._now_turn)
            chosen.turn = self._now_turn + 1 / chosen.weight
            self._choices += 1
            chosen.last = self._choices
            if session_id is not None:
                self._move(session_id, chosen.name)
        if session_id is not None:
            chosen.expected.discard(session_id)
            chosen.calling.add(session_id)
        chosen.in_flight += 1
        chosen.placed += 1
        chosen.idle.clear()
        return Reservation(chosen, self, session_id)

    async def acquire(self, session_id: str | None = None, *, avoid: Collection[str] = ()) -> Reservation[E]:
        """Reserve a place; calls that have to wait are served in order of arrival. ``avoid`` names engines to use
        only if no other is in service. Raises `EngineRateLimitedError` if all engines in service asked to wait,
        `NoEngineError` if none had room or came back in time."""
        skipped = self.skipped(avoid)
        if (reservation := self.reserve(session_id, without=skipped)) is not None:
            return reservation
        self._refuse_when_all_cool(skipped)
        waiter = _Waiter(session_id, avoid, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self.config.queue_timeout_s):
                return await waiter.future
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().release()
            if isinstance(error, TimeoutError):
                raise self._none_in_time() from error
            raise

    def pin(self, session_id: str, name: str) -> None:
        """Keep a session's calls on one engine while that is in service, however busy it is; the calls wait for it.
        Raises `ConfigError` for an unknown name."""
        self.replica(name)
        self._pins[session_id] = name

    def end(self, session_id: str) -> None:
        """Drop the pin and the home of a session, which has ended."""
        self._pins.pop(session_id, None)
        self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session's home."""
        if (home := self._replicas.get(self._homes.pop(session_id, ""))) is not None:
            home.expected.discard(session_id)

    def home(self, session_id: str) -> str | None:
        """Return the engine that has a session's prefix cache."""
        return self._homes.get(session_id)

    def skipped(self, avoid: Collection[str]) -> Collection[str]:
        """Return the engines to skip: those in ``avoid``, as long as another one is in service, and the silent ones,
        as long as one is in service that is neither."""
        if self._silent:
            self._silent = {r for r in self._silent if r.health.state is HealthState.SILENT and not r.removed}
        silent = {*avoid, *(replica.name for replica in self._silent)} if self._silent else avoid
        return silent if self._another(silent) else avoid if self._another(avoid) else ()

    def _another(self, avoid: Collection[str]) -> bool:
        others = (replica for name, replica in self._replicas.items() if name not in avoid)
        return any(not other.draining and other.health.admits(0) for other in others)

    def in_service(self, name: str) -> bool:
        """Return whether an engine may get calls, even if it is full now."""
        replica = self._replicas.get(name)
        return replica is not None and not replica.draining and replica.health.state is not HealthState.DOWN

    # -- health --------------------------------------------------------------------------------------------------

    def probe_succeeded(self, replica: Replica[E]) -> None:
        if replica.health.probe_succeeded(replica.in_flight):
            self._settle()
            self._place_waiters()

    def probe_failed(self, replica: Replica[E], error: EngineError) -> None:
        """Report a failed probe. If it takes the engine out of service, also ends the engine's running calls: an
        engine that does not even answer probes will not answer them."""
        if replica.health.failed(replica.health.epoch, error, probe=True):
            self._leave(replica.name)
            replica.abandon()
            self._place_waiters()

    def fell_silent(self, replica: Replica[E]) -> None:
        """Report an engine that was asked for one token and did not answer. Its running calls go on."""
        if replica.health.fell_silent(self.config.silence_s):
            self._silent.add(replica)
            self._place_waiters()

    def answering(self, replica: Replica[E], epoch: int) -> None:
        """Report the first token of a call. It ends an engine's trial already, because answers can take minutes."""
        replica.heard_from = True
        if replica.health.answering(epoch):
            self._settle()
            self._place_waiters()

    def ended(
        self, replica: Replica[E], epoch: int, outcome: EngineError | bool, session_id: str | None = None
    ) -> None:
        """Report the end of a call; for `Reservation`."""
        replica.in_flight -= 1
        if replica.in_flight == 0:
            replica.idle.set()
        if isinstance(outcome, EngineRateLimitedError):
            if outcome.retry_after_s:
                replica.cooling_until = max(replica.cooling_until, self._clock() + outcome.retry_after_s)
                asyncio.get_running_loop().call_later(outcome.retry_after_s, self._place_waiters)
            outcome = False
        if isinstance(outcome, EngineError) and outcome.unhealthy:
            before = replica.health.state
            if replica.health.failed(epoch, outcome, session_id=session_id):
                self._leave(replica.name)
                if before is HealthState.UP and isinstance(outcome, EngineFailedError):
                    self.ask_now(replica)
            elif replica.health.suspected:
                self.ask_now(replica)
        elif outcome is not False:
            replica.heard_from = True
            if replica.health.succeeded(epoch, session_id):
                self._settle()
        self._place_waiters()

    # -- inside --------------------------------------------------------------------------------------------------

    def _pinned(self, session_id: str) -> str | None:
        """Return the engine that a session is pinned to, while that engine is in service and not silent."""
        name = self._pins.get(session_id)
        if name is None or not self.in_service(name) or self._replicas[name].health.state is HealthState.SILENT:
            return None
        return name

    def _overloaded(self, home: Replica[E], usable: list[Replica[E]]) -> bool:
        running = sum(replica.in_flight for replica in usable) + 1
        share = running * home.weight / sum(replica.weight for replica in usable)
        return home.in_flight + 1 > self.config.spill_factor * share + self.config.spill_slack

    def _leave(self, name: str) -> None:
        """Drop an engine as the home of its sessions, which get a new home with their next call."""
        for session_id in [key for key, home in self._homes.items() if home == name]:
            self.forget(session_id)

    def _move(self, session_id: str, name: str) -> None:
        self.forget(session_id)
        self._homes[session_id] = name

    def _settle(self) -> None:
        """Move sessions until each engine is home to its share of them, after engines came, came back or changed their
        weights. Without this, an engine added during long sessions would idle until new ones open. The newest sessions
        move first: their prefixes are the shortest to compute again."""
        serving = {
            replica.name: replica.weight
            for replica in self._replicas.values()
            if replica.health.state is HealthState.UP and not replica.draining
        }
        homes: dict[str, list[str]] = {name: [] for name in serving}
        for session_id, home in self._homes.items():
            if home in homes:
                homes[home].append(session_id)
        for_weight = sum(map(len, homes.values())) / (sum(serving.values()) or 1.0)
        spare = {name: len(homes[name]) - for_weight * weight for name, weight in serving.items()}
        while serving:
            most, least = max(spare, key=spare.__getitem__), min(spare, key=spare.__getitem__)
            if spare[most] - spare[least] < 1.001:  # one more move would only swap their parts
                return
            session_id = homes[most].pop()
            self._move(session_id, least)
            homes[least].append(session_id)
            if session_id in self._replicas[most].calling:
                self._replicas[least].expected.add(session_id)
            spare[most] -= 1
            spare[least] += 1

    def _place_waiters(self) -> None:
        if not self._waiters:
            return
        waiting, self._waiters = self._waiters, []
        full = False
        for waiter in waiting:
            if waiter.future.done():
                continue
            without = () if full else self.skipped(waiter.avoid)
            reservation = None if full else self.reserve(waiter.session_id, without=without)
            if reservation is None:
                # If no engine has room for a call that may go anywhere, none has room for the other calls.
                full = full or not (without or waiter.session_id in self._pins)
                self._waiters.append(waiter)
            else:
                waiter.future.set_result(reservation)

    def _refuse_when_all_cool(self, without: Collection[str]) -> None:
        now = self._clock()
        serving = [
            replica
            for replica in self._replicas.values()
            if replica.health.state is not HealthState.DOWN and not replica.draining and replica.name not in without
        ]
        if serving and all(replica.cooling_until > now for replica in serving):
            wait_s = min(replica.cooling_until for replica in serving) - now
            raise EngineRateLimitedError("every engine in service asks to wait", retry_after_s=math.ceil(wait_s))

    def _none_in_time(self) -> NoEngineError:
        if not self._replicas:
            return NoEngineError(
                "no engine is configured; add one to the model server's 'engines'",
                retryable=True,
                retry_after_s=RETRY_AFTER_S,
            )
        states = ", ".join(
            f"{s.name} {s.state} with {s.in_flight} calls"
            + (f" ({s.last_error})" if s.last_error and s.state is not HealthState.UP else "")
            for s in self.status()
        )
        return NoEngineError(
            f"no engine had room within {self.config.queue_timeout_s} s: {states}",
            retryable=True,
            retry_after_s=RETRY_AFTER_S,
        )
