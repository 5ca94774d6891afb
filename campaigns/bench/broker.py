#!/usr/bin/env python3
"""Measure what a broker adds to its provider: for commands and output, idle leases, a storm of creates, and reclaim.

    python -m campaigns.bench.broker --json [--rounds 200] [--leases 1000] [--storm 500] [--only latency ...]

The backend is the local provider, the registry SQLite. The broker is a separate process, its client is the `remote`
provider in this process; both sides are measured in turns. Prints figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from nemo_gym.broker.backend import BROKER_LABEL
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import ExecOutput, ExecRequest, SandboxHandle, SandboxProvider
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider
from resources_servers.sandbox.tests.api import Api, LentBox, calling
from resources_servers.sandbox.tests.broker_process import ROOT, BrokerProcess

AT_ONCE = 64
STREAM_BYTES = 400_000_000
OUTPUT_LIMIT = 2**31
LEASE_S = 5.0
"""The lease of boxes whose owner is killed."""
EXPIRY_S = 2.0
"""Time after the lease for the broker's next check and the removal itself."""
Part = Callable[["Bench"], Awaitable[tuple[dict[str, Any], list[Bar]]]]


class Bench:
    """A broker, a client of it, and its backend without the broker."""

    def __init__(self, broker: BrokerProcess, direct: SandboxProvider, options: Any) -> None:
        self.broker, self.direct, self.options = broker, direct, options
        self.remote = create_provider(broker.remote())

    def sides(self, turn: int) -> list[tuple[str, SandboxProvider]]:
        """Return both providers, in alternating order."""
        both: list[tuple[str, SandboxProvider]] = [("direct", self.direct), ("broker", self.remote)]
        return both if turn % 2 else both[::-1]

    async def backend_ids(self) -> set[str]:
        """Return the backend's ids of the broker's boxes."""
        identity = self.broker.config["sandbox_broker"]["resources_servers"]["sandbox"]["identity"]
        return {info.sandbox_id for info in await self.direct.list({BROKER_LABEL: identity})}

    async def gone(self, ids: set[str], since: float, within_s: float = 60.0) -> float:
        """Return the seconds from ``since`` until the backend has none of these boxes, at most ``within_s``."""
        while ids & await self.backend_ids():
            if time.monotonic() - since > within_s:
                return within_s
            await asyncio.sleep(0.002)
        return time.monotonic() - since

    def resident_bytes(self) -> int:
        assert self.broker.process is not None
        lines = Path(f"/proc/{self.broker.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024

    def cpu_s(self) -> float:
        assert self.broker.process is not None
        fields = Path(f"/proc/{self.broker.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def bench(options: Any, **settings: Any) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="bench-broker-") as folder:
        backend = {"local": {"state_dir": f"{folder}/boxes", "linger_s": 2}}
        broker = BrokerProcess(
            Path(folder) / "state",
            backend,
            identity=f"bench-{os.getpid()}",
            **{"on_stop": "destroy", "max_output_bytes": OUTPUT_LIMIT, **settings},
        )
        direct = create_provider(backend)
        try:
            await asyncio.to_thread(broker.start)
            made = Bench(broker, direct, options)
            yield made
            await made.remote.aclose()
        finally:
            await asyncio.to_thread(broker.close)
            await direct.aclose()
            await asyncio.sleep(3)  # until the supervisor has exited


async def timed_exec(provider: SandboxProvider, box: SandboxHandle) -> float:
    """Return the milliseconds of one command that does nothing."""
    start = time.perf_counter()
    result = await provider.exec(box, ["true"])
    took = (time.perf_counter() - start) * 1000
    assert result.ok, result
    return took


async def latency(here: Bench) -> tuple[dict[str, Any], list[Bar]]:
    boxes = {side: await provider.create(SandboxSpec(ttl_s=1200)) for side, provider in here.sides(0)}
    took: dict[str, list[float]] = {"direct": [], "broker": []}
    for turn in range(here.options.rounds + 10):
        for side, provider in here.sides(turn):
            milliseconds = await timed_exec(provider, boxes[side])
            if turn >= 10:  # connections are open, programs in memory
                took[side].append(milliseconds)
    many: dict[str, list[float]] = {"direct": [], "broker": []}
    walls: dict[str, list[float]] = {"direct": [], "broker": []}
    before = here.cpu_s()
    rounds = max(3, here.options.rounds // 20)
    for turn in range(rounds):
        for side, provider in here.sides(turn):
            start = time.perf_counter()
            many[side] += await asyncio.gather(*(timed_exec(provider, boxes[side]) for _ in range(AT_ONCE)))
            walls[side].append((time.perf_counter() - start) * 1000)
    cpu_ms = (here.cpu_s() - before) * 1000 / (rounds * AT_ONCE)
    for side, provider in here.sides(0):
        await provider.close(boxes[side])
    added = statistics.median(took["broker"]) - statistics.median(took["direct"])
    ratio = statistics.median(many["broker"]) / statistics.median(many["direct"])
    figures = {
        "exec_ms": {side: Samples(values).summary() for side, values in took.items()},
        f"exec_{AT_ONCE}_at_once_ms": {side: Samples(values).summary() for side, values in many.items()},
        f"exec_{AT_ONCE}_at_once_wall_ms": {side: Samples(values).summary() for side, values in walls.items()},
        "broker_cpu_ms_per_exec": round(cpu_ms, 3),
    }
    return figures, [
        Bar.at_most("exec through the broker, added at p50, idle", added, 3, "ms"),
        Bar.at_most(f"exec through the broker / direct at p50, {AT_ONCE} at once", ratio, 1.5, "x"),
    ]


async def throughput(here: Bench) -> tuple[dict[str, Any], list[Bar]]:
    rates: dict[str, list[float]] = {"direct": [], "broker": []}
    boxes = {side: await provider.create(SandboxSpec(ttl_s=1200)) for side, provider in here.sides(0)}
    request = ExecRequest(["head", "-c", str(STREAM_BYTES), "/dev/zero"], max_output_bytes=OUTPUT_LIMIT)
    for turn in range(4):
        for side, provider in here.sides(turn):
            start, received = time.perf_counter(), 0
            process = await provider.start_exec(boxes[side], request)
            async for event in process.events():
                if isinstance(event, ExecOutput):
                    received += len(event.data)
            assert received == STREAM_BYTES, received
            rates[side].append(received / (time.perf_counter() - start) / 1e6)
    for side, provider in here.sides(0):
        await provider.close(boxes[side])
    rate = statistics.median(rates["broker"])
    ratio = rate / statistics.median(rates["direct"])
    figures = {"stream_mb_per_s": {side: Samples(values).summary() for side, values in rates.items()}}
    bar = Bar(
        "stream through the broker", round(rate, 1), "MB/s", ">= 100, or half of direct", rate >= 100 or ratio >= 0.5
    )
    return {**figures, "stream_ratio": round(ratio, 3)}, [bar]


async def leases(here: Bench) -> tuple[dict[str, Any], list[Bar]]:
    count = here.options.leases
    async with calling(here.broker) as api:
        first = [await api.box(ttl_s=3000) for _ in range(5)]  # the first boxes also cost what the program loads once
        before = here.resident_bytes()
        room = asyncio.Semaphore(16)

        async def make() -> LentBox:
            async with room:
                return await api.box(ttl_s=3000)

        start = time.perf_counter()
        boxes = [*await asyncio.gather(*(make() for _ in range(count)))]
        made_s = time.perf_counter() - start
        await asyncio.sleep(2)
        memory = (here.resident_bytes() - before) / count
        idle_before = here.cpu_s()
        await asyncio.sleep(10)
        idle = (here.cpu_s() - idle_before) / 10
        took: list[float] = []

        async def renew(box: LentBox) -> None:
            async with room:
                start = time.perf_counter()
                answer = await box.ask("PUT", "/lease", json={"ttl_s": 3000})
                took.append((time.perf_counter() - start) * 1000)
                assert answer.status == 200, answer.body

        cpu, start = here.cpu_s(), time.perf_counter()
        await asyncio.gather(*(renew(box) for box in boxes))
        wall, cpu = time.perf_counter() - start, here.cpu_s() - cpu
        reap = await asyncio.gather(*(box.ask("DELETE") for box in [*first, *boxes]))
        destroyed = Counter(answer.status for answer in reap)
    figures = {
        "leases": count,
        "memory_per_lease_kib": round(memory / 1024, 2),
        "idle_cpu_percent": round(idle * 100, 2),
        "create_s": round(made_s, 1),
        "renew_ms": Samples(took).summary(),
        "renew_cpu_ms": round(cpu * 1000 / count, 3),
        "renewals_per_s": round(count / wall),
        "destroyed": dict(destroyed),
    }
    left = len(await here.backend_ids())
    return figures, [Bar.at_most(f"{count} leases: boxes left after each was closed", left, 0)]


async def storm(here: Bench) -> tuple[dict[str, Any], list[Bar]]:
    """Let one owner request three fifths of all boxes before four others request a tenth each."""
    total, bound = here.options.storm, here.options.max_boxes
    served: list[str] = []
    waits: dict[str, list[float]] = {}
    refused: Counter[str] = Counter()
    most = 0

    async def create_box(api: Api, owner: str) -> None:
        nonlocal most
        start = time.monotonic()
        answer = await api.create(labels={"owner": owner})
        if answer.status != 201:
            refused[answer.json["code"]] += 1
            return
        served.append(owner)
        waits.setdefault("greedy" if owner == "greedy" else "modest", []).append(time.monotonic() - start)
        most = max(most, len(await here.backend_ids())) if len(served) % 10 == 0 else most
        gone = await api.call("DELETE", answer.headers["Location"])
        assert gone.status == 204, gone.body

    names = ["greedy", *(f"modest-{number}" for number in range(4))]
    async with asyncio.TaskGroup() as group, _callers(here.broker, names) as callers:
        start = time.monotonic()
        counts = {name: total * 3 // 5 if name == "greedy" else total // 10 for name in names}
        requests = []
        for name in names:
            requests += [group.create_task(create_box(callers[name], name)) for _ in range(counts[name])]
            if name == "greedy":
                await asyncio.sleep(0.3)
        await asyncio.gather(*requests)
        wall = time.monotonic() - start
    last_modest = max((place for place, owner in enumerate(served, 1) if owner != "greedy"), default=0)
    # If owners take turns, all get the same number of boxes until the modest owners have all of theirs.
    fair = 5 * (total // 10)
    figures = {
        "storm": total,
        "max_boxes": bound,
        "storm_s": round(wall, 1),
        "most_boxes_at_once": most,
        "refused": dict(refused),
        "last_modest_served_as": last_modest,
        "wait_s": {name: Samples(values).summary() for name, values in waits.items()},
    }
    return figures, [
        Bar.at_most(f"storm of {total}: creates that got no box", total - len(served), 0),
        Bar.at_most(f"storm of {total}: boxes at once", most, bound),
        Bar.at_most(f"storm of {total}: place of the last modest owner's box", last_modest, fair + bound),
    ]


@asynccontextmanager
async def _callers(broker: BrokerProcess, names: list[str]) -> AsyncIterator[dict[str, Api]]:
    import contextlib

    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(calling(broker, name, Role.ENVIRONMENT)) for name in names}


async def reclaim(here: Bench) -> tuple[dict[str, Any], list[Bar]]:
    took = []
    for number in range(here.options.cancels):
        box = await AsyncSandbox(here.remote, SandboxSpec(ttl_s=600)).start()
        ids = await here.backend_ids()

        async def attempt(box: AsyncSandbox = box) -> None:
            async with box:
                await box.exec("sleep 600 & sleep 600")

        working = asyncio.create_task(attempt())
        await asyncio.sleep(0.02 * (number % 3))
        since = time.monotonic()
        working.cancel()
        took.append(await here.gone(ids, since))
        await asyncio.wait({working})
    ordered = sorted(took)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    killed = [await _killed_owner(here) for _ in range(here.options.kills)]
    figures = {
        "cancel_to_gone_ms": {**Samples([one * 1000 for one in took]).summary(), "p99": round(p99 * 1000, 2)},
        "killed_owner_to_gone_s": Samples(killed).summary(),
        "lease_s": LEASE_S,
    }
    return figures, [
        Bar.at_most("cancel → box gone, p99", p99, 5, "s"),
        Bar.at_most("owner killed → its boxes gone", max(killed), LEASE_S + EXPIRY_S, "s"),
    ]


HOLDER = """
import asyncio, json, sys
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.facade import create_provider
config, count, lease_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

async def main():
    provider = create_provider(config)
    boxes = await asyncio.gather(*(provider.create(SandboxSpec(ttl_s=lease_s)) for _ in range(count)))
    while True:
        await asyncio.gather(*(provider.renew(box, lease_s) for box in boxes))
        print("renewed", flush=True)
        await asyncio.sleep(lease_s / 4)

asyncio.run(main())
"""


async def _killed_owner(here: Bench) -> float:
    """Return the seconds from the death of a process that keeps renewing ten boxes to the end of the last box."""
    arguments = [json.dumps(here.broker.remote()), "10", str(LEASE_S)]
    owner = subprocess.Popen(  # noqa: ASYNC220 - a real process, to be killed
        [sys.executable, "-c", HOLDER, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    for _ in range(6):  # longer than one lease: without renewals the boxes would be gone
        await asyncio.to_thread(owner.stdout.readline)
    ids = await here.backend_ids()
    assert len(ids) == 10, ids
    owner.kill()
    since = time.monotonic()
    owner.wait()
    return await here.gone(ids, since)


PARTS: dict[str, tuple[Part, dict[str, Any]]] = {
    "latency": (latency, {}),
    "throughput": (throughput, {}),
    "leases": (leases, {}),
    "storm": (storm, {}),
    "reclaim": (reclaim, {}),
}


async def measure(options: Any) -> tuple[dict[str, Any], list[Bar]]:
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for name, (part, settings) in PARTS.items():
        if options.only and name not in options.only:
            continue
        if name == "storm":
            settings = {"max_boxes": options.max_boxes, "queue_timeout_s": 600}
        async with bench(options, **settings) as here:
            new_figures, new_bars = await part(here)
        figures |= new_figures
        bars += new_bars
    return figures, bars


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200, help="commands one after another, on each side")
    parser.add_argument("--leases", type=int, default=1000)
    parser.add_argument("--storm", type=int, default=500, help="creates at once")
    parser.add_argument("--max-boxes", type=int, default=50)
    parser.add_argument("--cancels", type=int, default=100)
    parser.add_argument("--kills", type=int, default=3, help="of an owner")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], help="some of the parts")
    options = parser.parse_args(arguments)
    figures, bars = asyncio.run(measure(options))
    return print_report(figures, bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
