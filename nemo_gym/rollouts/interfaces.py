"""The interfaces of the pipeline: what a stage, a job store and a dispatcher promise to each other.

    caller ──submit──▶ JobStore ◀──claim/record/complete── Dispatcher ──run──▶ Stage INIT → RUN → EVAL

A store may be a file or a database server, a dispatcher one event loop or a cluster, a stage an HTTP call or a
function: each can be replaced without a change to the others. *Results are recorded exactly once; execution is at
least once and fenced.*
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
    """Too many attempts in a row failed the same way, so the run stopped; it can be continued."""

    code = "same_failure"
    status = 503


class JobState(StrEnum):
    QUEUED = "queued"
    CLAIMED = "claimed"
    DONE = "done"
    """The job has a verdict."""
    FAILED = "failed"
    """The job ended without a verdict; the typed reason is recorded."""
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a caller submits. The caller chooses ``job_id``: submitting the same id again means the same job."""

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
    """The dataset row as one JSON object, without a newline at its end."""
    priority: int = 0
    """Higher first; jobs of equal priority in order of submission."""
    deadline_s: float | None = None
    """Seconds from the first submission, waiting included, after which the job ends without a verdict."""

    @property
    def row_digest(self) -> bytes:
        return hashlib.blake2b(self.row, digest_size=16).digest()

    @property
    def digest(self) -> str:
        """The digest of everything that was submitted under this id."""
        return body_digest(self.row_digest, self.identity)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Everything that was submitted, except the row and the id."""
        return (
            *(self.agent, self.task_index, self.sample_index),
            *(self.run_id, self.task_id, self.group_id, self.priority, self.deadline_s),
        )


def body_digest(row_digest: bytes, identity: Sequence[Any]) -> str:
    """See `JobSpec.digest`."""
    return hashlib.blake2b(row_digest + orjson.dumps(list(identity)), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Offer:
    """The store's answer for one job of a submitted batch."""

    job_id: str
    is_new: bool
    state: JobState
    digest: str
    """`JobSpec.digest` of the job offered now."""
    known_digest: str
    """`JobSpec.digest` of the job recorded under this id."""

    @property
    def is_refused(self) -> bool:
        """The id belongs to a job with different content."""
        return self.digest != self.known_digest


@dataclass(frozen=True, slots=True)
class Room:
    """How many more jobs a dispatcher can take, if agents or environments have limits."""

    agents: Mapping[str, int]
    """Free places by agent. Jobs of other agents are left to other dispatchers."""
    environment_of: Mapping[str, str]
    environments: Mapping[str, int]
    """Free places by environment; an environment that is not listed has no limit."""

    def pick(self, candidates: Sequence[tuple[int, int, str]], limit: int) -> list[int]:
        """Return the queue places of the first ``limit`` candidates ``(priority, place in the queue, agent)`` that
        fit, highest priority first."""
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
    """What a stage produced, as it is stored and passed to the next stage."""

    stage: StageName
    payload: bytes
    """One JSON object. For RUN: what EVAL needs (response, outcome, artifacts). For EVAL: the result row."""
    duration_s: float


