"""The in-process dispatcher: three pools of workers on one event loop, joined by bounded queues.

    store ──claim──▶ INIT ──ready──▶ RUN ──▶ EVAL ──complete──▶ store
                       ▲ requeue (a failure of the infrastructure, as a new attempt)

A worker passes its attempt on only when the next stage has room, so nothing is prepared faster than it can be used. A
rollout that fails becomes a row; the run stops only if the store cannot write or too many attempts fail the same way.

Stages and results are counted as metrics, and each attempt is the root of a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from nemo_gym._util.tasks import BackgroundTasks, finish, pause_after
from nemo_gym.config.observability import ObservabilityConfig
from nemo_gym.config.pipeline import PipelineConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.contract.errors import FencedError
from nemo_gym.contract.verdict import JOB_OVERDUE, FailureKind, StageFailure, StageName
from nemo_gym.http import telemetry
from nemo_gym.http.observability import start_traces
from nemo_gym.http.peers import REFUSED
from nemo_gym.http.telemetry import (
    METRICS_PATH,
    ROLLOUT_ID_PATTERN,
    Counter,
    Histogram,
    Reading,
    add_source,
    remove_source,
    rollout_context,
    within,
)
from nemo_gym.rollout import Attempt, Servers
from nemo_gym.rollouts.interfaces import (
    CancelReport,
    Job,
    JobAttempt,
    JobEvent,
    JobListener,
    JobSelector,
    JobState,
    SameFailureError,
    Stage,
    Stop,
)
from nemo_gym.rollouts.result_rows import failure_row, same_way
from nemo_gym.rollouts.server_pool import LOST_KINDS, ServerPool
from nemo_gym.rollouts.store import SqlJobStore

A = TypeVar("A", bound=JobAttempt)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The current load of a stage."""

    stage: StageName
    queued: int
    active: int
    workers: int
    oldest_s: float
    """Seconds since the oldest active attempt started in this stage; 0 if none is active."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The stage that an attempt is in."""

    stage: StageName
    since: float | None
    """When a worker took it, by the monotonic clock; ``None`` while it waits."""


