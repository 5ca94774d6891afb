"""The in-process dispatcher: three pools of workers on one event loop, joined by bounded queues.

    store ──claim──▶ INIT ──ready──▶ RUN ──▶ EVAL ──complete──▶ store
                       ▲ requeue (a failure of the infrastructure, as a new attempt)

A worker hands on only when the next stage has room, so nothing is prepared faster than it can be used. A rollout that
fails becomes a row; only a store that cannot write stops the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from nemo_gym._util.backoff import pause_after
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import FencedError
from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.http.correlation import ROLLOUT_ID_PATTERN, rollout_context
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.interfaces import (
    CancelReport,
    Job,
    JobAttempt,
    JobEvent,
    JobListener,
    JobSelector,
    JobState,
    JobStore,
    SameFailureError,
    Stage,
    StageResult,
)
from nemo_gym.rollouts.result_rows import failure_row, same_way

log = structlog.get_logger(__name__)


OnResult = Callable[[JobAttempt, StageResult], Awaitable[None]]
OnFailure = Callable[[JobAttempt, StageFailure], Awaitable[None]]
OnAbandon = Callable[[JobAttempt], Awaitable[None]]


class StagePool:
    """``stage.workers`` workers over a queue of ``buffer`` places.

    ``on_result`` and ``on_failure`` run in the worker: a worker that cannot hand on takes nothing new.
    """

    def __init__(
        self, stage: Stage, buffer: int, on_result: OnResult, on_failure: OnFailure, on_abandon: OnAbandon
    ) -> None:
        self._stage = stage
        self._buffer = buffer
        self._queue: asyncio.Queue[JobAttempt] = asyncio.Queue()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._active: dict[str, asyncio.Task[None]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._on_result, self._on_failure, self._on_abandon = on_result, on_failure, on_abandon

    def start(self) -> None:
        self._workers = [
            asyncio.create_task(self._work(), name=f"{self._stage.name}-{number}")
            for number in range(self._stage.workers)
        ]

    async def stop(self) -> None:
        """Cancel what is under way. The attempts are the dispatcher's to release."""
        self._stopping = True
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def capacity(self) -> int:
        return self._buffer

    @property
    def free(self) -> int:
        """Places left in the queue."""
        return max(0, self._buffer - self._queue.qsize())

    async def put(self, attempt: JobAttempt) -> None:
        """Hand over an attempt, waiting for a place."""
        while self._queue.qsize() >= self._buffer:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                else:
                    self._room()  # the place that was meant for this one
                raise
        self._queue.put_nowait(attempt)

    def put_now(self, attempt: JobAttempt) -> None:
        """Hand over an attempt whatever the queue holds: for its feeder, and for what was under way before."""
        self._queue.put_nowait(attempt)

    def interrupt(self, attempt: JobAttempt) -> None:
        """Stop the attempt if this stage is working on it; one that waits is looked at when its turn comes."""
        if (task := self._active.get(attempt.job.job_id)) is not None:
            task.cancel()

    def _room(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            attempt = await self._queue.get()
            self._room()
            if attempt.lost:
                await self._on_abandon(attempt)
                continue
            failure: StageFailure | None = None
            result: StageResult | None = None
            if attempt.cancelled is not None:
                failure = self._cancelled(attempt.cancelled)
            else:
                self._active[attempt.job.job_id] = task
                try:
                    job_id = attempt.job.job_id
                    # Every server's log lines about this attempt name its rollout.
                    with rollout_context(job_id if ROLLOUT_ID_PATTERN.match(job_id) else None):
                        async with asyncio.timeout(self._stage.timeout_s):
                            result = await self._stage.run(attempt)
                except asyncio.CancelledError:
                    if self._stopping:
                        raise
                    task.uncancel()
                    if attempt.cancelled is not None:
                        failure = self._cancelled(attempt.cancelled)
                except Exception as error:  # noqa: BLE001 - the stage's boundary: every failure becomes typed
                    failure = self._stage.classify(error)
                finally:
                    self._active.pop(attempt.job.job_id, None)
            if failure is not None:
                await self._on_failure(attempt, failure)
            elif result is not None:
                await self._on_result(attempt, result)
            else:
                await self._on_abandon(attempt)

    def _cancelled(self, reason: str) -> StageFailure:
        return StageFailure(self._stage.name, FailureKind.CANCELLED, reason, retryable=False)


MAX_RETRY_DELAY_S = 30.0
NOT_IN_A_ROW = frozenset({FailureKind.CANCELLED, FailureKind.CONTROLS_WEAK})
"""Failures that the caller asked for."""
IDLE_POLL_S = 1.0
"""How often an idle dispatcher looks for jobs that others submitted or gave back."""


class FailureStreak:
    """Attempts in a row that failed the same way. Work that passed the stage at which they fail ends the row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._same: str | None = None
        self._stage = StageName.INIT
        self._count = 0

    @property
    def is_new(self) -> bool:
        """Whether the latest failure is of another kind than the one before it."""
        return self._count <= 1

    def passed(self, stage: StageName) -> None:
        if stage is StageName.EVAL or self._stage is not StageName.EVAL:
            self._count = 0

    def failed(self, job: Job, failure: StageFailure) -> SameFailureError | None:
        """What to stop the run with, when this was one too many."""
        if not self._limit or failure.kind in NOT_IN_A_ROW:
            return None
        same = same_way(failure.kind, failure.reason, (job.job_id, job.spec.task_id))
        self._count = self._count + 1 if same == self._same else 1
        self._same, self._stage = same, failure.stage
        if self._count < self._limit:
            return None
        return SameFailureError(
            f"stopped: {self._count} attempts in a row failed the same way ({failure.kind}: {failure.reason}). Mend"
            " the cause and start the same command again with retry_failed=true; nothing finished is lost."
            " stop_after_same_failure=0 goes on whatever fails"
        )


class AsyncDispatcher:
    """See `Dispatcher`."""

    def __init__(
        self,
        store: JobStore,
        stages: Sequence[Stage],
        config: RolloutRunConfig,
        servers: Callable[[str], Servers],
        *,
        listener: JobListener | None = None,
        server_logs: Path | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._servers = servers
        self._listener = listener
        self._server_logs = server_logs
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        init, run, eval_ = stages
        buffer = config.ready_buffer or max(1, run.workers // 4)
        self._eval = StagePool(eval_, max(1, eval_.workers // 4), self._evaluated, self._failed, self._abandoned)
        self._run = StagePool(run, buffer, self._ran, self._failed, self._abandoned)
        self._init = StagePool(init, init.workers, self._ready, self._failed, self._abandoned)
        self._held: dict[str, JobAttempt] = {}
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._streak = FailureStreak(config.stop_after_same_failure)
        self._fatal: BaseException | None = None
        self._stopping = False
        self._idle = False

    # Life

    async def start(self) -> None:
        for pool in (self._eval, self._run, self._init):
            pool.start()
        for work in (self._feed, self._renew):
            self._background.append(asyncio.create_task(self._guard(work), name=work.__name__))

    def notify(self) -> None:
        self._idle = False
        self._wake.set()

    async def drain(self) -> None:
        while True:
            if self._fatal is not None:
                raise self._fatal
            if self._idle and not self._held:
                return
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        self._stopping = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        # From the front to the back, so that what a worker gives up is not taken up behind it.
        for pool in (self._init, self._run, self._eval):
            await pool.stop()
        for attempt in list(self._held.values()):
            await self._abandoned(attempt)

    async def cancel(self, selector: JobSelector, reason: str) -> CancelReport:
        start = time.perf_counter()
        failure = StageFailure(StageName.INIT, FailureKind.CANCELLED, reason, retryable=False)
        queued = await self._store.cancel(selector, failure, self._failure_row)
        for job in queued:
            self._tell(JobEvent(job, JobState.CANCELLED, StageName.INIT, failure=failure))
        active = [attempt for attempt in self._held.values() if selector.matches(attempt.job)]
        for attempt in active:
            attempt.cancelled = reason
            for pool in (self._init, self._run, self._eval):
                pool.interrupt(attempt)
        while any(self._held.get(attempt.job.job_id) is attempt for attempt in active):
            self._changed.clear()
            await self._changed.wait()
        return CancelReport(len(queued), len(active), time.perf_counter() - start)

    # Feeding

    async def _feed(self) -> None:
        while True:
            free = self._init.free
            # Claims are taken in batches: each is a durable write.
            if free and (free >= max(1, self._init.capacity // 2) or not self._init.waiting):
                jobs = await self._store.claim(self._owner, free, self._config.lease_s)
                for job in jobs:
                    self._admit(job)
                if jobs:
                    continue
                due_s = await self._store.next_due_s()
                self._idle = due_s is None
                self._changed.set()
                await self._sleep(IDLE_POLL_S if due_s is None else min(due_s, IDLE_POLL_S))
            else:
                await self._sleep(IDLE_POLL_S)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.001)):
                await self._wake.wait()
        self._wake.clear()

    def _admit(self, job: Job) -> None:
        attempt = JobAttempt.of(job, self._servers(job.spec.agent))
        self._held[job.job_id] = attempt
        if job.stage is StageName.EVAL and job.run_result is not None:
            self._eval.put_now(attempt)
        else:
            self._init.put_now(attempt)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            before = list(self._held.values())
            held = await self._store.renew(self._owner, self._config.lease_s)
            for attempt in before:
                if attempt.job.job_id in held or attempt.has_result:
                    continue
                if self._held.get(attempt.job.job_id) is attempt:
                    log.warning("lease lost", rollout_id=attempt.job.job_id)
                    attempt.lost = True
                    for pool in (self._init, self._run, self._eval):
                        pool.interrupt(attempt)

    # Hand-over

    async def _ready(self, attempt: JobAttempt, _: StageResult) -> None:
        if not self._idle:
            self._wake.set()
        await self._run.put(attempt)

    async def _ran(self, attempt: JobAttempt, result: StageResult) -> None:
        self._streak.passed(StageName.RUN)
        # Not waited for: the writer keeps order, so the result row is never recorded without it or before it.
        recorded = asyncio.ensure_future(self._store.record_stage(attempt.job, result))
        recorded.add_done_callback(self._recorded)
        await self._eval.put(attempt)

    def _recorded(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, FencedError):
            self._stop_for(error)

    async def _evaluated(self, attempt: JobAttempt, result: StageResult) -> None:
        self._streak.passed(StageName.EVAL)
        attempt.has_result = True
        if await self._recording(self._store.complete(attempt.job, result.payload)):
            self._tell(JobEvent(attempt.job, JobState.DONE, StageName.EVAL, result=attempt.verified))
        await attempt.close(self._config.close_timeout_s)
        self._drop(attempt)

    async def _failed(self, attempt: JobAttempt, failure: StageFailure) -> None:
        job = attempt.job
        if attempt.cancelled is not None:
            failure = StageFailure(failure.stage, FailureKind.CANCELLED, attempt.cancelled, retryable=False)
        if (stop := self._streak.failed(job, failure)) is not None:
            self._stop_for(stop)
        is_new = self._streak.is_new  # before others fail, while this one is closed
        spent = 1 + sum(past.new_attempt == failure.new_attempt for past in job.failures)
        again = failure.retryable and spent < self._config.max_attempts
        delay_s = pause_after(spent, first_s=self._config.retry_delay_s, longest_s=MAX_RETRY_DELAY_S)
        if again and not failure.new_attempt:
            # The same attempt and artifact, still open here: EVAL alone once more.
            job.failures = (*job.failures, failure)
            job.eval_tries += 1
            log.warning("verification failed, trying again", rollout_id=job.job_id, reason=failure.reason)
            await asyncio.sleep(delay_s)
            self._eval.put_now(attempt)
            return
        final = not again and failure.kind is not FailureKind.CANCELLED
        kept = await attempt.salvage() if final and attempt.salvage is not None else {}
        await attempt.close(self._config.close_timeout_s)
        if again:
            reason = failure.reason if is_new else "the same as before"
            log.warning("attempt failed, trying again", rollout_id=job.job_id, reason=reason)
            await self._recording(self._store.requeue(job, failure, delay_s=delay_s))
            self.notify()
        elif await self._recording(self._store.fail(job, failure, self._failure_row(job, failure, kept))):
            state = JobState.CANCELLED if failure.kind is FailureKind.CANCELLED else JobState.FAILED
            self._tell(JobEvent(job, state, failure.stage, failure=failure))
        self._drop(attempt)

    async def _abandoned(self, attempt: JobAttempt) -> None:
        """The dispatcher stops, or the lease was lost: release everything and give the job back."""
        if self._held.get(attempt.job.job_id) is not attempt:
            return
        await attempt.close(self._config.close_timeout_s)
        if self._fatal is None or isinstance(self._fatal, SameFailureError):
            await self._recording(self._store.requeue(attempt.job))
        self._drop(attempt)

    async def _recording(self, write: Awaitable[None]) -> bool:
        """Await a write to the store; ``False`` when the job is no longer ours. Anything else ends the run."""
        try:
            await write
        except FencedError as error:
            log.info("not recorded: the job is no longer held", error=str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a store that cannot write ends the run, in order
            self._stop_for(error)
            return False
        return True

    def _drop(self, attempt: JobAttempt) -> None:
        if self._held.get(attempt.job.job_id) is attempt:
            del self._held[attempt.job.job_id]
        if not self._held or attempt.cancelled is not None:
            self._changed.set()

    def _failure_row(self, job: Job, failure: StageFailure, kept: Mapping[str, Any] | None = None) -> bytes:
        return failure_row(job, failure, validation=self._config.validation, kept=kept, server_logs=self._server_logs)

    def _tell(self, event: JobEvent) -> None:
        if self._listener is not None:
            self._listener(event)

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - nobody awaits the background tasks; drain() raises for them
            self._stop_for(error)

    def _stop_for(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._changed.set()
