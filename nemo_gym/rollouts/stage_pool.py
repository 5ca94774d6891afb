"""One stage's workers, its queue, and who is being worked on."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.contract.verdict import StageFailure, StageName
from nemo_gym.http.correlation import ROLLOUT_ID_PATTERN, rollout_context
from nemo_gym.http.tracing import within
from nemo_gym.rollouts.interfaces import JobAttempt, Stage, StageResult

OnResult = Callable[[JobAttempt, StageResult], Awaitable[None]]
OnFailure = Callable[[JobAttempt, StageFailure], Awaitable[None]]
OnAbandon = Callable[[JobAttempt], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class StageStatus:
    """What a stage does now."""

    stage: StageName
    queued: int
    active: int
    workers: int
    oldest_s: float
    """How long the longest active attempt has been worked on; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where an attempt is."""

    stage: StageName
    since: float | None
    """When it began to be worked on, by the monotonic clock; ``None`` while it waits."""


class StagePool:
    """``stage.workers`` workers over a queue of ``buffer`` places.

    ``on_result`` and ``on_failure`` run in the worker: a worker that cannot hand on takes nothing new.
    """

    def __init__(
        self, stage: Stage, buffer: int, on_result: OnResult, on_failure: OnFailure, on_abandon: OnAbandon
    ) -> None:
        self._stage = stage
        self._buffer = buffer
        self._waiting: dict[int, JobAttempt] = {}
        self._filled = asyncio.Semaphore(0)
        """Counts what was put in, also what was taken out again before its turn."""
        self._blocked: dict[int, asyncio.Future[None]] = {}
        """Attempts that wait for a place."""
        self._queue_of_blocked: deque[int] = deque()
        self._active: dict[int, tuple[asyncio.Task[None], float]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._ending = BackgroundTasks()
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
        queued = len(self._waiting) + len(self._blocked)
        return StageStatus(self._stage.name, queued, len(self._active), self._stage.workers, oldest_s)

    def place_of(self, attempt: JobAttempt) -> StagePlace | None:
        """``None`` for one that is not here."""
        key = id(attempt)
        if (active := self._active.get(key)) is not None:
            return StagePlace(self._stage.name, active[1])
        return StagePlace(self._stage.name, None) if key in self._waiting or key in self._blocked else None

    async def put(self, attempt: JobAttempt) -> bool:
        """Hand over an attempt, waiting for a place; ``False`` when it was stopped before it got one."""
        key = id(attempt)
        while len(self._waiting) >= self._buffer:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._blocked[key] = place
            self._queue_of_blocked.append(key)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._room()  # the place that was meant for this one
                raise
            finally:
                self._blocked.pop(key, None)
            if attempt.stop is not None or attempt.lost:
                self._room()
                return False
        self.put_now(attempt)
        return True

    def put_now(self, attempt: JobAttempt) -> None:
        """Hand over an attempt whatever the queue holds: for its feeder, and for what was under way before."""
        self._waiting[id(attempt)] = attempt
        self._filled.release()

    def interrupt(self, attempt: JobAttempt) -> None:
        """Stop the attempt if it is here, whether it is being worked on or waits."""
        key = id(attempt)
        if (active := self._active.get(key)) is not None:
            active[0].cancel()
        elif (place := self._blocked.get(key)) is not None and not place.done():
            place.set_result(None)
        elif self._waiting.pop(key, None) is not None:
            self._room()
            self._ending.start(self._given_up(attempt), name=f"end {attempt.job.job_id}")

    async def _given_up(self, attempt: JobAttempt) -> None:
        if attempt.lost or (failure := self.stopped(attempt)) is None:
            await self._on_abandon(attempt)
        else:
            await self._on_failure(attempt, failure)

    def stopped(self, attempt: JobAttempt) -> StageFailure | None:
        """Why the attempt was stopped, as a failure in this stage."""
        if (stop := attempt.stop) is None:
            return None
        return StageFailure(self._stage.name, stop.kind, stop.reason, retryable=stop.retryable)

    def _room(self) -> None:
        while self._queue_of_blocked:
            place = self._blocked.get(self._queue_of_blocked.popleft())
            if place is not None and not place.done():
                place.set_result(None)
                return

    async def _next(self) -> JobAttempt:
        while True:
            await self._filled.acquire()
            if self._waiting:
                attempt = self._waiting.pop(next(iter(self._waiting)))
                self._room()
                return attempt

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            attempt = await self._next()
            if attempt.lost or attempt.stop is not None:
                await self._given_up(attempt)
                continue
            failure: StageFailure | None = None
            result: StageResult | None = None
            self._active[id(attempt)] = (task, time.monotonic())
            try:
                job_id = attempt.job.job_id
                # Every server's log lines about this attempt name its rollout.
                context = attempt.span.context if attempt.span is not None else None
                with rollout_context(job_id if ROLLOUT_ID_PATTERN.match(job_id) else None), within(context):
                    async with asyncio.timeout(self._stage.timeout_s):
                        result = await self._stage.run(attempt)
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                task.uncancel()
                failure = self.stopped(attempt)
            except Exception as error:  # noqa: BLE001 - the stage's boundary: every failure becomes typed
                failure = self._stage.classify(error)
            finally:
                self._active.pop(id(attempt), None)
            if failure is not None:
                await self._on_failure(attempt, failure)
            elif result is not None:
                await self._on_result(attempt, result)
            else:
                await self._on_abandon(attempt)