class StagePool(Generic[A]):
    """``stage.workers`` workers over a queue of ``buffer`` places.

    ``on_result`` and ``on_failure`` run in the worker, so a worker that cannot pass its attempt on takes no new one.
    ``on_start`` is called when a worker starts an attempt, and ``on_error`` if one of the three others raises.
    """

    def __init__(
        self,
        stage: Stage[A],
        buffer: int,
        on_result: Callable[[A, bytes], Awaitable[None]],
        on_failure: Callable[[A, StageFailure], Awaitable[None]],
        on_abandon: Callable[[A], Awaitable[None]],
        on_error: Callable[[A, Exception], None],
        on_start: Callable[[A], None] | None = None,
    ) -> None:
        self._stage = stage
        self._buffer = buffer
        self._waiting: dict[int, A] = {}
        self._filled = asyncio.Semaphore(0)
        """Counts the attempts that were put in, including those that `interrupt` removed from the queue."""
        self._blocked: dict[int, asyncio.Future[None]] = {}
        """Attempts that wait for a place in the queue."""
        self._queue_of_blocked: deque[int] = deque()
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        """Attempts that are to be queued later."""
        self._active: dict[int, tuple[asyncio.Task[None], float]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._ending = BackgroundTasks()
        self._stopping = False
        self._on_result, self._on_failure, self._on_abandon = on_result, on_failure, on_abandon
        self._on_error, self._on_start = on_error, on_start

    def start(self) -> None:
        self._workers = [
            asyncio.create_task(self._work(), name=f"{self._stage.name}-{number}")
            for number in range(self._stage.workers)
        ]

    async def stop(self) -> None:
        """Cancel all workers. The dispatcher releases their attempts."""
        self._stopping = True
        for pause in self._pauses.values():
            pause.cancel()
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._ending.cancel()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        return self._buffer

    @property
    def free(self) -> int:
        """Places left in the queue."""
        return max(0, self._buffer - len(self._waiting))

    @property
    def status(self) -> StageStatus:
        now = time.monotonic()
        oldest_s = max((now - since for _, since in self._active.values()), default=0.0)
        queued = len(self._waiting) + len(self._blocked) + len(self._pauses)
        return StageStatus(self._stage.name, queued, len(self._active), self._stage.workers, oldest_s)

    def place_of(self, attempt: A) -> StagePlace | None:
        """Return where the attempt is in this stage, or ``None`` if it is not in this stage."""
        key = id(attempt)
        if (active := self._active.get(key)) is not None:
            return StagePlace(self._stage.name, active[1])
        is_queued = key in self._waiting or key in self._blocked or key in self._pauses
        return StagePlace(self._stage.name, None) if is_queued else None

    async def put(self, attempt: A) -> None:
        """Queue an attempt, waiting for a free place. If it is stopped before it gets one, it ends here."""
        key = id(attempt)
        while self._is_full():
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._blocked[key] = place
            self._queue_of_blocked.append(key)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._offer_place()  # pass on the place that this attempt was given
                raise
            finally:
                self._blocked.pop(key, None)
            if attempt.stop is not None or attempt.lost:
                self._offer_place()
                await self._end_stopped(attempt)
                return
        self.put_now(attempt)

    def _is_full(self) -> bool:
        """Whether the queue is, or the stage holds as many attempts as its queue and its workers would without pauses:
        each has a session open, and perhaps a box, so a verifier that fails for all must hold up the stage before."""
        held = len(self._waiting) + len(self._active) + len(self._pauses)
        return len(self._waiting) >= self._buffer or held >= self._buffer + self._stage.workers

    def put_now(self, attempt: A) -> None:
        """Queue an attempt even if the queue is full: for the feeder, and for attempts that resume at EVAL."""
        self._waiting[id(attempt)] = attempt
        self._filled.release()

    def put_later(self, attempt: A, delay_s: float) -> None:
        """Queue an attempt as `put_now` does, after a pause. No worker waits meanwhile."""
        self._pauses[id(attempt)] = asyncio.get_running_loop().call_later(delay_s, self._end_pause, attempt)

    def _end_pause(self, attempt: A) -> None:
        del self._pauses[id(attempt)]
        self.put_now(attempt)

    def interrupt(self, attempt: A) -> None:
        """Stop the attempt if it is in this stage: active, waiting, or in a pause before its next try."""
        key = id(attempt)
        if (active := self._active.get(key)) is not None:
            active[0].cancel()
        elif (place := self._blocked.get(key)) is not None and not place.done():
            place.set_result(None)
        elif (pause := self._pauses.pop(key, None)) is not None:
            pause.cancel()
            self._offer_place()
            self._ending.start(self._guard(self._end_stopped, attempt), name=f"end {attempt.job.job_id}")
        elif self._waiting.pop(key, None) is not None:
            self._offer_place()
            self._ending.start(self._guard(self._end_stopped, attempt), name=f"end {attempt.job.job_id}")

    async def _end_stopped(self, attempt: A) -> None:
        if attempt.lost or (failure := self._failure_of_stop(attempt)) is None:
            await self._on_abandon(attempt)
        else:
            await self._on_failure(attempt, failure)

    def _failure_of_stop(self, attempt: A) -> StageFailure | None:
        """Return why the attempt was stopped, as a failure in this stage."""
        return None if attempt.stop is None else attempt.stop.failure(self._stage.name)

    def _offer_place(self) -> None:
        while self._queue_of_blocked:
            place = self._blocked.get(self._queue_of_blocked.popleft())
            if place is not None and not place.done():
                place.set_result(None)
                return

    async def _next(self) -> A:
        while True:
            await self._filled.acquire()
            if self._waiting:
                attempt = self._waiting.pop(next(iter(self._waiting)))
                self._offer_place()
                return attempt

    async def _work(self) -> None:
        while True:
            attempt = await self._next()
            await self._guard(self._take, attempt)

    async def _guard(self, work: Callable[[A], Awaitable[None]], attempt: A) -> None:
        """Nobody awaits this work: an error that ended it unseen would leave its attempt in no stage for ever."""
        try:
            await work(attempt)
        except Exception as error:  # noqa: BLE001 - stages have their own boundary; this is one of the hand-over
            self._on_error(attempt, error)

    async def _take(self, attempt: A) -> None:
        if attempt.lost or attempt.stop is not None:
            await self._end_stopped(attempt)
            return
        task = asyncio.current_task()
        assert task is not None
        failure: StageFailure | None = None
        result: bytes | None = None
        self._active[id(attempt)] = (task, time.monotonic())
        try:
            job_id = attempt.job.job_id
            # With this context, every server's log lines about this attempt name its rollout.
            context = attempt.span.context if attempt.span is not None else None
            with rollout_context(job_id if ROLLOUT_ID_PATTERN.match(job_id) else None), within(context):
                async with asyncio.timeout(self._stage.timeout_s):
                    if self._on_start is not None:
                        self._on_start(attempt)
                    result = await self._stage.run(attempt)
        except asyncio.CancelledError:
            if self._stopping:
                raise
            while task.uncancel():  # an attempt may be interrupted again while it ends
                pass
            failure = self._failure_of_stop(attempt)
        except Exception as error:  # noqa: BLE001 - the stage's boundary: every failure becomes typed
            failure = self._stage.classify(error)
        finally:
            self._active.pop(id(attempt), None)
            if self._pauses:
                self._offer_place()
        if failure is not None:
            await self._on_failure(attempt, failure)
        elif result is not None:
            await self._on_result(attempt, result)
        else:
            await self._on_abandon(attempt)


PREFIX = "nemo_gym_rollouts_"
PIPELINE = "pipeline"
STAGE_SECONDS = Histogram(f"{PREFIX}stage_seconds", "Stages that ended well, without their queue", ("stage",))
ATTEMPTS = Counter(f"{PREFIX}attempts", "Attempts that ended, by how: done, or the kind of failure", ("outcome",))
FINISHED = Counter(f"{PREFIX}finished", "Rollouts that are over, by state: done, failed, cancelled", ("state",))
REWARDED = Counter(f"{PREFIX}rewarded", "Rollouts that ended with a reward")


class _Rewards:
    """The sum of all rewards. It is not a counter, because rewards may be negative."""

    def __init__(self) -> None:
        self.total = 0.0
        add_source(self, self.readings)

    def readings(self) -> Iterable[Reading]:
        yield Reading(f"{PREFIX}reward_sum", "Sum of all rewards so far", [({}, self.total)])


_REWARDS = _Rewards()


def attempt_begins(attempt: Attempt) -> None:
    context = telemetry.attempt_context(attempt.rollout)
    if context is not None:
        ids = {"rollout_id": attempt.rollout["rollout_id"], "attempt": attempt.rollout["attempt"]}
        run_ids = {"run_id": attempt.rollout["run_id"], "task_id": attempt.rollout["task_id"]}
        attempt.span = telemetry.begin("rollout", context, is_root=True, **ids, **run_ids, agent=attempt.servers.agent)


def attempt_succeeds(attempt: Attempt) -> None:
    ATTEMPTS.add("done")
    reward = (attempt.verified or {}).get("reward")
    if isinstance(reward, int | float):
        REWARDED.add()
        _REWARDS.total += reward
        if attempt.span is not None:
            attempt.span.attributes["reward"] = float(reward)


def attempt_fails(attempt: Attempt, failure: StageFailure) -> None:
    ATTEMPTS.add(str(failure.kind))
    if attempt.span is not None:
        attempt.span.attributes |= {"error.type": str(failure.kind), "stage": str(failure.stage)}
        attempt.span.error = failure.reason


def attempt_ends(attempt: Attempt) -> None:
    """End the attempt's trace. Call it when everything is released; a repeated verification is the same attempt."""
    span, attempt.span = attempt.span, None
    if span is not None:
        telemetry.end(span, None if attempt.verified is not None else span.error or "given up")


STAGE_METRICS = {
    "queued": "Attempts that wait for a worker",
    "active": "Attempts that are worked on",
    "workers": "Workers",
    "oldest_s": "Age of the oldest active attempt",
}
"""The fields of `StageStatus` that are metrics."""
SERVER_METRICS = {
    "busy": "Rollouts at a server",
    "done": "Rollouts that a server finished",
    "ready": "Whether a server gets jobs",
}


@asynccontextmanager
async def pipeline_telemetry(
    config: ObservabilityConfig, *, run_id: str, run_dir: Path, token: str, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Start traces of this process, and serve its metrics on their own port until the block ends, each if ``config``
    enables it. Scrapers authenticate with ``token``."""
    start_traces(config, server=PIPELINE, run_id=run_id)
    try:
        if config.metrics_port is None:
            yield
            return
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route

        from nemo_gym.http.middleware import Application
        from nemo_gym.http.observability import require_scraper
        from nemo_gym.http.problems import install_problem_handlers
        from nemo_gym.http.telemetry import CONTENT_TYPE, render
        from nemo_gym.http.webserver import served
        from nemo_gym.stack.endpoints import added_target

        async def metrics(request: Request) -> Response:
            require_scraper(request, None, token, secured=True)
            return Response(render(), media_type=CONTENT_TYPE)

        app = Application(title=PIPELINE, openapi_url=None, docs_url=None, redoc_url=None)
        install_problem_handlers(app)
        app.router.routes.append(Route(METRICS_PATH, metrics, methods=["GET"]))
        address = BaseServerConfig(host="127.0.0.1", port=config.metrics_port)
        async with served(app, address, key="observability.metrics_port") as url:
            say(f"metrics of the pipeline: {url}{METRICS_PATH}")
            with added_target(run_dir, PIPELINE, url, run_id):
                yield
    finally:
        await finish(telemetry.shut_down())


log = structlog.get_logger(__name__)


MAX_RETRY_DELAY_S = 30.0
NOT_IN_A_ROW = frozenset({FailureKind.CANCELLED, FailureKind.CONTROLS_WEAK})
"""Failures that the caller asked for. `FailureStreak` does not count them."""
LOST = frozenset(LOST_KINDS.values())
"""Failures of a server, not of the work."""
IDLE_POLL_S = 1.0
"""How often an idle dispatcher looks for jobs that other processes submitted or queued again."""
SWEEP_S = 1.0
LEFT_S = 30.0
"""For how long a job that is left to another service is not looked at again."""
SWEPT_AT_ONCE = 256


def _overdue(job: Job) -> Stop:
    return Stop(FailureKind.DEADLINE, f"{JOB_OVERDUE} ({job.spec.deadline_s:g} s from its submission)")


def _stopped_before(job: Job) -> Stop | None:
    """Return why a claimed job must not run or go on, or ``None`` if it may. A deadline takes no verdict away."""
    if job.cancel_reason is not None:
        return Stop(FailureKind.CANCELLED, job.cancel_reason)
    is_overdue = job.left_s is not None and job.left_s <= 0
    return _overdue(job) if is_overdue and not job.has_verdict() else None


async def _is_resumable(attempt: JobAttempt) -> bool:
    """Whether the job's next claimer may continue this attempt, because its RUN result is stored."""
    if attempt.run_stored is None:
        return attempt.is_restored
    await asyncio.wait({attempt.run_stored})
    # A write that failed may have taken effect all the same; one that was refused has not.
    return attempt.run_stored.cancelled() or not isinstance(attempt.run_stored.exception(), FencedError)


def _is_forgotten(attempt: JobAttempt, failure: StageFailure) -> bool:
    """Whether a restored attempt failed because its servers know it no longer, as after a new start of their stack.
    This counts nowhere, because it says nothing about the work; the next attempt is not a restored one."""
    is_refused = failure.stage is StageName.EVAL and failure.details.get("status") in REFUSED
    return attempt.is_restored and attempt.stop is None and is_refused and failure.new_attempt


class FailureStreak:
    """Counts attempts in a row that failed the same way. An attempt that passes their stage resets the count."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._signature: str | None = None
        self._stage = StageName.INIT
        self._count = 0

    @property
    def is_new(self) -> bool:
        """Whether the latest failure differs from the previous one."""
        return self._count <= 1

    def passed(self, stage: StageName) -> None:
        if stage is StageName.EVAL or self._stage is not StageName.EVAL:
            self._count = 0

    def failed(self, job: Job, failure: StageFailure) -> SameFailureError | None:
        """Count a failure. Return the error that stops the run if the limit is reached."""
        if not self._limit or failure.kind in NOT_IN_A_ROW:
            return None
        signature = same_way(failure.kind, failure.reason, (job.job_id, job.spec.task_id))
        self._count = self._count + 1 if signature == self._signature else 1
        self._signature, self._stage = signature, failure.stage
        if self._count < self._limit:
            return None
        return SameFailureError(
            f"stopped: {self._count} attempts in a row failed the same way ({failure.kind}: {failure.reason}). Fix"
            " the cause and run the same command again with retry_failed=true; finished rollouts are kept. To continue"
            " despite failures, set stop_after_same_failure=0"
        )


class AsyncDispatcher:
    """Claims jobs from a store, drives each through the stages, and records its result."""

    def __init__(
        self,
        store: SqlJobStore,
        stages: Sequence[Stage[JobAttempt]],
        config: PipelineConfig,
        servers: Callable[[str], Servers],
        *,
        listener: JobListener | None = None,
        pool: ServerPool | None = None,
        owner: str | None = None,
        sweeps: bool = False,
        server_logs: Path | None = None,
        on_run: Callable[[JobAttempt], None] | None = None,
        on_restored: Callable[[JobAttempt], None] | None = None,
    ) -> None:
        """
        Args:
            on_run: called when an attempt enters RUN.
            on_restored: called with an attempt that continues at EVAL, to register what it has open.
            server_logs: the folder of the servers' logs, which failure rows name.
            servers: returns the servers of an agent; raises `KeyError` for an agent that is not here.
            pool: the servers' places; without a pool every queued job may be claimed.
            owner: names this dispatcher in the store's leases.
            sweeps: look every second for overdue queued jobs, and for jobs that other processes cancelled.
        """
        self._store = store
        self._config = config
        self._servers = servers
        self._listener = listener
        self._pool = pool
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._sweeps = sweeps
        self._server_logs = server_logs
        self._on_restored = on_restored
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        init, run, eval_ = stages
        buffer = config.ready_buffer or max(1, run.workers // 4)
        ends = (self._failed, self._abandoned, self._broken)
        self._eval = StagePool(eval_, max(1, eval_.workers // 4), self._evaluated, *ends)
        self._run = StagePool(run, buffer, self._ran, *ends, on_run)
        self._init = StagePool(init, init.workers, self._ready, *ends)
        self._stage_pools = (self._init, self._run, self._eval)
        self._attempts: dict[str, JobAttempt] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._releases = BackgroundTasks()
        self._streak = FailureStreak(config.stop_after_same_failure)
        self._fatal: BaseException | None = None
        self._idle = False

    # Lifecycle

    async def start(self) -> None:
        for pool in self._stage_pools:
            pool.start()
        add_source(self, self._readings)
        for work in (self._feed, self._renew, *((self._sweep,) if self._sweeps else ())):
            self._background.append(asyncio.create_task(self._guard(work), name=work.__name__))

    def notify(self) -> None:
        """Tell the dispatcher that the store may have new jobs."""
        self._idle = False
        self._wake.set()

    def pause(self) -> None:
        """Claim no more jobs until `resume`."""
        self._unpaused.clear()

    def resume(self) -> None:
        self._unpaused.set()

    @property
    def is_paused(self) -> bool:
        return not self._unpaused.is_set()

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the dispatcher, if there was one."""
        return self._fatal

    @property
    def held(self) -> Collection[JobAttempt]:
        """The running attempts."""
        return self._attempts.values()

    @property
    def stages(self) -> list[StageStatus]:
        """The current load of the stages, in their order."""
        return [pool.status for pool in self._stage_pools]

    def place_of(self, attempt: JobAttempt) -> StagePlace | None:
        """Return the stage of a running attempt; ``None`` while its end is being recorded."""
        places = (pool.place_of(attempt) for pool in self._stage_pools)
        return next((place for place in places if place is not None), None)

    async def stopped(self) -> None:
        """Wait until an error stops the dispatcher, and raise it."""
        while self._fatal is None:
            self._changed.clear()
            await self._changed.wait()
        raise self._fatal

    async def quiet(self) -> None:
        """Return when no job is running, even if jobs are queued."""
        while self._attempts:
            if self._fatal is not None:
                raise self._fatal
            self._changed.clear()
            await self._changed.wait()

    async def drain(self) -> None:
        """Return when no job is queued or running. If an error stopped the dispatcher, raise it."""
        while True:
            if self._fatal is not None:
                raise self._fatal
            if self._idle and not self._attempts:
                return
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, *, for_good: bool = False) -> None:
        """Claim no more jobs, stop the running ones, and queue them for a later resume. Release what they hold, except
        what EVAL needs of attempts whose RUN result is stored: a resume only grades those. With ``for_good`` there
        will be no resume, and everything is released."""
        remove_source(self)
        for handle in self._deadlines.values():
            handle.cancel()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        # From the first stage to the last, so that no later stage takes up what an earlier one gives up.
        for pool in self._stage_pools:
            await pool.stop()
        # All at once: a server that is gone costs every attempt its whole `close_timeout_s`.
        await asyncio.gather(*[self._abandoned(each, for_good=for_good) for each in self._attempts.values()])
        await self._releases.join()

    async def cancel(self, selector: JobSelector, reason: str) -> CancelReport:
        """End matching jobs: stop their harnesses, release their sandboxes, and record the jobs as `CANCELLED`."""
        start = time.perf_counter()
        failure = StageFailure(StageName.INIT, FailureKind.CANCELLED, reason, retryable=False)
        queued = await self._store.cancel(selector, failure, self._failure_row)
        active = [attempt for attempt in self._attempts.values() if selector.matches(attempt.job)]
        released = sum(len(attempt.closers) for attempt in active)
        for attempt in active:
            self.interrupt(attempt, Stop(FailureKind.CANCELLED, reason))
        for job in queued:
            self._tell(JobEvent(job, JobState.CANCELLED, failure=failure))
            self._release_stored(job)
        while any(self._attempts.get(attempt.job.job_id) is attempt for attempt in active):
            self._changed.clear()
            await self._changed.wait()
        return CancelReport(len(queued), len(active), time.perf_counter() - start, released)

    def interrupt(self, attempt: JobAttempt, stop: Stop) -> None:
        """Stop an attempt in whichever stage it is; the first reason counts. A deadline takes no verdict away."""
        if stop.kind is FailureKind.DEADLINE and attempt.verified is not None:
            return
        attempt.stop = attempt.stop or stop
        for pool in self._stage_pools:
            pool.interrupt(attempt)

    # Feeding

    async def _feed(self) -> None:
        while True:
            await self._unpaused.wait()
            free = self._init.free
            # Claim in batches, because each claim is a durable write.
            if free and (free >= max(1, self._init.capacity // 2) or not self._init.waiting):
                jobs, is_full = await self._claim(free)
                # First those that begin, which a cancel finds as attempts; to record the end of the others takes time.
                for job in sorted(jobs, key=lambda job: _stopped_before(job) is not None):
                    await self._admit(job)
                if jobs:
                    continue
                due_s = await self._store.next_due_s()
                self._idle = due_s is None
                self._changed.set()
                await self._sleep(IDLE_POLL_S if due_s is None or is_full else min(due_s, IDLE_POLL_S))
            else:
                await self._sleep(IDLE_POLL_S)

    async def _claim(self, free: int) -> tuple[list[Job], bool]:
        """Claim jobs. Return them, and whether due jobs may have to wait for a place at a server."""
        if self._pool is None:
            return await self._store.claim(self._owner, free, self._config.lease_s), False
        room = self._pool.room()
        if not any(room.agents.values()):
            return [], True
        return await self._store.claim(self._owner, free, self._config.lease_s, room), True

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._wake.wait()
        self._wake.clear()

    async def _admit(self, job: Job) -> None:
        if (stop := _stopped_before(job)) is not None:
            if await self._end(job, stop.failure(job.stage)):
                self._release_stored(job)
            return
        attempt = JobAttempt.of(job, self._servers(job.spec.agent))
        attempt_begins(attempt)
        earlier = self._attempts.get(job.job_id)
        self._attempts[job.job_id] = attempt
        if earlier is not None:  # its lease has expired, for example while the store was unreachable
            self._lose(earlier)
        if self._pool is not None:
            self._pool.admit(attempt)
        if job.left_s is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[job.job_id] = loop.call_later(job.left_s, self.interrupt, attempt, _overdue(job))
        if attempt.is_restored:
            if self._on_restored is not None:
                self._on_restored(attempt)
            self._eval.put_now(attempt)
        else:
            self._init.put_now(attempt)

    def _release_stored(self, job: Job) -> None:
        """Close, in the background, what an earlier process left open of a job that has ended without being graded."""
        if job.run_result is not None and self._on_restored is not None:
            if (servers := self._route(job)) is None:
                log.warning("nothing released: its agent is not here", rollout_id=job.job_id, agent=job.spec.agent)
                return
            attempt = JobAttempt.of(job, servers)
            self._on_restored(attempt)
            self._releases.start(attempt.close(self._config.close_timeout_s), name=f"release {job.job_id}")

    def _route(self, job: Job) -> Servers | None:
        """The servers of a job's agent. Jobs that ended or are overdue may be of an agent that is gone, or that only
        another service on the same store has."""
        with contextlib.suppress(KeyError):
            return self._servers(job.spec.agent)
        return None

    async def _sweep(self) -> None:
        while True:
            for job in await self._store.claim_overdue(self._owner, SWEPT_AT_ONCE, self._config.lease_s):
                if _stopped_before(job) is None and self._route(job) is None:
                    # Its verdict is left to a service that has its agent.
                    await self._requeue_if_held(job, new_attempt=False, delay_s=LEFT_S)
                else:
                    await self._admit(job)
            if self._store.is_shared() and self._attempts:
                for job_id, reason in (await self._store.asked_to_end(self._owner)).items():
                    if (attempt := self._attempts.get(job_id)) is not None:
                        self.interrupt(attempt, Stop(FailureKind.CANCELLED, reason))
            await asyncio.sleep(SWEEP_S)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            if not (active := list(self._attempts.values())):
                continue
            held = await self._store.renew(self._owner, self._config.lease_s, [each.job.job_id for each in active])
            for attempt in active:
                if attempt.job.job_id in held or attempt.has_result:
                    continue
                if self._attempts.get(attempt.job.job_id) is attempt:
                    self._lose(attempt)

    def _lose(self, attempt: JobAttempt) -> None:
        """Give up an attempt whose lease was lost."""
        log.warning("lease lost", rollout_id=attempt.job.job_id)
        attempt.lost = True
        for pool in self._stage_pools:
            pool.interrupt(attempt)

    # Hand-over

    async def _ready(self, attempt: JobAttempt, _: bytes) -> None:
        if not self._idle:
            self._wake.set()
        await self._run.put(attempt)

    async def _ran(self, attempt: JobAttempt, result: bytes) -> None:
        self._streak.passed(StageName.RUN)
        # Not awaited: the writer keeps order, so the result row is never recorded before this result or without it.
        attempt.run_stored = asyncio.ensure_future(self._store.record_run(attempt.job, result))
        attempt.run_stored.add_done_callback(self._recorded)
        if self._pool is not None:
            self._pool.ran(attempt)
            self._wake.set()
        await self._eval.put(attempt)

    def _recorded(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, FencedError):
            self._stop_for(error)

    async def _evaluated(self, attempt: JobAttempt, row: bytes) -> None:
        self._streak.passed(StageName.EVAL)
        attempt.has_result = True
        attempt_succeeds(attempt)
        await finish(self._complete(attempt, row))

    async def _complete(self, attempt: JobAttempt, row: bytes) -> None:
        is_recorded = await self._recording(self._store.complete(attempt.job, row))
        if self._pool is not None:
            self._pool.succeeded(attempt)
        if not is_recorded:
            await self._abandoned(attempt)
            return
        self._tell(JobEvent(attempt.job, JobState.DONE, result=attempt.verified))
        await attempt.close(self._config.close_timeout_s)
        self._drop(attempt)

    async def _failed(self, attempt: JobAttempt, failure: StageFailure) -> None:
        job = attempt.job
        if attempt.stop is not None:
            failure = attempt.stop.failure(failure.stage)
        if _is_forgotten(attempt, failure):
            log.warning("its servers forgot the attempt, trying again", rollout_id=job.job_id, reason=failure.reason)
            await finish(self._start_anew(attempt))
            return
        attempt_fails(attempt, failure)
        if self._pool is not None:
            self._pool.failed(attempt, failure)
        if (too_many := self._streak.failed(job, failure)) is not None:
            self._stop_for(too_many)
        is_new = self._streak.is_new  # read now: other attempts may fail while this one is being closed
        spent, budget = self._budget(job, failure)
        again = failure.retryable and spent < budget
        delay_s = pause_after(spent, first_s=self._config.retry_delay_s, longest_s=MAX_RETRY_DELAY_S)
        if again and not failure.new_attempt:
            # The same attempt with the same artifacts is still open here: repeat EVAL alone.
            job.failures = (*job.failures, failure)
            job.eval_tries += 1
            log.warning("verification failed, trying again", rollout_id=job.job_id, reason=failure.reason)
            self._eval.put_later(attempt, delay_s)
            return
        reason = failure.reason if is_new else "the same as before"
        # To the end, even if the dispatcher stops: a closed attempt whose failure is not recorded would be resumed.
        if again:
            log.warning("attempt failed, trying again", rollout_id=job.job_id, reason=reason)
            await finish(self._start_anew(attempt, failure, delay_s))
        else:
            await finish(self._end_attempt(attempt, failure))

    async def _start_anew(
        self, attempt: JobAttempt, failure: StageFailure | None = None, delay_s: float = 0.0
    ) -> None:
        """Close the attempt and queue its job for a new one. A ``failure`` counts against the retry budget."""
        await attempt.close(self._config.close_timeout_s)
        await self._recording(self._store.requeue(attempt.job, failure, delay_s=delay_s, new_attempt=True))
        self.notify()
        self._drop(attempt)

    async def _end_attempt(self, attempt: JobAttempt, failure: StageFailure) -> None:
        final = failure.kind is not FailureKind.CANCELLED
        salvaged = await attempt.salvage() if final and attempt.salvage is not None else {}
        attempt.has_result = True
        if await self._end(attempt.job, failure, salvaged, attempt):
            self._drop(attempt)
        else:
            await self._abandoned(attempt)

    def _budget(self, job: Job, failure: StageFailure) -> tuple[int, int]:
        """Return how many tries of the failure's class are spent, including this one, and how many are allowed."""
        lost_apart = self._config.max_lost_attempts is not None

        def class_of(each: StageFailure) -> tuple[bool, bool]:
            # A lost model server has no kind of its own: status 0 says that a server did not respond.
            is_lost = each.kind in LOST or each.details.get("status") == 0
            return each.new_attempt, lost_apart and is_lost

        spent = 1 + sum(class_of(past) == class_of(failure) for past in job.failures)
        is_lost = class_of(failure) == (True, True)
        return spent, (self._config.max_lost_attempts or 0) if is_lost else self._config.max_attempts

    async def _end(
        self,
        job: Job,
        failure: StageFailure,
        salvaged: Mapping[str, Any] | None = None,
        attempt: JobAttempt | None = None,
    ) -> bool:
        """Record that the job ends without a verdict, then close its attempt, and tell it. Return ``False``, and leave
        the attempt open, if this dispatcher no longer holds the job."""
        if not await self._recording(self._store.fail(job, failure, self._failure_row(job, failure, salvaged))):
            return False
        if attempt is not None:
            await attempt.close(self._config.close_timeout_s)
        self._tell(JobEvent(job, JobState.of(failure), failure=failure))
        return True

    async def _abandoned(self, attempt: JobAttempt, *, for_good: bool = False) -> None:
        """Queue the job again, because the dispatcher stops or the lease was lost. Release what the attempt holds,
        unless the job's next claimer, which may have it by now, continues this attempt at EVAL."""
        resumes = not for_good and await _is_resumable(attempt)
        if not resumes:
            await attempt.close(self._config.close_timeout_s)
        if self._fatal is None or isinstance(self._fatal, SameFailureError):
            await self._recording(self._requeue_if_held(attempt.job, new_attempt=not resumes))
        self._drop(attempt)

    async def _requeue_if_held(self, job: Job, *, new_attempt: bool, delay_s: float = 0.0) -> None:
        """Queue a job again, unless its lease was lost."""
        with contextlib.suppress(FencedError):
            await self._store.requeue(job, new_attempt=new_attempt, delay_s=delay_s)

    async def _recording(self, write: Awaitable[None]) -> bool:
        """Await a write to the store. Return ``False`` if this dispatcher no longer holds the job; any other error
        stops the run."""
        try:
            await write
        except FencedError as error:
            log.info("not recorded: the job is no longer held", error=str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a store that cannot write ends the run in an orderly way
            self._stop_for(error)
            return False
        return True

    def _drop(self, attempt: JobAttempt) -> None:
        if self._attempts.get(attempt.job.job_id) is attempt:
            del self._attempts[attempt.job.job_id]
            if (handle := self._deadlines.pop(attempt.job.job_id, None)) is not None:
                handle.cancel()
        attempt_ends(attempt)
        if self._pool is not None:
            self._pool.release(attempt)
            self._wake.set()
        if not self._attempts or attempt.stop is not None:
            self._changed.set()

    def _failure_row(self, job: Job, failure: StageFailure, kept: Mapping[str, Any] | None = None) -> bytes:
        return failure_row(job, failure, validation=self._config.validation, kept=kept, server_logs=self._server_logs)

    def _readings(self) -> Iterable[Reading]:
        stages = [({"stage": str(status.stage)}, asdict(status)) for status in self.stages]
        for name, documentation in STAGE_METRICS.items():
            values = [(labels, status[name]) for labels, status in stages]
            yield Reading(f"{PREFIX}stage_{name}", documentation, values)
        if self._pool is None:
            return
        servers = [
            ({"server": server.server_id}, {"busy": server.busy, "done": server.done, "ready": server.is_ready})
            for server in self._pool.all()
        ]
        for name, documentation in SERVER_METRICS.items():
            values = [(labels, status[name]) for labels, status in servers]
            yield Reading(f"{PREFIX}server_{name}", documentation, values)

    def _tell(self, event: JobEvent) -> None:
        FINISHED.add(event.state.value)
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception as error:  # noqa: BLE001 - ends the run in an orderly way; the attempt still has to be closed
                self._stop_for(error)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - nobody awaits the background tasks; drain() raises for them
            self._stop_for(error)

    def _broken(self, _: JobAttempt, error: Exception) -> None:
        self._stop_for(error)

    def _stop_for(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._changed.set()
