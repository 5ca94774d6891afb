"""The seams of the pipeline: what a stage, a job store and a dispatcher promise to each other.

    caller ──submit──▶ JobStore ◀──claim/record/complete── Dispatcher ──run──▶ Stage INIT → RUN → EVAL

A store may be a file or a database server, a dispatcher one event loop or a cluster, a stage an HTTP call or a
function: each is replaced without the others noticing. *Results are exactly once; execution is at least once and
fenced.*
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import orjson

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.contract.verdict import ROLLOUT_INDEX_KEY, FailureKind, StageFailure, StageName
from nemo_gym.rollout import Attempt, ModelSession, Servers


class StoreError(NemoGymError):
    """The run's database or result files cannot be written. The message names the path and the fix."""

    code = "store"
    status = 507


class SameFailureError(NemoGymError):
    """Attempt after attempt failed the same way, so the run stopped; it can be continued."""

    code = "same_failure"
    status = 503


class JobState(StrEnum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    DONE = "done"
    """Has a verdict."""
    FAILED = "failed"
    """Ended without a verdict; the typed reason is recorded."""
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a caller submits. ``job_id`` is the caller's and stable: submitting it again is the same job."""

    job_id: str
    """The rollout id."""
    run_id: str
    task_id: str
    group_id: str
    sample_index: int
    task_index: int
    agent: str
    """Agent server instance."""
    row: bytes
    """The dataset row as one JSON object, without line end."""
    priority: int = 0
    """Higher first; equal ones in order of submission."""
    deadline_s: float | None = None
    """Seconds from its first submission, queues included, after which the job ends without a verdict."""

    @property
    def row_digest(self) -> bytes:
        return hashlib.blake2b(self.row, digest_size=16).digest()

    @property
    def digest(self) -> str:
        """Of everything that was submitted under this id."""
        return body_digest(self.row_digest, self.identity)

    @property
    def identity(self) -> tuple[Any, ...]:
        """All that was submitted but the row and the id."""
        return (
            *(self.agent, self.task_index, self.sample_index),
            *(self.run_id, self.task_id, self.group_id, self.priority, self.deadline_s),
        )


def body_digest(row_digest: bytes, identity: Sequence[Any]) -> str:
    """See `JobSpec.digest`."""
    return hashlib.blake2b(row_digest + orjson.dumps(list(identity)), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Offer:
    """What became of one job of a batch."""

    job_id: str
    is_new: bool
    state: JobState
    digest: str
    """Of what was offered now."""
    known_digest: str
    """Of what is recorded under the id."""

    @property
    def is_refused(self) -> bool:
        """The id belongs to a job with another content."""
        return self.digest != self.known_digest


@dataclass(frozen=True, slots=True)
class Room:
    """How many more jobs a dispatcher can take, where agents or environments have bounds."""

    agents: Mapping[str, int]
    """Free places by agent. Jobs of other agents are left to other dispatchers."""
    environment_of: Mapping[str, str]
    environments: Mapping[str, int]
    """Free places by environment; one that is not named has no bound."""

    def pick(self, candidates: Sequence[tuple[int, int, str]], limit: int) -> list[int]:
        """The first ``limit`` of ``(priority, place in the queue, agent)`` that find a place, best first."""
        agents, environments = dict(self.agents), dict(self.environments)
        picked: list[int] = []
        for _, place, agent in sorted(candidates, key=lambda each: (-each[0], each[1])):
            environment = self.environment_of.get(agent, "")
            if len(picked) == limit:
                break
            if agents.get(agent, 0) < 1 or environments.get(environment, 1) < 1:
                continue
            agents[agent] -= 1
            if environment in environments:
                environments[environment] -= 1
            picked.append(place)
        return picked


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage produced, as it is stored and handed on."""

    stage: StageName
    payload: bytes
    """One JSON object: for RUN what EVAL needs (response, outcome, artifacts), for EVAL the result row."""
    duration_s: float


@dataclass(slots=True)
class Job:
    """A claimed job. ``lease_epoch`` fences every later write of its claimer."""

    spec: JobSpec
    state: JobState
    stage: StageName
    """The next stage to run: INIT, or EVAL when RUN's result is stored and still stands."""
    attempt: int
    """From 1; grows with every claim that runs the harness again."""
    lease_epoch: int = 0
    eval_tries: int = 0
    failures: tuple[StageFailure, ...] = ()
    run_result: bytes | None = None
    """The stored RUN payload, when ``stage`` is EVAL."""
    left_s: float | None = None
    """Until its deadline, when it was claimed."""
    cancel_reason: str | None = None
    """Somebody asked for its end while it was under way."""

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def rollout(self) -> RolloutIdentity:
        spec = self.spec
        return RolloutIdentity(
            rollout_id=spec.job_id,
            task_id=spec.task_id,
            group_id=spec.group_id,
            sample_index=spec.sample_index,
            attempt=self.attempt,
            run_id=spec.run_id,
        )


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an attempt is stopped from outside: cancelled, overdue, or its server is gone."""

    kind: FailureKind
    reason: str
    retryable: bool = False


@dataclass(slots=True)
class JobAttempt(Attempt):
    """A claimed job's attempt on its way through the stages."""

    job: Job = field(kw_only=True)
    public_row: Mapping[str, Any] | None = None
    """What an agent with its own ``run()`` gets of the row."""
    evaluation_log: str | None = None
    """The file with what grading printed, beside the result file."""
    timings: dict[str, float] = field(default_factory=dict)
    salvage: Callable[[], Awaitable[dict[str, Any]]] | None = None
    """What is worth keeping of the attempt when it ends without a verdict; asked once, before it is closed."""
    stop: Stop | None = None
    """Why it is being stopped."""
    lost: bool = False
    """Its lease is somebody else's by now."""
    has_result: bool = False
    """Its result is with the store, and its lease at an end; what is left is to close it."""
    claimed_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, job: Job, servers: Servers) -> JobAttempt:
        """The attempt of a job, which goes on after RUN where the job's RUN result is stored."""
        spec = job.spec
        rollout = {  # as plain data: what is wrong with it is the environment's to say, and fails this job alone
            "rollout_id": spec.job_id,
            "task_id": spec.task_id,
            "group_id": spec.group_id,
            "sample_index": spec.sample_index,
            "attempt": job.attempt,
            "run_id": spec.run_id,
        }
        attempt = cls(servers, rollout, spec.row, numbers={ROLLOUT_INDEX_KEY: spec.sample_index}, job=job)
        if job.stage is StageName.EVAL and job.run_result is not None:
            attempt._restore(job.run_result)
        return attempt

    def stored_run(self) -> bytes:
        """RUN's payload: what EVAL needs when another process takes the attempt up again."""
        held: dict[str, Any] = {"control_token": self.control_token, "cookies": dict(self.cookies)}
        if self.session is not None:
            held["session"] = {"session_id": self.session.session_id, "control_token": self.session.control_token}
        held["replicas"] = self.replicas
        held["timings"] = self.timings
        act = self.act if self.act_json is None else orjson.Fragment(self.act_json)
        verified = {} if self.verified is None else {"verified": self.verified}  # by an agent's own run
        return orjson.dumps({"act": act, "held": held, **verified})

    def _restore(self, payload: bytes) -> None:
        stored = orjson.loads(payload)
        self.verified = stored.get("verified")
        self.act = stored.get("act") or {}
        held = stored.get("held") or {}
        self.control_token = held.get("control_token")
        self.cookies = held.get("cookies") or {}
        self.replicas.update(held.get("replicas") or {})
        self.timings.update(held.get("timings") or {})
        if (session := held.get("session")) is not None:
            self.session = ModelSession(session["session_id"], "", "", session["control_token"])


@dataclass(slots=True)
class RunCounts:
    """How far the jobs of one run are."""

    run_id: str
    jobs: dict[JobState, int]
    retried: int = 0
    """Of those that have not ended: how many failed before."""
    waiting_for_retry: int = 0
    recent: int = 0
    """How many ended of late, within ``recent_s``."""
    recent_s: float = 0.0
    finished_at: float | None = None
    """When one ended last, if that was of late."""
    place: int = 0
    """Of the job that was submitted last."""


@dataclass(frozen=True, slots=True)
class JobSelector:
    """Jobs by any of these; an empty selector means all."""

    job_ids: frozenset[str] | None = None
    group_id: str | None = None
    run_id: str | None = None
    states: frozenset[JobState] | None = None

    def matches(self, job: Job) -> bool:
        return (
            (self.job_ids is None or job.job_id in self.job_ids)
            and (self.group_id is None or job.spec.group_id == self.group_id)
            and (self.run_id is None or job.spec.run_id == self.run_id)
            and (self.states is None or job.state in self.states)
        )


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the store holds it, for reports and exports."""

    spec: JobSpec
    state: JobState
    attempt: int
    failures: tuple[StageFailure, ...]
    result: bytes | None
    """The result row (`DONE`) or the failure row (`FAILED`, `CANCELLED`)."""
    place: int = 0
    """In the order of submission."""
    result_place: int | None = None
    """In the order in which results were recorded."""

    @property
    def job_id(self) -> str:
        return self.spec.job_id


FailureRenderer = Callable[[Job, StageFailure], bytes]
"""Makes the failure row of a job."""


@runtime_checkable
class JobStore(Protocol):
    """Durable truth about jobs. Every awaited write is durable when it returns.

    Writes by a claimer name the job's lease epoch and raise `FencedError` when it is no longer theirs. A store that
    cannot write (disk full, server gone) raises `StoreError`; nothing acknowledged is lost, and the run can be
    resumed.
    """

    def is_shared(self) -> bool:
        """Whether other processes may work on the same jobs."""
        ...

    async def open_run(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the run once; returns what is on record, which on a resume is the first description, with the
        ``server_logs`` of both."""
        ...

    async def submit(self, specs: Sequence[JobSpec]) -> int:
        """Record jobs, and return how many were new. A known ``job_id`` with the same content is the same job;
        with another content raises `ContractError`."""
        ...

    async def offer(self, specs: Sequence[JobSpec]) -> list[Offer]:
        """As `submit`, job by job: one whose id is another's is refused, and the others are recorded."""
        ...

    async def claim(self, owner: str, limit: int, lease_s: float, room: Room | None = None) -> list[Job]:
        """Up to ``limit`` queued jobs, best priority first, each with a new lease epoch, and a new attempt unless its
        stage is EVAL. Jobs whose lease has run out are queued again first. With ``room``, only jobs that find a place
        in it."""
        ...

    async def claim_overdue(self, owner: str, limit: int, lease_s: float) -> list[Job]:
        """Queued jobs whose deadline has passed, or whose end was asked for: their claimer records that."""
        ...

    async def asked_to_end(self, owner: str) -> dict[str, str]:
        """Jobs of ``owner`` that another process cancelled, each with the reason."""
        ...

    async def renew(self, owner: str, lease_s: float, job_ids: Collection[str]) -> frozenset[str]:
        """Extend the leases of ``owner`` on these jobs; returns the ids of those it still holds. A lease that it does
        not name runs out: nobody works on that job."""
        ...

    def record_stage(self, job: Job, result: StageResult) -> Awaitable[None]:
        """Keep a stage's result, so that a later claim starts after it. Takes its place in the order of writes when
        called, not when awaited."""
        ...

    async def complete(self, job: Job, result: bytes) -> None:
        """Record the result row: the job is `DONE`, once."""
        ...

    async def fail(self, job: Job, failure: StageFailure, result: bytes) -> None:
        """Record the failure row: the job is `FAILED` (or `CANCELLED`, by the failure's kind)."""
        ...

    async def record_ended(self, results: Sequence[tuple[str, JobState, bytes]]) -> None:
        """Record how jobs ended that nobody claimed: their ids, `DONE` or `FAILED`, and their rows. For a caller that
        knows that nobody works on them, and that the result files have them; a verdict that is recorded stays."""
        ...

    async def requeue(self, job: Job, failure: StageFailure | None = None, *, delay_s: float = 0.0) -> None:
        """Give the job back, after ``delay_s``. With a failure it counts against the budget; with one that needs no
        new attempt the job comes back at EVAL with its stored RUN result."""
        ...

    async def reset(self, selector: JobSelector) -> int:
        """Queue terminal or abandoned jobs again with a fresh budget; their results are withdrawn. Attempts go on
        growing, so older ones stay fenced."""
        ...

    async def cancel(self, selector: JobSelector, failure: StageFailure, render: FailureRenderer) -> list[Job]:
        """Record queued jobs as cancelled and return them. Claimed ones are marked: their dispatcher stops them, or
        whoever claims them next."""
        ...

    async def release(self, owner: str | None = None) -> int:
        """Queue again what ``owner`` (``None``: anybody) still has claimed. For a caller that knows the owner is gone;
        nothing counts against a budget."""
        ...

    async def next_due_s(self) -> float | None:
        """Seconds until a delayed job may be claimed: 0 when one may now, ``None`` when none is queued."""
        ...

    async def counts(self) -> dict[JobState, int]: ...

    def iterate(self, selector: JobSelector) -> AsyncIterator[JobRecord]:
        """Every matching job in order of submission, a page at a time."""
        ...

    async def page(self, selector: JobSelector, after: int, limit: int, *, results: bool = True) -> list[JobRecord]:
        """Up to ``limit`` matching jobs behind a place in the order of submission; without ``results``, none has its
        result."""
        ...

    async def results(self, selector: JobSelector, after: int, limit: int) -> list[JobRecord]:
        """Up to ``limit`` matching jobs that have ended, behind a place in the order in which their results were
        recorded. What is recorded later has a later place."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class Stage(Protocol):
    """One step of a rollout, with its own queue, worker pool, active set, timeout and error handler."""

    @property
    def name(self) -> StageName: ...

    @property
    def workers(self) -> int: ...

    @property
    def timeout_s(self) -> float:
        """Of execution, not of queueing."""
        ...

    async def run(self, attempt: JobAttempt) -> StageResult:
        """Do the step for one attempt, which holds what earlier stages opened."""
        ...

    def classify(self, error: BaseException) -> StageFailure:
        """The typed failure for anything that `run` raised; never a reward."""
        ...


@dataclass(frozen=True, slots=True)
class CancelReport:
    queued: int
    active: int
    seconds: float
    """Until every attempt was closed. An agent that owns its box removes it when its caller is gone, a moment
    later."""
    released: int = 0
    """Sessions of environments and model servers that the active ones held."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something a listener may want to show. ``result`` is there when ``state`` is terminal."""

    job: Job
    state: JobState
    stage: StageName
    result: Mapping[str, Any] | None = None
    failure: StageFailure | None = None


JobListener = Callable[[JobEvent], None]
"""Called on the event loop; must not block and must not raise."""


@runtime_checkable
class Dispatcher(Protocol):
    """Takes jobs out of a store, drives each through the stages, and records what came of them."""

    async def start(self) -> None: ...

    def notify(self) -> None:
        """There may be new jobs in the store."""
        ...

    async def drain(self) -> None:
        """Return when no job is queued or under way; raises what stopped the dispatcher, if anything did."""
        ...

    async def cancel(self, selector: JobSelector, reason: str) -> CancelReport:
        """Stop matching jobs for good: the harness is stopped, its boxes released, the job recorded `CANCELLED`."""
        ...

    async def stop(self) -> None:
        """Take no more jobs, stop those under way, release everything, and leave them queued for a later resume."""
        ...
