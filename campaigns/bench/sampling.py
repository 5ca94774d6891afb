"""Compare how fast batches of effective groups fill: with the sampler, in rounds, and if all durations are known.

    python -m campaigns.bench.sampling [--json] [--seeds 1,2,3]

The workload is fixed (`SamplingWorkload`), its clock simulated. The sampler and the published baseline, rounds of 32
groups repeated until 32 are effective, run through the real dispatcher and job store. A round waits for all of its
groups, and discards effective groups beyond the batch. The same rule on a heap of workers, which takes milliseconds,
finds the best round size; it is checked against the real run at 32. Bars are on the worst seed.

Schedulers that know durations take groups in the loader's order, never leave a worker idle, and carry over unfinished
groups, as the sampler does. One runs the longest rollouts first, one the shortest group first, each within the next
two batches' worth of groups; a third number is the work itself: the time of every group up to the last that is needed,
divided by the workers. The bar is on the fastest of these. With a window of four batches, the shortest group first is
faster still, because at the end it has left the 128 longest groups behind.

Two more figures have no bars: rounds that keep their surplus for the next batch, which no publication does, and the
sampler with other settings. A training step takes no time here, on either side.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.bench.workloads import SampledGroup, SamplingWorkload, SimulatedStages, Timeless, simulate
from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.interfaces import JobEvent, JobSpec
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.store import SqliteJobStore
from nemo_gym.sampling.groups import DEFAULT_FILTERS, GroupFilter
from nemo_gym.sampling.ledger import SamplerLedger
from nemo_gym.sampling.loader import LoaderCursor
from nemo_gym.sampling.sampler import RolloutSampler

ROUNDS_AT_LEAST = 2.7
BEST_ROUNDS_AT_LEAST = 2.0
KNOWING_AT_MOST = 1.15
ROUND_SIZES = range(8, 161, 4)
ROUTE = Servers(agent="simulated", environment=None, model=None)


# -------------------------------------------------------------------------------- through the dispatcher and store


def _config(workload: SamplingWorkload, directory: Path) -> RolloutRunConfig:
    keys = {"input": directory / "in.jsonl", "output": directory / "out.jsonl", "concurrency": workload.workers}
    return RolloutRunConfig.parse(keys)


def _stages(workload: SamplingWorkload) -> SimulatedStages:
    return SimulatedStages.of(workload.workers)


def _rows(workload: SamplingWorkload) -> Iterator[dict[str, Any]]:
    for number, group in enumerate(workload.groups()):
        yield {"id": f"task-{number}", "seconds": group.seconds, "rewards": group.rewards}


@asynccontextmanager
async def simulated_sampler(
    directory: Path,
    rows: Iterable[Any],
    stages: SimulatedStages,
    run: Mapping[str, Any] | None = None,
    filters: Iterable[GroupFilter] = DEFAULT_FILTERS,
    **options: Any,
) -> AsyncIterator[RolloutSampler]:
    """Yield a sampler over the real dispatcher and store. Its rollouts take the times in their rows."""
    keys = {"input": directory / "in.jsonl", "output": directory / "out.jsonl", "concurrency": stages.run.workers}
    config = RolloutRunConfig.parse({**keys, **(run or {})})
    store: Any = Timeless(SqliteJobStore(directory / "store.sqlite"))
    ledger: Any = Timeless(SamplerLedger(directory / "sampler.sqlite"))

    async def check(number: int, row: Any) -> tuple[dict[str, Any], str]:
        return dict(row), "simulated"

    dispatcher = AsyncDispatcher(
        store,
        stages.in_order,
        config,
        lambda _: ROUTE,
        listener=lambda event: sampler.job_ended(event),
        on_run=lambda attempt: sampler.job_started(attempt),
    )
    sampling = SamplingConfig.parse(options)
    sampler = RolloutSampler(
        store,
        ledger,
        dispatcher,
        LoaderCursor(rows, sampling.epochs),
        check,
        run_id="run",
        workers=config.workers,
        config=sampling,
        filters=filters,
    )
    await store.release()
    try:
        yield sampler
    finally:
        await sampler.aclose()
        await dispatcher.stop()
        await store.aclose()
        await ledger.aclose()


async def sampled(workload: SamplingWorkload, directory: Path, **options: Any) -> dict[str, Any]:
    """Fill the workload's batches with the sampler; return the seconds, and how the workers' time was used."""
    stages, options = _stages(workload), {"samples_per_group": workload.samples, "epochs": 1, **options}
    clock = asyncio.get_running_loop().time
    async with simulated_sampler(directory, _rows(workload), stages, **options) as sampler:
        start, lags, too_old = clock(), [], 0
        for _ in range(workload.batches):
            batch = await sampler.next_batch(workload.batch)
            assert len(batch.groups) == workload.batch
            lags += [batch.staleness(sample) for sample in batch.samples]
            too_old += batch.left_out.get("too old", 0)
        seconds = clock() - start
    return {
        "seconds": seconds,
        "busy": stages.run.busy_s / seconds / workload.workers,
        "mean_lag": sum(lags) / len(lags),
        "max_lag": max(lags),
        "groups_too_old": too_old,
    }


async def rounds(workload: SamplingWorkload, size: int, directory: Path) -> float:
    """Run the published baseline: rounds of ``size`` groups until a batch is full, each awaited to its end."""
    config, done = _config(workload, directory), asyncio.Event()
    left: set[str] = set()

    def ended(event: JobEvent) -> None:
        left.discard(event.job.job_id)
        if not left:
            done.set()

    store: Any = Timeless(SqliteJobStore(directory / "store.sqlite"))
    dispatcher = AsyncDispatcher(store, _stages(workload).in_order, config, lambda _: ROUTE, listener=ended)
    clock, groups, serial = asyncio.get_running_loop().time, workload.groups(), 0
    await dispatcher.start()
    start = clock()
    try:
        for _ in range(workload.batches):
            effective = 0
            while effective < workload.batch:
                specs = []
                for group in islice(groups, size):
                    row = orjson.dumps({"seconds": group.seconds, "rewards": group.rewards})
                    specs += [
                        JobSpec(f"run.{serial}-{n}", "run", f"t{serial}", f"run.{serial}", n, serial, "a", row)
                        for n in range(workload.samples)
                    ]
                    effective += group.effective
                    serial += 1
                left.update(spec.job_id for spec in specs)
                done.clear()
                await store.submit(specs)
                dispatcher.notify()
                await done.wait()
        return clock() - start
    finally:
        await dispatcher.stop()
        await store.aclose()


# ------------------------------------------------------------------------------------------- on a heap of workers


def rounds_on_a_heap(workload: SamplingWorkload, size: int, *, keep_surplus: bool = False) -> float:
    """Compute `rounds` for workers that take the next rollout the moment they are free."""
    now, groups, effective = 0.0, workload.groups(), 0
    for _ in range(workload.batches):
        effective = max(0, effective - workload.batch) if keep_surplus else 0
        while effective < workload.batch:
            free = [now] * workload.workers
            for group in islice(groups, size):
                for seconds in group.seconds:
                    heapq.heappush(free, heapq.heappop(free) + seconds)
                effective += group.effective
            now = max(free)
    return now


def knowing_durations(
    workload: SamplingWorkload, order: Callable[[int, SampledGroup, float], Any], batches: int = 2
) -> float:
    """Simulate a scheduler that takes the first rollout by ``order`` from the next ``batches``' worth of groups."""
    groups, window = workload.groups(), batches * workload.batch
    now, free, effective, serial = 0.0, workload.workers, 0, 0
    waiting: list[tuple[Any, int, float]] = []
    running: list[tuple[float, int]] = []
    left: dict[int, list[Any]] = {}
    while effective < workload.batch * workload.batches:
        while len(left) < window:
            group = next(groups)
            left[serial] = [len(group.seconds), group.effective]
            for seconds in group.seconds:
                heapq.heappush(waiting, (order(serial, group, seconds), serial, seconds))
            serial += 1
        while free and waiting:
            _, number, seconds = heapq.heappop(waiting)
            heapq.heappush(running, (now + seconds, number))
            free -= 1
        now, number = heapq.heappop(running)
        free += 1
        left[number][0] -= 1
        if not left[number][0]:
            effective += left.pop(number)[1]
    return now


