"""Measure the rollout service: no-op rollouts per second over HTTP, memory of rollouts in flight, servers that come
and go, and cancelling boxes at work.

    python -m campaigns.bench.pipeline [--json] [--only rate memory pool cancel] [--runs 5] [--rollouts 500]
        [--in-flight 1000] [--boxes 500]

*Rate*: a client submits over HTTP, with a durable store, and follows the results; beside it, in the same run, the bare
chain of `campaigns.bench.rollouts`. *Memory*: the growth of the service's process when that many rollouts are in
flight, each with a slow agent, and the time from submission to result of each. *Pool*: agent servers that are added
while jobs run, one as fast as the first and one twice as fast, with each one's share of the rollouts, counted from one
job time after it was added; then one that is killed and one that hangs. *Cancel*: rollouts whose command never ends in
local boxes: the time from the request to the response, and until each box is gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
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
from tests.rollouts.chain_process import ChainServer, chain_stack

ROOT = Path(__file__).resolve().parents[2]
RATE_RATIO_AT_LEAST = 0.5
KB_PER_ROLLOUT_AT_MOST = 100
TOKEN = "bench-" + "t" * 20
CONCURRENCY = 32
LONG_S = 20.0
"""How long an agent takes in the part in which all rollouts are in flight together."""
READY_S = 120.0
GONE_S = 120.0


@asynccontextmanager
async def service_over(
    stack: dict[str, Any], directory: Path, *, root_key: str | None = None, **serve: Any
) -> AsyncIterator[tuple[AsyncRolloutClient, int]]:
    """Run a service in a separate process; yield a client of it, and its process id."""
    arguments = {"stack": stack, "state_dir": str(directory), "root_key": root_key, "serve": {"port": 0, **serve}}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "campaigns.faults.service_process", json.dumps(arguments)),
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
    """Read ``count`` results; return when each arrived."""
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
    """Measure the growth of the service's memory at ``in_flight`` rollouts in flight, after 16 as a warm-up."""
    chain = {role: ChainServer(role, {"plain": True, **_paced(role, LONG_S)}) for role in ROLES}
    try:
        for server in chain.values():
            await asyncio.to_thread(server.wait_ready)
        with tempfile.TemporaryDirectory() as directory:
            rows = write_rows(Path(directory, "in.jsonl"), in_flight)
            keys: dict[str, Any] = {"concurrency": 64, "run_workers": in_flight, "ready_buffer": in_flight}
            async with service_over(chain_stack(chain), Path(directory), **keys) as (client, pid):
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
JOB_S = 0.5
PLACES = 8
"""The capacity of each agent server."""
WINDOW_S = 20.0
"""The time in which shares are counted."""
SHARE_WITHIN = 0.05
HANG_DEADLINE_S = 5.0
DRAIN_ALLOWANCE_S = 2.0
BACKLOG = 300


class Fed:
    """A service that always has jobs waiting, and agent servers that are lent to it."""

    def __init__(self, client: AsyncRolloutClient, rows: list[dict[str, Any]]) -> None:
        self.client, self.rows, self.submitted = client, rows, 0

    async def feed(self) -> None:
        while True:
            if (await self.client.status())["jobs"]["queued"] < BACKLOG:
                await self.client.submit(jobs_of(self.rows, f"pool-{self.submitted}"))
                self.submitted += len(self.rows)
            await asyncio.sleep(0.5)

    async def lend(self, server: ChainServer) -> str:
        url = f"http://127.0.0.1:{server.port}"
        return str((await self.client.register_server("trivial", url, capacity=PLACES))["server_id"])

    async def servers(self) -> dict[str, dict[str, Any]]:
        return {each["server_id"]: each for each in (await self.client.status())["servers"]}

    async def share(self, server_id: str) -> float:
        """Return a server's share of the rollouts that agent servers finish in the window, after one job time."""
        await asyncio.sleep(JOB_S)
        before = await self.servers()
        await asyncio.sleep(WINDOW_S)
        after = await self.servers()
        done = {name: each["done"] - before[name]["done"] for name, each in after.items() if "trivial" in name}
        return float(done[server_id] / sum(done.values()))

    async def until_health(self, server_id: str, health: str, patience_s: float) -> float:
        """Wait until a server has that health, at most ``patience_s``; return the seconds."""
        begun = time.perf_counter()
        while (await self.servers())[server_id]["health"] != health:
            if time.perf_counter() - begun > patience_s:
                break
            await asyncio.sleep(0.05)
        return time.perf_counter() - begun


