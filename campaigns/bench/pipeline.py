"""The rollout service: no-op rollouts per second over HTTP, memory of those in flight, and cancelling boxes at work.

    python -m campaigns.bench.pipeline [--json] [--only rate memory cancel] [--runs 5] [--rollouts 500]
        [--in-flight 1000] [--boxes 500]

*Rate*: a client submits over HTTP, with a durable store, and follows the results; beside it, in the same run, the bare
chain of `campaigns.bench.rollouts`. *Memory*: what the service's process grows by when so many rollouts are in flight,
each with an agent that answers after a while, and the time from submission to result of each. *Cancel*: rollouts whose
command never ends in local boxes; from the request to the answer, and until each box is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.rollouts import bare_rollouts, suite_stack, write_rows
from campaigns.faults.kills import HANGING_POLICY, LEASE_S, ROWS
from campaigns.faults.leftovers import Scope, leftovers
from nemo_gym.service.client import AsyncRolloutClient
from tests.rollouts.chain_process import ChainServer

ROOT = Path(__file__).resolve().parents[2]
RATE_RATIO_AT_LEAST = 0.5
KB_PER_ROLLOUT_AT_MOST = 100
TOKEN = "bench-" + "t" * 20
CONCURRENCY = 32
LONG_S = 20.0
"""How long an agent takes whose rollouts are to be in flight together."""
READY_S = 120.0
GONE_S = 120.0


@asynccontextmanager
async def service_over(
    stack: dict[str, Any], directory: Path, *, root_key: str | None = None, **serve: Any
) -> AsyncIterator[tuple[AsyncRolloutClient, int]]:
    """A service in a process of its own: a client of it, and its process id."""
    given = {"stack": stack, "state_dir": str(directory), "root_key": root_key, "serve": {"port": 0, **serve}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "campaigns.faults.service_process", json.dumps(given)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NEMO_GYM_SERVICE_OPERATE_TOKEN": TOKEN},
    )
    draining: asyncio.Task[bytes] | None = None
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            while b"are served at" not in (line := await process.stdout.readline()):
                assert line, "the service ended before it was ready"
        url = line.decode().split("are served at ")[1].split(";")[0]
        draining = asyncio.create_task(process.stdout.read(), name="read the log")
        async with AsyncRolloutClient(url, TOKEN) as client:
            yield client, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        if draining is not None:
            await draining


def jobs_of(rows: list[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    return [{"job_id": f"{run}-{n}", "run_id": run, "task_index": n, "row": row} for n, row in enumerate(rows)]


async def finished(client: AsyncRolloutClient, run: str, count: int) -> list[float]:
    """Read so many results; when each came."""
    times = []
    async for view in client.results(run=run):
        assert view.state == "done", view
        times.append(time.perf_counter())
        if len(times) == count:
            break
    return times


async def rates(runs: int, rollouts: int) -> tuple[dict[str, Any], list[Bar]]:
    chain = {role: ChainServer(role, {"plain": True}) for role in ("environment", "agent", "model")}
    bare: list[float] = []
    service: list[float] = []
    try:
        for server in chain.values():
            await asyncio.to_thread(server.wait_ready)
        urls = {role: f"http://127.0.0.1:{server.port}" for role, server in chain.items()}
        with tempfile.TemporaryDirectory() as directory:
            rows = write_rows(Path(directory, "in.jsonl"), rollouts)
            async with suite_stack() as stack:
                keys = {"concurrency": CONCURRENCY, "agent_name": stack.chosen["agent"]}
                async with service_over(stack.config, Path(directory), root_key=stack.root_key, **keys) as (client, _):
                    for number in range(runs + 1):
                        start = time.perf_counter()
                        await bare_rollouts(urls, rows, CONCURRENCY)
                        middle = time.perf_counter()
                        following = asyncio.create_task(finished(client, f"r{number}", rollouts))
                        submitted = await client.submit(jobs_of(rows, f"r{number}"))
                        assert submitted.accepted == rollouts, submitted
                        await following
                        if number:  # the first warms up
                            bare.append(rollouts / (middle - start))
                            service.append(rollouts / (time.perf_counter() - middle))
    finally:
        for server in chain.values():
            server.stop()
    ratios = Samples([ours / theirs for ours, theirs in zip(service, bare, strict=True)])
    figures = {
        "bare_rollouts_per_s": Samples(bare).summary(1),
        "service_rollouts_per_s": Samples(service).summary(1),
        "rate_ratio": ratios.summary(3),
    }
    name = "rollouts/s over HTTP, ratio to the bare chain"
    return figures, [Bar.at_least(name, ratios.median, RATE_RATIO_AT_LEAST, "x")]


async def memory(in_flight: int) -> tuple[dict[str, Any], list[Bar]]:
    """Growth of the service's memory at so many rollouts in flight, after as many have warmed it up."""
    slow = {"plain": True, "delay_s": LONG_S}
    chain = {role: ChainServer(role, slow if role == "agent" else {"plain": True}) for role in ROLES}
    try:
        for server in chain.values():
            await asyncio.to_thread(server.wait_ready)
        ports = {role: {"host": "127.0.0.1", "port": server.port} for role, server in chain.items()}
        references = {"resources_server": {"name": "env"}, "model_server": {"name": "policy"}}
        stack = {
            "env": {"resources_servers": {"chain": ports["environment"]}},
            "policy": {"responses_api_models": {"chain": ports["model"]}},
            "trivial": {"responses_api_agents": {"chain": {**ports["agent"], **references}}},
        }
        with tempfile.TemporaryDirectory() as directory:
            rows = write_rows(Path(directory, "in.jsonl"), in_flight)
            keys: dict[str, Any] = {"concurrency": 64, "run_workers": in_flight, "ready_buffer": in_flight}
            async with service_over(stack, Path(directory), **keys) as (client, pid):
                process = psutil.Process(pid)
                await client.submit(jobs_of(rows[:16], "warm"))
                await finished(client, "warm", 16)
                idle = process.memory_info().rss
                start = time.perf_counter()
                following = asyncio.create_task(finished(client, "all", in_flight))
                await client.submit(jobs_of(rows, "all"))
                most, busiest = 0, 0
                while not following.done():
                    status = await client.status()
                    run = next(each for each in status["stages"] if each["stage"] == "run")
                    busiest, most = max(busiest, run["active"]), max(most, process.memory_info().rss)
                    await asyncio.sleep(0.25)
                ended = sorted(at - start for at in await following)
    finally:
        for server in chain.values():
            server.stop()
    per_rollout = (most - idle) / 1024 / in_flight
    figures = {
        "in_flight_at_once": busiest,
        "idle_mib": round(idle / 2**20, 1),
        "most_mib": round(most / 2**20, 1),
        "kb_per_rollout_in_flight": round(per_rollout, 1),
        "agent_s": LONG_S,
        "submission_to_result_p50_s": round(ended[len(ended) // 2], 2),
        "submission_to_result_p99_s": round(ended[int(len(ended) * 0.99)], 2),
    }
    name = f"memory of the service per rollout in flight, at {in_flight}"
    return figures, [
        Bar.at_most(name, per_rollout, KB_PER_ROLLOUT_AT_MOST, "KB"),
        Bar.at_least("rollouts in RUN at once", busiest, in_flight),
    ]


ROLES = ("environment", "agent", "model")


async def cancel(boxes: int) -> tuple[dict[str, Any], list[Bar]]:
    """Cancel rollouts at work in local boxes, in groups of 20; what is left of them when the answers are there."""
    with tempfile.TemporaryDirectory(prefix="cancel-") as place:
        directory = Path(place)
        scope = Scope(directory / "boxes", run_id=f"cancel-{os.getpid()}")
        mark = f"sleep 4{os.getpid():08d}"
        (directory / "hang.yaml").write_text(json.dumps(HANGING_POLICY).replace("sleep 3000", mark))
        words = (
            *("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted"),
            f"script={directory / 'hang.yaml'}",
            f"++mini_swe_agent.responses_api_agents.mini_swe_agent.sandbox_lease_s={10 * LEASE_S}",
            f"++mini_swe_agent.responses_api_agents.mini_swe_agent.max_concurrency={boxes}",
            f"++sandbox.local.state_dir={scope.state_dir}",
        )
        row = json.loads(ROWS.read_text().splitlines()[0])
        async with suite_stack(words) as stack:
            keys = {"concurrency": 16, "run_workers": boxes, "agent_name": stack.chosen["agent"]}
            async with service_over(stack.config, directory, root_key=stack.root_key, **keys) as (client, _):
                jobs = jobs_of([row] * boxes, "box")
                await client.submit([{**job, "group_id": f"g{n // 20}"} for n, job in enumerate(jobs)])
                give_up = time.perf_counter() + 60 + boxes
                active, working = 0, 0
                while (active < boxes or working < boxes) and time.perf_counter() < give_up:
                    await asyncio.sleep(1.0)
                    active, working = await _in_run(client), _running(mark) // 2
                begun = time.perf_counter()
                groups = [f"g{n}" for n in range((boxes + 19) // 20)]
                reports = await asyncio.gather(*(client.cancel(group=group) for group in groups))
                answered_s = time.perf_counter() - begun
                gone = await _gone(scope, boxes, begun)
                commands_left, left = _running(mark), leftovers(scope)
    seconds = sorted(report.seconds for report in reports)
    figures = {
        "rollouts": boxes,
        "active_when_cancelled": active,
        "boxes_with_their_command": working,
        "cancelled_active": sum(report.active for report in reports),
        "cancelled_queued": sum(report.queued for report in reports),
        "group_p50_s": round(seconds[len(seconds) // 2], 2),
        "group_p99_s": round(seconds[int(len(seconds) * 0.99)], 2),
        "all_s": round(answered_s, 2),
        "box_gone_p50_s": round(gone[len(gone) // 2], 2) if gone else None,
        "box_gone_p99_s": round(gone[int(len(gone) * 0.99)], 2) if gone else None,
        "left": {kind: len(things) for kind, things in left.items()},
    }
    what = f"left of {boxes} running jobs that were cancelled"
    return figures, [
        Bar.at_least("rollouts at work when they were cancelled", working, boxes),
        Bar(f"boxes {what}", len(left.get("files", [])), "boxes", "= 0", not left),
        Bar(f"commands {what}", commands_left, "processes", "= 0", not commands_left),
    ]


async def _gone(scope: Scope, boxes: int, begun: float) -> list[float]:
    """When each box was gone, seconds after the cancel was asked for."""
    gone: list[float] = []
    while len(gone) < boxes and (elapsed := time.perf_counter() - begun) < GONE_S:
        there = len(list(scope.state_dir.glob("*/boxes/*")))
        gone += [elapsed] * (boxes - there - len(gone))
        await asyncio.sleep(0.05)
    return gone


def _running(mark: str) -> int:
    """Processes of that command; each box has two."""
    return sum(" ".join(each.info["cmdline"] or ()) == mark for each in psutil.process_iter(["cmdline"]))


async def _in_run(client: AsyncRolloutClient) -> int:
    return int(next(each["active"] for each in (await client.status())["stages"] if each["stage"] == "run"))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=["rate", "memory", "cancel"], default=["rate", "memory"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--boxes", type=int, default=500)
    chosen = parser.parse_args()
    work = {
        "rate": lambda: rates(chosen.runs, chosen.rollouts),
        "memory": lambda: memory(chosen.in_flight),
        "cancel": lambda: cancel(chosen.boxes),
    }
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in chosen.only:
        found, held = uvloop.run(work[name]())
        figures |= {name: found}
        bars += held
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
