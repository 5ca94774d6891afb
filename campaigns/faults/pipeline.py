#!/usr/bin/env python3
"""Check that each job ends exactly once, with jobs that raise, hang or kill their server and a service killed often.

    python -m campaigns.faults.pipeline --json [--store sqlite postgresql] [--jobs 1000] [--kills 50]
        [--pipelines 1 2] [--ray]

Of the jobs 1 % raise, 1 % hang, 1 % kill their agent server, 1 % are cancelled, and 5 % are submitted twice. The
service gets ``kill -9`` at random moments, and at every kind of write: within its transaction, and after it but before
the caller gets the result. Each kill comes with a few new jobs, so that there is always something to lose. A client
submits, follows the results across restarts, and counts. Prints one JSON object last: ``figures`` and ``bars``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, print_report
from campaigns.faults.service_process import BOUNDARIES
from nemo_gym.service.client import AsyncRolloutClient
from resources_servers.sandbox.tests.postgres import running_postgres
from tests.rollouts.chain_process import ChainServer, chain_stack

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 15.0
"""The deadline of the jobs that hang."""
ALLOWANCE_S = 30.0
"""Time allowed beyond a deadline, because the service may be down when it passes."""
SETTLE_S = 240.0
TOKEN = "campaign-" + "t" * 20
BOUNDARY_S = 15.0
"""The time in which a service must reach the write at which it dies."""
PROVOKED = tuple(b for b in BOUNDARIES if b.partition(" ")[0] in ("requeue", "release", "cancel", "claim_overdue"))
"""Writes that only a job of a certain kind causes; each gets its own job."""
OVERDUE_S = 0.5
BATCH = 10
SEED = 13


def job(number: int, jobs: int) -> dict[str, Any]:
    row = {"id": f"t{number}", "responses_create_params": {"input": "A or B?"}, "expected_answer": "B"}
    fields: dict[str, Any] = {"job_id": f"job-{number}", "row": row, "task_index": number, "run_id": "campaign"}
    deadline_s = {"hangs": DEADLINE_S, "release": DEADLINE_S, "claim_overdue": OVERDUE_S}.get(kind_of(number, jobs))
    return fields if deadline_s is None else {**fields, "deadline_s": deadline_s}


def kind_of(number: int, jobs: int) -> str:
    """Return the kind of a job: one in a hundred of each kind; from ``jobs`` on, those that `provoke` submits."""
    if number >= jobs:
        return PROVOKED[number - jobs].partition(" ")[0]
    return {17: "raises", 41: "hangs", 59: "cancel", 73: "kills"}.get(number % 100, "works")


@dataclass
class World:
    """The servers and the services of a case."""

    directory: Path
    store: str
    pipelines: int
    jobs: int
    servers: dict[str, ChainServer] = field(default_factory=dict)
    services: list[asyncio.subprocess.Process | None] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    server_kills: int = 0

    def start_servers(self) -> None:
        journal = self.directory / "journal"
        journal.touch()

        def tasks_of(kind: str) -> list[str]:
            return [f"t{n}" for n in range(self.jobs + len(PROVOKED)) if kind_of(n, self.jobs) == kind]

        agent = {
            "delay_s": 0.02,
            "crash": dict.fromkeys([*tasks_of("raises"), *tasks_of("requeue")], 99),
            "hang": [*tasks_of("hangs"), *tasks_of("cancel"), *tasks_of("release")],
            "kills": dict.fromkeys(tasks_of("kills"), 1),
        }
        for role in ("environment", "agent", "model"):
            options = {"journal": str(journal), **(agent if role == "agent" else {})}
            self.servers[role] = ChainServer(role, options)
        for server in self.servers.values():
            server.wait_ready()
        self.services = [None] * self.pipelines
        for _ in range(self.pipelines):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.ports.append(probe.getsockname()[1])

    async def start_service(self, number: int, kill: str | None = None) -> None:
        serve = {
            "port": self.ports[number],
            "store": self.store,
            "pipeline": f"p{number}",
            "concurrency": 32,
            "retry_delay_s": 0.05,
            "watch_s": 0.5,
            "silent_s": 5.0,
            "lease_s": 10.0,
        }
        arguments = {
            "stack": chain_stack(self.servers),
            "serve": serve,
            "state_dir": str(self.directory / f"s{number}"),
            "kill": kill,
        }
        log = (self.directory / f"service-{number}.log").open("ab")
        with log:
            self.services[number] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "campaigns.faults.service_process", json.dumps(arguments)),
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "NEMO_GYM_SERVICE_OPERATE_TOKEN": TOKEN},
            )

    async def keep_agent_alive(self) -> None:
        """Restart the agent server soon after it died, as a supervisor does."""
        agent = self.servers["agent"]
        while True:
            await asyncio.sleep(0.1)
            if not agent.process.is_alive():
                self.server_kills += 1
                await asyncio.to_thread(agent.start)  # not until it answers: a waiting job may kill it before

    def alive(self) -> list[int]:
        """Return the services whose processes run; `harass` restarts one that killed itself at its next turn."""
        return [n for n, process in enumerate(self.services) if process is not None and process.returncode is None]

    async def kill_service(self, number: int) -> None:
        process = self.services[number]
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    async def stop(self) -> None:
        for number in range(len(self.services)):
            await self.kill_service(number)
        for server in self.servers.values():
            server.stop()


@dataclass
class Seen:
    """What the client received, and when."""

    results: Counter[str] = field(default_factory=Counter)
    states: dict[str, str] = field(default_factory=dict)
    submitted_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    all_seen: asyncio.Event = field(default_factory=asyncio.Event)
    may_come: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """One count per batch that may be submitted."""


def client(world: World, number: int = 0) -> AsyncRolloutClient:
    return AsyncRolloutClient(f"http://127.0.0.1:{world.ports[number]}", TOKEN, patience_s=SETTLE_S)


async def submit(world: World, seen: Seen, jobs: int) -> None:
    async def batch(to: AsyncRolloutClient, numbers: list[int]) -> None:
        await to.submit([job(number, jobs) for number in numbers])
        for number in numbers:
            seen.submitted_at.setdefault(f"job-{number}", time.monotonic())

    async with contextlib.AsyncExitStack() as undo:
        clients = [await undo.enter_async_context(client(world, n)) for n in range(world.pipelines)]
        for start in range(0, jobs, BATCH):
            await seen.may_come.acquire()
            numbers = list(range(start, min(start + BATCH, jobs)))
            await batch(clients[start // BATCH % len(clients)], numbers)
            if doomed := [f"job-{number}" for number in numbers if kind_of(number, jobs) == "cancel"]:
                await clients[start // BATCH % len(clients)].cancel(job_ids=doomed)
            twice = [number for number in numbers if number % 20 == 3]
            await batch(clients[(start // BATCH + 1) % len(clients)], twice)


async def follow(world: World, seen: Seen, jobs: int) -> None:
    async with client(world) as reader:
        async for view in reader.results(run="campaign"):
            seen.results[view.job_id] += 1
            seen.states[view.job_id] = view.state
            seen.ended_at[view.job_id] = time.monotonic()
            if len(seen.results) == jobs + len(PROVOKED):
                seen.all_seen.set()


async def harass(world: World, seen: Seen, jobs: int, kills: int) -> dict[str, int]:
    """Kill the services at every kind of write, then at random moments; return which writes killed a service."""
    chance = random.Random(SEED)
    batches = math.ceil(jobs / BATCH)
    batches_per_kill = max(1, batches // (len(BOUNDARIES) + kills))
    died: dict[str, int] = {}
    for number, boundary in enumerate(BOUNDARIES):
        victim = number // 2 % world.pipelines  # the same before a write and after it, so that it finds what it left
        other_services = [other for other in world.alive() if other != victim]
        for other in other_services:  # so that the victim makes the write
            # every running service ends overdue jobs, even a drained one
            await (world.kill_service(other) if "overdue" in boundary else drain(world, other))
        if boundary == "release before":
            await hold_a_job(world, seen, jobs, boundary, victim)
        await world.kill_service(victim)
        release(seen, batches_per_kill)
        await world.start_service(victim, kill=boundary)
        process = world.services[victim]
        assert process is not None
        provoking = asyncio.create_task(provoke(world, seen, jobs, boundary, victim))
        try:
            async with asyncio.timeout(BOUNDARY_S):
                await process.wait()
            died[boundary] = 1
        except TimeoutError:
            died[boundary] = 0  # nothing of this kind was written
        if not provoking.done():  # it retries until a service answers, and may drain that service
            await world.kill_service(victim)
            await world.start_service(victim)
        await provoking
        for other in other_services:
            await (world.start_service(other) if "overdue" in boundary else drain(world, other, resume=True))
        if boundary.endswith("after") and world.pipelines > 1:
            await world.kill_service(victim)
            await world.start_service(victim)
    for number in range(kills):
        victim = number % world.pipelines
        await world.kill_service(victim)
        release(seen, batches_per_kill)
        await world.start_service(victim)
        if number // world.pipelines % 2:  # else the next kill may come before it has started
            async with client(world, victim) as service:
                await service.status()
        await asyncio.sleep(chance.uniform(1.0, 3.0))
    release(seen, batches)
    for number in range(world.pipelines):
        await world.kill_service(number)
        await world.start_service(number)
    return died


async def drain(world: World, number: int, *, resume: bool = False) -> None:
    async with client(world, number) as service:
        await service.drain(resume=resume)


async def provoke(world: World, seen: Seen, jobs: int, boundary: str, victim: int) -> None:
    """Make a service reach a write that needs a job of a certain kind: one that fails, one that is cancelled, or one
    whose deadline passes while nothing is claimed."""
    if boundary not in PROVOKED:
        return
    number = jobs + PROVOKED.index(boundary)
    kind = kind_of(number, jobs)
    if kind in ("cancel", "claim_overdue"):
        await drain(world, victim)
    async with client(world, victim) as service:
        await service.submit([job(number, jobs)])
        seen.submitted_at.setdefault(f"job-{number}", time.monotonic())
        if kind == "cancel":
            await service.cancel(job_ids=[f"job-{number}"])


async def hold_a_job(world: World, seen: Seen, jobs: int, boundary: str, victim: int) -> None:
    """Wait until the service works on a job that hangs, which the service has to release at its next start."""
    if victim not in world.alive():
        await world.start_service(victim)
    await provoke(world, seen, jobs, boundary, victim)
    name = f"job-{jobs + PROVOKED.index(boundary)}"
    async with client(world, victim) as service:
        while (await service.job(name)).state == "queued":  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)


def release(seen: Seen, batches: int) -> None:
    for _ in range(batches):
        seen.may_come.release()


async def run_case(name: str, store: str, pipelines: int, jobs: int, kills: int, directory: Path) -> dict[str, Any]:
    world, seen = World(directory, store, pipelines, jobs), Seen()
    started = time.monotonic()
    tasks: list[asyncio.Task[Any]] = []
    try:
        await asyncio.to_thread(world.start_servers)
        for number in range(pipelines):
            await world.start_service(number)
        tasks.append(asyncio.create_task(world.keep_agent_alive()))
        following = asyncio.create_task(follow(world, seen, jobs))
        tasks.append(following)
        submitting = asyncio.create_task(submit(world, seen, jobs))
        tasks.append(submitting)
        died = await harass(world, seen, jobs, kills)
        await submitting
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await asyncio.wait(
                    {following, asyncio.ensure_future(seen.all_seen.wait())}, return_when="FIRST_COMPLETED"
                )
        await asyncio.sleep(2.0)  # for results that should not come
        for task in tasks:
            if task.done():
                task.result()
        async with client(world) as reader:
            recorded = [view async for view in reader.results(run="campaign", follow=False)]
            listed = {view.job_id: view.state async for view in reader.jobs(run="campaign")}
            status = await reader.status()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await world.stop()
    expected = {"works": "done", "kills": "done", "cancel": "cancelled"}
    total = jobs + len(PROVOKED)
    wrong = [n for n in range(total) if listed.get(f"job-{n}") != expected.get(kind_of(n, jobs), "failed")]
    late = [
        name
        for name, ended in seen.ended_at.items()
        if kind_of(int(name[4:]), jobs) == "hangs" and ended - seen.submitted_at[name] > DEADLINE_S + ALLOWANCE_S
    ]
    return {
        "case": name,
        "jobs": total,
        "seconds": round(time.monotonic() - started, 1),
        "service_kills": sum(died.values()) + kills,
        "boundaries": {boundary: bool(count) for boundary, count in died.items()},
        "server_kills": world.server_kills,
        "recorded_results": len(recorded),
        "lost": total - len({view.job_id for view in recorded}),
        "doubled": len(recorded) - len({view.job_id for view in recorded}),
        "missed_by_the_reader": total - len(seen.results),
        "told_twice": sum(count > 1 for count in seen.results.values()),
        "ended_otherwise": len(wrong),
        "otherwise": [(n, kind_of(n, jobs), listed.get(f"job-{n}")) for n in wrong[:10]],
        "late": len(late),
        "unfinished": sum(status["jobs"][state] for state in ("queued", "claimed")),
        "most_attempts": max(view.attempt for view in recorded) if recorded else 0,
    }


@contextlib.contextmanager
def database(kind: str, directory: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield str(directory / "jobs.sqlite")
    else:
        with running_postgres() as server:
            yield server.new_database()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the report")
    parser.add_argument("--store", nargs="+", default=["sqlite", "postgresql"], choices=["sqlite", "postgresql"])
    parser.add_argument("--pipelines", nargs="+", type=int, default=[1, 2], help="2 with PostgreSQL only")
    parser.add_argument(
        "--ray", action="store_true", help="on two Ray nodes instead (campaigns.faults.pipeline_on_ray)"
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    chosen = parser.parse_args(arguments)
    if chosen.ray:
        subprocess.run([ROOT / "scripts" / "install-trainers", "ray"], check=True)
        python = str(ROOT / ".trainers" / "ray" / "bin" / "python")
        argv = ["-m", "campaigns.faults.pipeline_on_ray", f"--jobs={chosen.jobs}", *(["--json"] * chosen.json)]
        return subprocess.run([python, *argv], cwd=ROOT, check=False).returncode
    cases = []
    for store in chosen.store:
        for pipelines in chosen.pipelines:
            if store == "sqlite" and pipelines > 1:
                continue
            name = f"{store}, {pipelines} pipeline{'s' * (pipelines > 1)}"
            with tempfile.TemporaryDirectory(prefix="pipeline-") as directory, database(store, Path(directory)) as url:
                case = run_case(name, url, pipelines, chosen.jobs, chosen.kills, Path(directory))
                cases.append(asyncio.run(case))
                if not chosen.json:
                    print(json.dumps(cases[-1]), file=sys.stderr)
    zero = ("lost", "doubled", "missed_by_the_reader", "told_twice", "ended_otherwise", "late", "unfinished")
    bars = [
        Bar(f"{case['case']}: killed at {name.replace('_', ' ').strip()}", float(met), "times", "= 1", met)
        for case in cases
        for name, met in case["boundaries"].items()
    ]
    bars += [
        Bar(f"{case['case']}: {name.replace('_', ' ')}", case[name], "jobs", "= 0", case[name] == 0)
        for case in cases
        for name in zero
    ]
    return print_report({"cases": cases}, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
