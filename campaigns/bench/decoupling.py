"""Compare stages that have their own workers with workers that take a rollout through all three stages.

    python -m campaigns.bench.decoupling [--json]

The workload is fixed (`StagedWorkload`), its clock simulated; both sides run through the real dispatcher and store.
*Coupled*: 32 workers, each of which holds its place at the engine while it prepares and while it grades. *Decoupled*:
also 32 places at the engine, and 64 separate evaluation workers, where the cores are; INIT has 16. The
analytic ratio is that of endless queues: the coupled workers' time per rollout over that of the scarcest stage.

Both sides have the same number of places at the engine. With the same number of workers in all, nothing would be
gained: ``places_if_coupled`` is how many coupled workers, and so places at the engine, the same rate takes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.bench.workloads import SimulatedStage, SimulatedStages, StagedWorkload, Timeless, simulate
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.verdict import StageName
from nemo_gym.rollout import Servers
from nemo_gym.rollouts.interfaces import JobSpec
from nemo_gym.rollouts.pipeline import AsyncDispatcher
from nemo_gym.rollouts.store import SqliteJobStore

COUPLED = 32
RUN_SLOTS = 32
EVALUATION_WORKERS = 64
INIT_WORKERS = 16
ANALYTIC_AT_LEAST = 2.8
MEASURED_AT_LEAST = 2.5
BUSY_AT_LEAST = 0.9


def coupled() -> SimulatedStages:
    def none(row: Mapping[str, Any], sample: int) -> float:
        return 0.0

    return SimulatedStages(
        SimulatedStage(StageName.INIT, COUPLED, none),
        SimulatedStage(StageName.RUN, COUPLED, lambda row, sample: sum(row["times"])),
        SimulatedStage(StageName.EVAL, COUPLED, none),
    )


def decoupled() -> SimulatedStages:
    return SimulatedStages(
        SimulatedStage(StageName.INIT, INIT_WORKERS, lambda row, sample: float(row["times"][0])),
        SimulatedStage(StageName.RUN, RUN_SLOTS, lambda row, sample: float(row["times"][1])),
        SimulatedStage(StageName.EVAL, EVALUATION_WORKERS, lambda row, sample: float(row["times"][2])),
    )


async def makespan(workload: StagedWorkload, stages: SimulatedStages, directory: Path) -> float:
    """Return the seconds from the first claim to the last result."""
    init, run, evaluation = (stage.workers for stage in stages.in_order)
    config = RolloutRunConfig.parse(
        {
            "input": directory / "in.jsonl",
            "output": directory / "out.jsonl",
            **{"init_workers": init, "run_workers": run, "eval_workers": evaluation},
        }
    )
    store: Any = Timeless(SqliteJobStore(directory / "store.sqlite"))
    await store.submit(
        [
            JobSpec(f"run.{n}-0", "run", f"t{n}", f"run.{n}", 0, n, "simulated", orjson.dumps({"times": times}))
            for n, times in enumerate(workload.times())
        ]
    )
    route = Servers(agent="simulated", environment=None, model=None)
    dispatcher = AsyncDispatcher(store, stages.in_order, config, lambda _: route)
    clock = asyncio.get_running_loop().time
    start = clock()
    await dispatcher.start()
    try:
        await dispatcher.drain()
        return clock() - start
    finally:
        await dispatcher.stop()
        await store.aclose()


def measure() -> tuple[dict[str, Any], list[Bar]]:
    workload = StagedWorkload()
    init_s, run_s, eval_s = workload.mean_s
    scarcest_s = max(init_s / INIT_WORKERS, run_s / RUN_SLOTS, eval_s / EVALUATION_WORKERS)
    analytic = sum(workload.mean_s) / COUPLED / scarcest_s
    assert scarcest_s == eval_s / EVALUATION_WORKERS, "evaluation is the scarce stage of this workload"
    alone, apart = coupled(), decoupled()
    coupled_s = simulate(lambda directory: makespan(workload, alone, directory))
    decoupled_s = simulate(lambda directory: makespan(workload, apart, directory))
    busy = {str(stage.name): round(stage.busy_s / stage.workers / decoupled_s, 3) for stage in apart.in_order}
    figures = {
        "jobs": workload.jobs,
        "stage_means_s": workload.mean_s,
        "coupled_s": round(coupled_s, 1),
        "decoupled_s": round(decoupled_s, 1),
        "analytic_ratio": round(analytic, 3),
        "busy": busy,
        "places_if_coupled": round(COUPLED * coupled_s / decoupled_s, 1),
    }
    return figures, [
        Bar.at_least("analytic ratio of the workload", analytic, ANALYTIC_AT_LEAST, "x"),
        Bar.at_least("rollouts/s, ratio to coupled workers", coupled_s / decoupled_s, MEASURED_AT_LEAST, "x"),
        Bar.at_least("scarce stage (EVAL) busy", busy["eval"], BUSY_AT_LEAST),
    ]


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    figures, bars = measure()
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
