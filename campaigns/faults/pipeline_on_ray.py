"""Check that each job ends exactly once on two Ray nodes with one PostgreSQL store, while services and a node die.

    .trainers/ray/bin/python -m campaigns.faults.pipeline_on_ray --json [--jobs 1000] [--kills 10]

``scripts/install-trainers ray`` makes that environment. Of the jobs 1 % kill their agent server, 1 % hang until their
deadline, and 5 % are submitted twice, to the other service. The services get ``kill -9`` in turn at random moments and
are started again by the command that placed them; in the middle everything on the second node dies at once. The
campaign runs in a network namespace, since Ray listens on every interface. Prints one JSON object last: ``figures``
and ``bars``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.compat.isolated import leave_network
from nemo_gym.service.client import ADDRESS_FILE, AsyncRolloutClient
from resources_servers.sandbox.tests.postgres import running_postgres
from tests.stack.on_ray.cluster import Nodes, two_nodes, until
from tests.stack.stacks import ADDER_APP, GROUPS, Stack, ng_run, write_root

DEADLINE_S = 30.0
SETTLE_S = 300.0
BATCH = 20
SEED = 13
UNRULY = """        prompt = str(body.input)
        await asyncio.sleep(0.2)
        if "hang" in prompt:
            await asyncio.sleep(3600)
        if "kill" in prompt and not Path("{marks}", prompt.split()[-1]).exists():
            Path("{marks}", prompt.split()[-1]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
IMPORTS = "import asyncio\nimport os\nimport signal\nfrom pathlib import Path\n\n"


def kind_of(number: int) -> str:
    return {41: "hang", 73: "kill"}.get(number % 100, "work")


def job(number: int) -> dict[str, Any]:
    prompt = {"input": f"What is {number} + {number + 1}? {kind_of(number)} {number}"}
    if kind_of(number) == "work":
        prompt = {"input": f"What is {number} + {number + 1}?"}
    row = {"responses_create_params": prompt, "expected": str(2 * number + 1), "id": f"sum-{number}"}
    fields: dict[str, Any] = {"job_id": f"job-{number}", "row": row, "task_index": number, "run_id": "campaign"}
    return {**fields, "deadline_s": DEADLINE_S} if kind_of(number) == "hang" else fields


def unruly_root(root: Path) -> Path:
    """Write the plugins of the stack's tests, with an agent that hangs or dies if its prompt says so."""
    write_root(root)
    (root / "marks").mkdir()
    source = ADDER_APP.replace("from fastapi import Request\n", IMPORTS + "from fastapi import Request\n")
    begin = "        reply = await self.server_client.post("
    app = root / "responses_api_agents/adder/app.py"
    app.write_text(source.replace(begin, UNRULY.format(marks=root / "marks") + begin))
    return root


class Run:
    """Two services, the killing of them, and what a client received."""

    def __init__(self, nodes: Nodes, stack: Stack, jobs: int, kills: int) -> None:
        self._nodes, self._jobs, self._kills = nodes, jobs, kills
        self._urls = stack.stdout.split("are served at ")[1].split(";")[0].split(" and ")
        self._token = json.loads((stack.run_dir / ADDRESS_FILE).read_text())["tokens"]["operate"]
        self._chance = random.Random(SEED)
        self.service_kills = 0

    def client(self, number: int) -> AsyncRolloutClient:
        return AsyncRolloutClient(self._urls[number], self._token, patience_s=SETTLE_S)

    def kill_service(self, number: int) -> None:
        """Kill the process that listens at the service's port."""
        port = int(self._urls[number].rpartition(":")[2])
        for connection in psutil.net_connections("tcp4"):
            is_there = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if is_there and connection.pid:
                os.kill(connection.pid, 9)
                self.service_kills += 1
                return

    async def go(self) -> dict[str, Any]:
        begun = time.monotonic()
        harassing = asyncio.create_task(self._harass())
        async with self.client(0) as first:
            for start in range(0, self._jobs, BATCH):
                numbers = range(start, min(start + BATCH, self._jobs))
                await first.submit([job(number) for number in numbers])
                await first.submit([job(number) for number in numbers if number % 20 == 3])
                await asyncio.sleep(0.1)
            await harassing
            async with asyncio.timeout(SETTLE_S):
                await first.wait(run="campaign")
            recorded = [view async for view in first.results(run="campaign", follow=False)]
            status = await first.status()
        expected = {f"job-{n}": "failed" if kind_of(n) == "hang" else "done" for n in range(self._jobs)}
        results_by_job = Counter(view.job_id for view in recorded)
        return {
            "jobs": self._jobs,
            "seconds": round(time.monotonic() - begun, 1),
            "service_kills": self.service_kills,
            "node_kills": 1,
            "attempted_again": sum(view.attempt > 1 for view in recorded),
            "lost": self._jobs - len(results_by_job),
            "doubled": len(recorded) - len(results_by_job),
            "ended_otherwise": sum(expected[view.job_id] != view.state for view in recorded),
            "unfinished": sum(status["jobs"][state] for state in ("queued", "claimed")),
        }

    async def _harass(self) -> None:
        for number in range(self._kills):
            await asyncio.sleep(self._chance.uniform(2.0, 5.0))
            both = number < self._kills // 2
            self.kill_service(number % 2 if both else 0)
            if number == self._kills // 2 - 1:
                await asyncio.sleep(self._chance.uniform(2.0, 5.0))
                await asyncio.to_thread(self._nodes.kill, 1)


def campaign(jobs: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="on-ray-") as place, running_postgres() as database, two_nodes() as nodes:
        root = unruly_root(Path(place))
        keys = ["+serve.concurrency=16", "+serve.lease_s=8", "+serve.watch_s=0.5", "+serve.silent_s=4"]
        keys += [f"+serve.store={database.new_database()}", "++ray.pipelines=2", "max_restarts=1000"]
        arguments = (*GROUPS, "dispatch=ray", f"++ray.address={nodes.address}", *keys)
        with ng_run(root, *arguments) as stack:
            ended = stack.process.poll
            until(lambda: "are served at" in stack.stdout or ended() is not None, "the services")
            assert ended() is None, stack.stderr
            return asyncio.run(Run(nodes, stack, jobs, kills).go())


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    chosen = parser.parse_args()
    if not leave_network():
        raise SystemExit("Ray listens on every interface: this needs a network namespace, so root or user namespaces")
    case = campaign(chosen.jobs, chosen.kills)
    zero = ("lost", "doubled", "ended_otherwise", "unfinished")
    bars = [
        Bar(f"two Ray nodes: {name.replace('_', ' ')}", case[name], "jobs", "= 0", case[name] == 0) for name in zero
    ]
    return print_report({"case": case}, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
