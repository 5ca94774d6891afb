"""What the parts of the pipeline pass to each other: jobs, attempts at them, and how they ended.

    caller ──submit──▶ SqlJobStore ◀──claim/record/complete── AsyncDispatcher ──run──▶ Stage INIT → RUN → EVAL

*Results are recorded exactly once; execution is at least once and fenced.*
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import orjson

from nemo_gym.contract.errors import NemoGymError
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

    @classmethod
    def of(cls, failure: StageFailure) -> JobState:
        """Return the state of a job that ended with this failure."""
        return cls.CANCELLED if failure.kind is FailureKind.CANCELLED else cls.FAILED


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

    def has_verdict(self) -> bool:
        """Whether the job's agent has its own ``run()``, and an earlier claimer stored its verdict."""
        return self.run_result is not None and orjson.loads(self.run_result).get("verified") is not None


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an attempt is stopped from outside: cancelled, overdue, or its server is gone."""

    kind: FailureKind
    reason: str
    retryable: bool = False
    server_lost: bool = False

    def failure(self, stage: StageName) -> StageFailure:
        """Return the stop as a failure in ``stage``. A lost server has status 0, like a call without a response."""
        details = {"status": 0} if self.server_lost else {}
        return StageFailure(stage, self.kind, self.reason, retryable=self.retryable, details=details)


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
    run_stored: asyncio.Future[None] | None = None
    """The write of this attempt's RUN result. Once it is done, another process may continue the attempt at EVAL."""
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
        if job.run_result is not None:
            attempt._restore(job.run_result)
        return attempt

    @property
    def is_restored(self) -> bool:
        """Whether the attempt continues after RUN, with what an earlier claimer of the job left open."""
        return self.job.run_result is not None

    def stored_run(self) -> bytes:
        """Return RUN's payload: what EVAL needs if another process continues the attempt."""
        state: dict[str, Any] = {"control_token": self.control_token, "cookies": dict(self.cookies)}
        if self.session is not None:
            state["session"] = {"session_id": self.session.session_id, "control_token": self.session.control_token}
        if self.row_ref is not None:
            state["row_ref"] = self.row_ref
        if self.public_params is not None:
            state["public_params"] = self.public_params
        if placement := self.descriptor.get("placement"):
            state["placement"] = placement
        state["closes_with_verdict"] = self.closes_with_verdict
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
        self.row_ref = state.get("row_ref")
        self.public_params = state.get("public_params")
        self.descriptor = {"placement": state.get("placement") or {}}
        self.closes_with_verdict = state.get("closes_with_verdict") is True
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


A_contra = TypeVar("A_contra", bound=JobAttempt, contravariant=True)


class Stage(Protocol[A_contra]):
    """One step of a rollout, with its own queue, worker pool, active set, timeout and error handler."""

    @property
    def name(self) -> StageName: ...

    @property
    def workers(self) -> int: ...

    @property
    def timeout_s(self) -> float:
        """The deadline of one execution; time in the queue does not count."""
        ...

    async def run(self, attempt: A_contra, /) -> bytes:
        """Run the stage for one attempt, which holds what earlier stages opened. Return what is stored of it: for RUN
        what EVAL needs (`JobAttempt.stored_run`), for EVAL the result row, for INIT nothing."""
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
    """How a job ended, for listeners. ``result`` is set when the job is `DONE`, ``failure`` otherwise."""

    job: Job
    state: JobState
    result: Mapping[str, Any] | None = None
    failure: StageFailure | None = None


JobListener = Callable[[JobEvent], None]
"""Called on the event loop; must not block and must not raise."""