async def pool() -> tuple[dict[str, Any], list[Bar]]:
    """Measure servers that are added while jobs run, and servers that die or hang."""
    chain = {role: ChainServer(role, {"plain": True, **_paced(role, JOB_S)}) for role in ROLES}
    same, fast, hung = (ChainServer("agent", {"plain": True, "delay_s": delay}) for delay in (JOB_S, JOB_S / 2, 3600))
    try:
        for server in (*chain.values(), same, fast, hung):
            await asyncio.to_thread(server.wait_ready)
        with tempfile.TemporaryDirectory() as directory:
            rows = write_rows(Path(directory, "in.jsonl"), BACKLOG)
            keys: dict[str, Any] = {"concurrency": 8 * PLACES, "capacities": {"trivial": PLACES}}
            keys |= {"run_timeout_s": HANG_DEADLINE_S, "watch_s": 0.5, "silent_s": 3.0, "retry_delay_s": 0.1}
            async with service_over(chain_stack(chain), Path(directory), **keys) as (client, _):
                fed = Fed(client, rows)
                feeding = asyncio.create_task(fed.feed())
                await asyncio.sleep(2.0)
                same_share = await fed.share(await fed.lend(same))
                fast_id = await fed.lend(fast)
                fast_share = await fed.share(fast_id)
                fast.kill()
                lost_s = await fed.until_health(fast_id, "lost", READY_S)
                hung_id = await fed.lend(hung)
                drained_s = await fed.until_health(hung_id, "draining", READY_S)
                feeding.cancel()
                await asyncio.wait({feeding})
                counts = await client.wait()
                attempts = [view.attempt async for view in client.results(follow=False)]
    finally:
        for server in (*chain.values(), same, fast, hung):
            server.stop()
    figures = {
        "share_of_one_as_fast": round(same_share, 4),
        "share_of_one_twice_as_fast": round(fast_share, 4),
        "dead_server_noticed_s": round(lost_s, 2),
        "hung_server_drained_s": round(drained_s, 2),
        "stage_deadline_s": HANG_DEADLINE_S,
        "rollouts": fed.submitted,
        "results": sum(counts.values()),
        "attempted_again": sum(attempt > 1 for attempt in attempts),
    }
    lost = fed.submitted - counts.get("done", 0)
    return figures, [
        Bar.at_most("share of a server added hot, off its fair half", abs(same_share / 0.5 - 1), SHARE_WITHIN),
        Bar.at_most("share of one twice as fast, off its fair half", abs(fast_share / 0.5 - 1), SHARE_WITHIN),
        Bar.at_most(
            "a hung server is drained", drained_s, HANG_DEADLINE_S + DRAIN_ALLOWANCE_S, "s after it was added"
        ),
        Bar("rows that the dead server and the hung one cost", lost, "rows", "= 0", lost == 0),
    ]


def _paced(role: str, delay_s: float) -> dict[str, Any]:
    return {"delay_s": delay_s} if role == "agent" else {}


async def cancel(boxes: int) -> tuple[dict[str, Any], list[Bar]]:
    """Cancel rollouts at work in local boxes, in groups of 20; measure what is left of them afterwards."""
    with tempfile.TemporaryDirectory(prefix="cancel-") as place:
        directory = Path(place)
        scope = Scope(directory / "boxes", run_id=f"cancel-{os.getpid()}")
        mark = f"sleep 4{os.getpid():08d}"
        (directory / "hang.yaml").write_text(json.dumps(HANGING_POLICY).replace("sleep 3000", mark))
        arguments = (
            *("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted"),
            f"script={directory / 'hang.yaml'}",
            f"++mini_swe_agent.responses_api_agents.mini_swe_agent.sandbox_lease_s={10 * LEASE_S}",
            f"++mini_swe_agent.responses_api_agents.mini_swe_agent.max_concurrency={boxes}",
            f"++sandbox.local.state_dir={scope.state_dir}",
        )
        row = json.loads(ROWS.read_text().splitlines()[0])
        async with suite_stack(arguments) as stack:
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
    description = f"left of {boxes} running jobs that were cancelled"
    return figures, [
        Bar.at_least("rollouts at work when they were cancelled", working, boxes),
        Bar(f"boxes {description}", len(left.get("files", [])), "boxes", "= 0", not left),
        Bar(f"commands {description}", commands_left, "processes", "= 0", not commands_left),
    ]


async def _gone(scope: Scope, boxes: int, begun: float) -> list[float]:
    """Return when each box was gone, in seconds after the request to cancel."""
    gone: list[float] = []
    while len(gone) < boxes and (elapsed := time.perf_counter() - begun) < GONE_S:
        there = len(list(scope.state_dir.glob("*/boxes/*")))
        gone += [elapsed] * (boxes - there - len(gone))
        await asyncio.sleep(0.05)
    return gone


def _running(mark: str) -> int:
    """Count the processes of that command; each box has two."""
    return sum(" ".join(each.info["cmdline"] or ()) == mark for each in psutil.process_iter(["cmdline"]))


async def _in_run(client: AsyncRolloutClient) -> int:
    return int(next(each["active"] for each in (await client.status())["stages"] if each["stage"] == "run"))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=["rate", "memory", "pool", "cancel"], default=["rate", "memory", "pool"]
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--boxes", type=int, default=500)
    chosen = parser.parse_args()
    work: dict[str, Callable[[], Coroutine[Any, Any, tuple[dict[str, Any], list[Bar]]]]] = {
        "rate": lambda: rates(chosen.runs, chosen.rollouts),
        "memory": lambda: memory(chosen.in_flight),
        "pool": pool,
        "cancel": lambda: cancel(chosen.boxes),
    }
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name in chosen.only:
        new_figures, new_bars = uvloop.run(work[name]())
        figures |= {name: new_figures}
        bars += new_bars
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
