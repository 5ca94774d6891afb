"""The fixed workloads of the scheduling benches, and the simulated clock that they run on.

A workload depends on nothing but its seed: every scheduler gets the same tasks in the same order. The clock is an
event loop: when nothing is left to do at an instant, and no thread still has to return a result, time jumps to the
next timer. The product runs on it unchanged, with its real job store, whose writes take no simulated time.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from nemo_gym.contract.verdict import StageFailure, StageName
from nemo_gym.rollouts.interfaces import JobAttempt

T = TypeVar("T")

Z99 = 2.3263478740408408
"""The 99 % quantile of the standard normal distribution."""


# ------------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class SampledGroup:
    """The samples of one task: the time that each takes, and its reward."""

    seconds: tuple[float, ...]
    rewards: tuple[float, ...]

    @property
    def effective(self) -> bool:
        return 0 < sum(self.rewards) < len(self.rewards)


@dataclass(frozen=True)
class SamplingWorkload:
    """RL sampling: batches of effective groups out of a stream of tasks."""

    seed: int
    batch: int = 32
    samples: int = 8
    workers: int = 64
    batches: int = 20
    median_s: float = 60.0
    p99_to_median: float = 8.0
    correlation: float = 0.5
    """The correlation of the logarithms of times within a group."""
    solve_rate: tuple[float, float] = (0.4, 0.4)
    """The parameters of the Beta distribution from which tasks draw their chance of success."""

    def groups(self) -> Iterator[SampledGroup]:
        """Yield the endless stream of tasks."""
        draw, sigma = random.Random(self.seed), math.log(self.p99_to_median) / Z99
        shared, own = math.sqrt(self.correlation), math.sqrt(1 - self.correlation)
        while True:
            of_group, chance = draw.gauss(0, 1), draw.betavariate(*self.solve_rate)
            seconds = [
                self.median_s * math.exp(sigma * (shared * of_group + own * draw.gauss(0, 1)))
                for _ in range(self.samples)
            ]
            yield SampledGroup(tuple(seconds), tuple(float(draw.random() < chance) for _ in range(self.samples)))


@dataclass(frozen=True)
class StagedWorkload:
    """Rollouts whose stages need different things: a box to prepare, an engine, cores to grade on."""

    seed: int = 1
    jobs: int = 4000
    mean_s: tuple[float, float, float] = (5.0, 20.0, 60.0)
    """The mean times of INIT, RUN and EVAL."""
    sigma: float = 0.5
    """The standard deviation of the logarithm of each time."""

    def times(self) -> list[tuple[float, float, float]]:
        """Return the stage times of each job. The times of each stage are scaled so that their mean is exact."""
        draw = random.Random(self.seed)
        columns = []
        for mean in self.mean_s:
            drawn = [draw.lognormvariate(0, self.sigma) for _ in range(self.jobs)]
            scale = mean * self.jobs / sum(drawn)
            columns.append([value * scale for value in drawn])
        return list(zip(*columns, strict=True))


# ----------------------------------------------------------------------------------------------------------- clock


class _JumpingSelector(selectors.DefaultSelector):
    """Jumps the clock to the loop's next timer instead of sleeping, unless a thread still has to return a result."""

    def __init__(self) -> None:
        super().__init__()
        self.owed = 0
        self.jumped_s = 0.0
        self.limit_s = math.inf

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or (timeout > 0 and self.owed):
            return super().select(None)
        self.jumped_s += max(timeout, 0.0)
        if self.jumped_s > self.limit_s:
            limit_s, self.limit_s = self.limit_s, math.inf  # raise once: running work still has to be closed
            raise TimeoutError(f"not done after {limit_s:g} simulated seconds")
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is simulated and starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def end_after(self, limit_s: float) -> None:
        """Make the loop raise `TimeoutError` at that time: work that waits forever would let time pass forever."""
        self._jumping.limit_s = limit_s

    def time(self) -> float:
        return self._jumping.jumped_s

    def owe(self, answer: asyncio.Future[T]) -> asyncio.Future[T]:
        """Let no time pass until a thread has set this result."""
        self._jumping.owed += 1
        answer.add_done_callback(self._given)
        return answer

    def _given(self, _: object) -> None:
        self._jumping.owed -= 1

    def run_in_executor(  # type: ignore[override]  # the base class names its parameters by type variables of their own
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        return self.owe(super().run_in_executor(executor, func, *args))

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the executor's threads without a limit: from Python 3.12 a runner gives them 300 s, which pass at
        once on this clock."""
        await super().shutdown_default_executor()


class Timeless:
    """Wraps a store or ledger that works in its own thread, so that its calls take no simulated time."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._wrapped, name)

        def call(*given: Any, **named: Any) -> Any:
            answer = method(*given, **named)
            if hasattr(answer, "__aiter__"):
                return self._each(answer)
            return _owed(answer) if isinstance(answer, Awaitable) else answer

        return call

    async def _each(self, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                item = await _owed(anext(items))
            except StopAsyncIteration:
                return
            yield item


def _owed(answer: Awaitable[T]) -> asyncio.Future[T]:
    loop, future = asyncio.get_running_loop(), asyncio.ensure_future(answer)
    return loop.owe(future) if isinstance(loop, SimulatedLoop) else future


def simulate(work: Callable[[Path], Coroutine[Any, Any, T]], limit_s: float = 100_000.0) -> T:
    """Run ``work`` on a simulated clock, with a directory for its files, in memory if possible. Raises `TimeoutError`
    if ``work`` is not done after ``limit_s`` simulated seconds."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, SimulatedLoop)
            loop.end_after(limit_s)
            return runner.run(work(Path(directory)))


# ---------------------------------------------------------------------------------------------------------- stages


class SimulatedStage:
    """A stage that takes as long as the job's row says. ``seconds`` reads the time from the row and sample index."""

    def __init__(self, name: StageName, workers: int, seconds: Callable[[Mapping[str, Any], int], float]) -> None:
        self.name, self.workers, self._seconds = name, workers, seconds
        self.timeout_s = 1e6
        self.busy_s = 0.0

    async def run(self, attempt: JobAttempt) -> bytes:
        row, sample = orjson.loads(attempt.job.spec.row), attempt.job.spec.sample_index
        seconds = self._seconds(row, sample)
        if seconds:
            await asyncio.sleep(seconds)
        self.busy_s += seconds
        attempt.timings[f"{self.name}_s"] = seconds
        result = {"reward": _of_sample(row.get("rewards", [1.0]), sample), "valid": True}
        return orjson.dumps({**result, "timings": attempt.timings})

    def classify(self, error: BaseException) -> StageFailure:
        raise error


@dataclass(frozen=True)
class SimulatedStages:
    """The stages of a rollout, in order."""

    init: SimulatedStage
    run: SimulatedStage
    eval: SimulatedStage

    @classmethod
    def of(cls, workers: int) -> SimulatedStages:
        """RUN takes the sample's time from the row's ``seconds``; the other stages take no time."""
        return cls(
            SimulatedStage(StageName.INIT, workers, lambda row, sample: 0.0),
            SimulatedStage(StageName.RUN, workers, lambda row, sample: float(_of_sample(row["seconds"], sample))),
            SimulatedStage(StageName.EVAL, workers, lambda row, sample: 0.0),
        )

    @property
    def in_order(self) -> tuple[SimulatedStage, SimulatedStage, SimulatedStage]:
        return self.init, self.run, self.eval


def _of_sample(values: Sequence[T], sample: int) -> T:
    """Return a sample's value. Samples that are run again have indices beyond the last value and wrap around."""
    return values[sample % len(values)]