def work_alone(workload: SamplingWorkload) -> float:
    """Return the time of all groups up to the last that is needed, on workers that are never idle."""
    wanted, total = workload.batch * workload.batches, 0.0
    for group in workload.groups():
        total += sum(group.seconds)
        wanted -= group.effective
        if not wanted:
            return total / workload.workers
    raise AssertionError("the stream has no end")


# --------------------------------------------------------------------------------------------------------- report


async def _sampled_with(workload: SamplingWorkload, options: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    return await sampled(workload, directory, **options)


def of_seed(seed: int) -> dict[str, Any]:
    workload = SamplingWorkload(seed)
    start = time.perf_counter()
    sampler = simulate(lambda directory: sampled(workload, directory))
    wall_s = time.perf_counter() - start
    settings: dict[str, dict[str, Any]] = {
        "published look-ahead": {"look_ahead": False},
        "max_weights_lag=1": {"max_weights_lag": 1},
        "max_weights_lag=0": {"max_weights_lag": 0},
    }
    variants = {name: simulate(partial(_sampled_with, workload, options)) for name, options in settings.items()}
    published = simulate(lambda directory: rounds(workload, workload.batch, directory))
    on_heap = {size: rounds_on_a_heap(workload, size) for size in ROUND_SIZES}
    assert abs(on_heap[workload.batch] / published - 1) < 0.01, (on_heap[workload.batch], published)
    best = min(on_heap, key=on_heap.__getitem__)
    knowing = {
        "longest rollout first": knowing_durations(workload, lambda number, group, seconds: -seconds),
        "shortest group first": knowing_durations(workload, lambda number, group, seconds: sum(group.seconds)),
        "work alone": work_alone(workload),
    }
    return {
        "sampler": sampler,
        "variants": variants,
        "rounds_of_32_s": published,
        "best_rounds": {"size": best, "seconds": on_heap[best]},
        "best_rounds_that_keep_surplus_s": min(
            rounds_on_a_heap(workload, size, keep_surplus=True) for size in ROUND_SIZES
        ),
        "knowing_durations_s": knowing,
        "shortest_of_four_batches_first_s": knowing_durations(
            workload, lambda number, group, seconds: sum(group.seconds), batches=4
        ),
        "times_faster_than_rounds_of_32": published / sampler["seconds"],
        "times_faster_than_best_rounds": on_heap[best] / sampler["seconds"],
        "times_slower_than_knowing_durations": sampler["seconds"] / min(knowing.values()),
        "wall_s": wall_s,
    }


def measure(seeds: list[int]) -> tuple[dict[str, Any], list[Bar]]:
    figures_by_seed = {seed: of_seed(seed) for seed in seeds}
    figures = {f"seed {seed}": _rounded(each) for seed, each in figures_by_seed.items()}
    rounds_ratio = min(each["times_faster_than_rounds_of_32"] for each in figures_by_seed.values())
    best_ratio = min(each["times_faster_than_best_rounds"] for each in figures_by_seed.values())
    knowing_ratio = max(each["times_slower_than_knowing_durations"] for each in figures_by_seed.values())
    return figures, [
        Bar.at_least("times faster than rounds of 32", rounds_ratio, ROUNDS_AT_LEAST, "x"),
        Bar.at_least("times faster than the best round size", best_ratio, BEST_ROUNDS_AT_LEAST, "x"),
        Bar.at_most("time against one that knows durations", knowing_ratio, KNOWING_AT_MOST, "x"),
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    arguments = parser.parse_args()
    figures, bars = measure([int(seed) for seed in arguments.seeds.split(",")])
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