@dataclass(slots=True)
class Job:
    """A claimed job. Every later write of its claimer names ``lease_epoch``, so the store can fence it."""

    spec: JobSpec
    state: JobState
    stage: StageName
    """The next stage to run: INIT, or EVAL when RUN's result is stored and still valid."""
    attempt: int
    """Counts from 1; grows with every claim that runs the harness again."""
    lease_epoch: int = 0
    eval_tries: int = 0
    failures: tuple[StageFailure, ...] = ()
    run_result: bytes | None = None
    """The stored RUN payload, when ``stage`` is EVAL."""
    left_s: float | None = None
    """Seconds that were left until the deadline when the job was claimed."""
    cancel_reason: str | None = None
    """Why another process cancelled the job while it was claimed, if one did."""

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
    """The part of the row that an agent with its own ``run()`` receives."""
    evaluation_log: str | None = None
    """The file with the output of grading, relative to the folder of the result file."""
    timings: dict[str, float] = field(default_factory=dict)
    salvage: Callable[[], Awaitable[dict[str, Any]]] | None = None
    """Returns the fields to keep from an attempt that ends without a verdict; called once, before it is closed."""
    stop: Stop | None = None
    """Why the attempt is being stopped."""
    lost: bool = False
    """The lease was lost: another claimer may have the job."""
    has_result: bool = False
    """The result was handed to the store, which ends the lease; the attempt only has to be closed."""
    claimed_at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, job: Job, servers: Servers) -> JobAttempt:
        """Return the attempt of a job. If the job's RUN result is stored, the attempt continues after RUN."""
        spec = job.spec
        rollout = {  # as plain data: the environment checks it, and an error fails this job alone
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
        """Return RUN's payload: what EVAL needs if another process continues the attempt."""
        state: dict[str, Any] = {"control_token": self.control_token, "cookies": dict(self.cookies)}
        if self.session is not None:
            state["session"] = {"session_id": self.session.session_id, "control_token": self.session.control_token}
        state["replicas"] = self.replicas
        state["timings"] = self.timings
        act = self.act if self.act_json is None else orjson.Fragment(self.act_json)
        verified = {} if self.verified is None else {"verified": self.verified}  # if the agent has its own run()
        return orjson.dumps({"act": act, "held": state, **verified})

    def _restore(self, payload: bytes) -> None:
        stored = orjson.loads(payload)
        self.verified = stored.get("verified")
        self.act = stored.get("act") or {}
        state = stored.get("held") or {}
        self.control_token = state.get("control_token")
        self.cookies = state.get("cookies") or {}
        self.replicas.update(state.get("replicas") or {})
        self.timings.update(state.get("timings") or {})
        if (session := state.get("session")) is not None:
            self.session = ModelSession(session["session_id"], "", "", session["control_token"])


@dataclass(slots=True)
class RunCounts:
    """The progress of one run's jobs."""

    run_id: str
    jobs: dict[JobState, int]
    retried: int = 0
    """How many of the unfinished jobs have failed before."""
    waiting_for_retry: int = 0
    recent: int = 0
    """How many jobs ended within the last ``recent_s`` seconds."""
    recent_s: float = 0.0
    finished_at: float | None = None
    """When the last job ended, if it is among the results looked at."""
    place: int = 0
    """The place of the job that was submitted last, in the order of submission."""


@dataclass(frozen=True, slots=True)
class JobSelector:
    """Selects the jobs that match every field that is set; an empty selector matches all jobs."""

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
    """The job's place in the order of submission."""
    result_place: int | None = None
    """The job's place in the order in which results were recorded."""

    @property
    def job_id(self) -> str:
        return self.spec.job_id


FailureRenderer = Callable[[Job, StageFailure], bytes]
"""Makes the failure row of a job."""


@runtime_checkable
class JobStore(Protocol):
    """The durable record of all jobs. Every awaited write is durable when it returns.

    Writes by a claimer name the job's lease epoch and raise `FencedError` when the claimer no longer holds the job. A
    store that cannot write (disk full, server gone) raises `StoreError`; no acknowledged write is lost, and the run
    can be resumed.
    """

    def is_shared(self) -> bool:
        """Whether other processes may work on the same jobs."""
        ...

    async def open_run(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Record the run's description once. Return the recorded one: on a resume this is the first description, with
        the ``server_logs`` of both."""
        ...

    async def submit(self, specs: Sequence[JobSpec]) -> int:
        """Record jobs, and return how many were new. A known ``job_id`` with the same content is the same job; with
        different content it raises `ContractError`."""
        ...

    async def offer(self, specs: Sequence[JobSpec]) -> list[Offer]:
        """Like `submit`, but job by job: a job whose id belongs to different content is refused, and the others are
        recorded."""
        ...

    async def claim(self, owner: str, limit: int, lease_s: float, room: Room | None = None) -> list[Job]:
        """Claim up to ``limit`` queued jobs, highest priority first, each with a new lease epoch, and a new attempt
        unless its stage is EVAL. Jobs whose lease has expired are queued again first. With ``room``, claim only jobs
        that fit into it."""
        ...

    async def claim_overdue(self, owner: str, limit: int, lease_s: float) -> list[Job]:
        """Claim queued jobs whose deadline has passed or which were cancelled; the claimer records how they ended."""
        ...

    async def asked_to_end(self, owner: str) -> dict[str, str]:
        """Return the jobs of ``owner`` that another process cancelled, each with the reason."""
        ...

    async def renew(self, owner: str, lease_s: float, job_ids: Collection[str]) -> frozenset[str]:
        """Extend the leases of ``owner`` on these jobs, and return the ids of those it still holds. Leases of jobs
        not in ``job_ids`` expire, because nobody works on those jobs."""
        ...

    def record_stage(self, job: Job, result: StageResult) -> Awaitable[None]:
        """Store a stage's result, so that a later claim starts after that stage. The write is ordered by the time of
        the call, not of the await."""
        ...

    async def complete(self, job: Job, result: bytes) -> None:
        """Record the result row, exactly once; the job is then `DONE`."""
        ...

    async def fail(self, job: Job, failure: StageFailure, result: bytes) -> None:
        """Record the failure row; the job is then `FAILED` (or `CANCELLED`, by the failure's kind)."""
        ...

    async def record_ended(self, results: Sequence[tuple[str, JobState, bytes]]) -> None:
        """Record how unclaimed jobs ended, as ``(job id, DONE or FAILED, row)``. The caller knows that nobody works
        on these jobs and that the result files hold their rows. A recorded verdict is not replaced."""
        ...

    async def requeue(self, job: Job, failure: StageFailure | None = None, *, delay_s: float = 0.0) -> None:
        """Queue the job again, to be claimed after ``delay_s``. A ``failure`` counts against the retry budget; if it
        needs no new attempt, the job resumes at EVAL with its stored RUN result."""
        ...

    async def reset(self, selector: JobSelector) -> int:
        """Queue terminal or abandoned jobs again with a fresh retry budget, and remove their results. Attempt numbers
        continue to grow, so older attempts stay fenced."""
        ...

    async def cancel(self, selector: JobSelector, failure: StageFailure, render: FailureRenderer) -> list[Job]:
        """Record queued jobs as cancelled and return them. Mark claimed jobs: their dispatcher stops them, or else
        their next claimer does."""
        ...

    async def release(self, owner: str | None = None) -> int:
        """Queue the jobs again that ``owner`` (``None``: any owner) has claimed. For a caller that knows the owner is
        gone; this does not count against a retry budget."""
        ...

    async def next_due_s(self) -> float | None:
        """Return the seconds until a queued job may be claimed: 0 if one may be now, ``None`` if none is queued."""
        ...

    async def counts(self) -> dict[JobState, int]: ...

    def iterate(self, selector: JobSelector) -> AsyncIterator[JobRecord]:
        """Yield every matching job in order of submission, reading a page at a time."""
        ...

    async def page(self, selector: JobSelector, after: int, limit: int, *, results: bool = True) -> list[JobRecord]:
        """Return up to ``limit`` matching jobs after place ``after`` in the order of submission; if ``results`` is
        false, without their results."""
        ...

    async def results(self, selector: JobSelector, after: int, limit: int) -> list[JobRecord]:
        """Return up to ``limit`` matching jobs that have ended, after place ``after`` in the order in which results
        were recorded. A result recorded later has a later place."""
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
        """The deadline of one execution; time in the queue does not count."""
        ...

    async def run(self, attempt: JobAttempt) -> StageResult:
        """Run the stage for one attempt, which holds what earlier stages opened."""
        ...

    def classify(self, error: BaseException) -> StageFailure:
        """Return the typed failure for an exception of `run`; never a reward."""
        ...


@dataclass(frozen=True, slots=True)
class CancelReport:
    queued: int
    active: int
    seconds: float
    """The time until every attempt was closed. An agent that owns its sandbox removes it a moment later, when it
    notices that its caller is gone."""
    released: int = 0
    """The number of open resources, such as environment and model sessions, that the active attempts held."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change of a job's state, for listeners. ``result`` is set when the job is `DONE`, ``failure`` otherwise."""

    job: Job
    state: JobState
    stage: StageName
    result: Mapping[str, Any] | None = None
    failure: StageFailure | None = None


JobListener = Callable[[JobEvent], None]
"""Called on the event loop; must not block and must not raise."""


@runtime_checkable
class Dispatcher(Protocol):
    """Claims jobs from a store, drives each through the stages, and records its result."""

    async def start(self) -> None: ...

    def notify(self) -> None:
        """Tell the dispatcher that the store may have new jobs."""
        ...

    async def drain(self) -> None:
        """Return when no job is queued or running. If an error stopped the dispatcher, raise it."""
        ...

    async def cancel(self, selector: JobSelector, reason: str) -> CancelReport:
        """End matching jobs: stop their harnesses, release their sandboxes, and record the jobs as `CANCELLED`."""
        ...

    async def stop(self) -> None:
        """Claim no more jobs, stop the running ones, release everything they hold, and queue them for a later
        resume."""
        ...
