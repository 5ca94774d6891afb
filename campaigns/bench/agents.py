"""Measure what a box costs a real agent CLI: Claude Code's whole act compared with the same program on the host.

    python -m campaigns.bench.agents [--json] [--sandbox local docker] [--rounds 9] [--concurrent 16]

*Overhead*: the wall time of ``POST /act`` (box, doors, CLI, harvest of the patch) over that of the bare CLI in a copy
of the same repository, with the same command line and the same scripted responses, which come at once. Each round runs
both, in alternating order; the figure is the median of the rounds' ratios. The bar is on a run of twelve responses in
a `local` box; one response, and containers, are figures. Servers are separate processes, as ``ng_run`` starts them.

*Concurrent*: that many acts at once; each must complete with its patch. The same number of bare CLIs at once is a
figure beside it. *Memory*: the peak of one `local` box and of that many at once, in separate runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.agent_parts import task
from campaigns.bench.agent_parts.memory import BoxMemory
from campaigns.bench.agent_parts.sides import InBox, OnHost, RunFailedError, Sessions
from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.rollouts import suite_stack
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.server_utils import ServerClient
from nemo_gym.stack.stack import pipeline_client

OVERHEAD_AT_MOST = 1.25
SANDBOXES = ("local", "docker")


@dataclass
class Bench:
    """Servers, an image, and both sides."""

    sandbox: str
    in_box: InBox
    on_host: OnHost
    state_dir: Path


@asynccontextmanager
async def bench(sandbox: str, folder: Path) -> AsyncIterator[Bench]:
    """Start the servers of a run, and make the measured repository as an image and on the host."""
    settings = await asyncio.to_thread(_settings, sandbox, folder)
    provider = create_provider({sandbox: settings})
    async with AsyncExitStack() as resources:
        resources.push_async_callback(provider.aclose)
        await task.make_image(provider)
        repository = folder / "repository"
        await asyncio.to_thread(task.make_repository, repository)
        arguments = (
            *("agent=claude_code", "environment=swe_bench", "model=scripted", f"sandbox={sandbox}"),
            f"script={await asyncio.to_thread(task.script, folder / 'script.json')}",
            *(f"++sandbox.{sandbox}.{key}={value}" for key, value in settings.items()),
        )
        stack = await resources.enter_async_context(suite_stack(arguments))
        resources.push_async_callback(close_global_aiohttp_client)
        client: ServerClient = pipeline_client(stack)
        sessions = Sessions(client)
        state_dir = Path(settings.get("state_dir", folder))
        yield Bench(sandbox, InBox(client, sessions), OnHost(sessions, folder, repository), state_dir)


def _settings(sandbox: str, folder: Path) -> dict[str, Any]:
    if sandbox == "local":
        # A separate supervisor, so that boxes of other programs cost nothing here.
        return {"state_dir": str(folder / "state"), "image_dir": str(folder / "images"), "linger_s": 1}
    from tests.docker_engine import start_engine

    os.environ["DOCKER_HOST"] = start_engine()
    return {"base_url": os.environ["DOCKER_HOST"]}


async def overhead(setting: Bench, rounds: int) -> dict[str, Any]:
    """Return the seconds of both sides and their ratio, for each length of run."""
    figures: dict[str, Any] = {}
    for turns in task.TURNS:
        boxed: list[float] = []
        bare: list[float] = []
        parts: list[dict[str, float]] = []
        for number in range(rounds + 1):  # the first warms up
            for side in ("bare", "boxed") if number % 2 else ("boxed", "bare"):
                if side == "bare":
                    seconds, _ = await setting.on_host.run(turns)
                    bare.append(seconds)
                else:
                    seconds, answer = await setting.in_box.run(turns)
                    boxed.append(seconds)
                    times = answer.observations
                    parts.append({"around_s": seconds - times["seconds"], "setup_s": times["setup_seconds"]})
        ratios = [boxed_s / bare_s for boxed_s, bare_s in zip(boxed[1:], bare[1:], strict=True)]
        figures[f"turns_{turns}"] = {
            "boxed_s": Samples(boxed[1:]).summary(3),
            "bare_s": Samples(bare[1:]).summary(3),
            "added_s": round(statistics.median(boxed[1:]) - statistics.median(bare[1:]), 3),
            "of_it_box_and_harvest_s": round(statistics.median(part["around_s"] for part in parts[1:]), 3),
            "of_it_setup_s": round(statistics.median(part["setup_s"] for part in parts[1:]), 3),
            "ratio": Samples(ratios).summary(3),
        }
    return figures


async def concurrent(setting: Bench, count: int) -> dict[str, Any]:
    """Run ``count`` runs at once of each side; return their failures, and how long all took."""
    figures: dict[str, Any] = {"runs": count, "turns": task.TURNS[-1], "failures": []}
    for name, side in (("boxed", setting.in_box), ("bare", setting.on_host)):
        started = time.perf_counter()
        took, failures = await _at_once(side, count)
        figures[f"{name}_wall_s"] = round(time.perf_counter() - started, 2)
        figures[f"{name}_run_s"] = Samples(took or [0.0]).summary(2)
        figures["failures"] += failures
    return figures


async def _at_once(side: InBox | OnHost, count: int) -> tuple[list[float], list[str]]:
    """Return the seconds of the runs that completed, and the errors of the others."""

    async def one() -> float | str:
        try:
            return (await side.run(task.TURNS[-1]))[0]
        except RunFailedError as error:
            return str(error)

    outcomes = await asyncio.gather(*(one() for _ in range(count)))
    return [one for one in outcomes if isinstance(one, float)], [one for one in outcomes if isinstance(one, str)]


async def memory(setting: Bench, count: int) -> dict[str, Any]:
    """Measure the memory of ``count`` `local` boxes at once."""
    with BoxMemory(setting.state_dir) as box_memory:
        _, failures = await _at_once(setting.in_box, count)
    # Boxes of the harvest run only git; boxes of the CLI take most of the memory.
    agents = [peak for peak in box_memory.peaks.values() if peak.private > 64 * 1024]
    if failures or not agents:
        raise RunFailedError(f"no memory sample for {count} boxes: {failures}")
    return {
        "boxes_at_once": box_memory.most_boxes,
        "pss_mib_per_box": Samples([peak.pss / 1024 for peak in agents]).summary(1),
        "private_mib_per_box": Samples([peak.private / 1024 for peak in agents]).summary(1),
        "all_boxes_pss_mib": round(box_memory.most_pss / 1024, 1),
    }


async def run(sandboxes: Sequence[str], rounds: int, count: int) -> tuple[dict[str, Any], list[Bar]]:
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for sandbox in sandboxes:
        with tempfile.TemporaryDirectory(prefix="bench-agents-", ignore_cleanup_errors=True) as name:
            async with bench(sandbox, Path(name)) as setting:
                figures[sandbox] = await overhead(setting, rounds)
                figures[sandbox]["concurrent"] = together = await concurrent(setting, count)
                if sandbox == "local":
                    figures[sandbox]["memory"] = {n: await memory(setting, n) for n in (1, count)}
            await asyncio.sleep(2)  # until the supervisor has exited
        longest = f"turns_{task.TURNS[-1]}"
        bars.append(Bar.at_most(f"{sandbox}: {count} acts at once, failures", len(together["failures"]), 0))
        if sandbox == "local":
            ratio = figures[sandbox][longest]["ratio"]["median"]
            label = f"local: act of {task.TURNS[-1]} answers over the bare CLI, median"
            bars.insert(0, Bar.at_most(label, ratio, OVERHEAD_AT_MOST, "x"))
    return figures, bars


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--sandbox", nargs="+", default=list(SANDBOXES), choices=SANDBOXES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--concurrent", type=int, default=16, help="acts at once")
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    figures, bars = asyncio.run(run(options.sandbox, options.rounds, options.concurrent))
    return print_report(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
