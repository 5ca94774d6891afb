"""One stage's workers, its queue, and who is being worked on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from nemo_gym.contract.verdict import FailureKind, StageFailure
from nemo_gym.rollouts.interfaces import JobAttempt, Stage, StageResult

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
