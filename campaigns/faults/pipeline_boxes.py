"""Check that rollouts in real local boxes leave no box, while the service that runs them is killed again and again.

    python -m campaigns.faults.pipeline_boxes --json [--each 4] [--kills 5]

mini-swe-agent with a scripted policy solves each of four example tasks ``--each`` times. The command of a fifth task
never ends: half of its jobs are cancelled and half end by their deadline. The service gets ``kill -9`` while boxes
work. Then every job must have one result, and after the leases nothing of a box may be left: no process, mount,
control group, namespace or file. Prints one JSON object last: ``figures`` and ``bars``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.bench.rollouts import suite_stack
from campaigns.faults.kills import GRACE_S, HANGING_POLICY, LEASE_S, ROWS
from campaigns.faults.leftovers import Scope, leftovers
from nemo_gym.service.client import AsyncRolloutClient
from tests.stack.stacks import until

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "boxes-" + "t" * 20
DEADLINE_S = 90.0
SETTLE_S = 420.0
SEED = 13


class Service:
    """A service in a separate process, which always has the same port and store."""

    def __init__(self, stack: Any, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        serve = {"port": port, "concurrency": 4, "agent_name": stack.chosen["agent"], "retry_delay_s": 0.1}
        arguments = {"stack": stack.config, "root_key": stack.root_key, "state_dir": str(directory), "serve": serve}
        self._argv = (sys.executable, "-m", "campaigns.faults.service_process", json.dumps(arguments))
        self._log = directory / "service.log"
        self.process: asyncio.subprocess.Process | None = None
        self.client = AsyncRolloutClient(f"http://127.0.0.1:{port}", TOKEN, patience_s=SETTLE_S)

    async def start(self) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "NEMO_GYM_SERVICE_OPERATE_TOKEN": TOKEN},
            )
        finally:
            os.close(log)

    async def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()


def policy(directory: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Write the example policy with a last task that hangs; return its path and the rows."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    script = yaml.safe_load(ROWS.with_name("scripted_policy.yaml").read_text())
    hanging = script["tasks"][-1]
    other_tasks = [task for task in script["tasks"] if task["when"]["user"] != hanging["when"]["user"]]
    script["tasks"] = [*other_tasks, {**HANGING_POLICY["tasks"][0], "name": hanging["name"], "when": hanging["when"]}]
    path = directory / "policy.yaml"
    path.write_text(yaml.safe_dump(script))
    return path, rows


def jobs_of(rows: list[dict[str, Any]], each: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Return every job with the state in which it must end."""
    jobs: dict[str, tuple[dict[str, Any], str]] = {}
    for task, row in enumerate(rows):
        for sample in range(each):
            job: dict[str, Any] = {"job_id": f"t{task}-{sample}", "run_id": "boxes", "task_index": task, "row": row}
            expected = "done"
            if task == len(rows) - 1:
                expected = "cancelled" if sample % 2 else "failed"
                job |= {"priority": 1, **({} if sample % 2 else {"deadline_s": DEADLINE_S})}
            jobs[job["job_id"]] = ({**job, "sample_index": sample}, expected)
    return jobs


async def campaign(each: int, kills: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="boxes-") as place:
        directory = Path(place)
        scope = Scope(directory / "boxes", run_id=f"boxes-{os.getpid()}")
        script, rows = policy(directory)
        arguments = (
            *("agent=mini_swe_agent", "environment=swe_bench", "sandbox=local", "model=scripted"),
            f"script={script}",
            f"++mini_swe_agent.responses_api_agents.mini_swe_agent.sandbox_lease_s={LEASE_S}",
            f"++sandbox.local.state_dir={scope.state_dir}",
        )
        jobs, chance, begun = jobs_of(rows, each), random.Random(SEED), time.monotonic()
        async with suite_stack(arguments) as stack:
            service = Service(stack, directory)
            await service.start()
            try:
                async with service.client as client:
                    await client.submit([job for job, _ in jobs.values()])
                    at_work = [await _kill_at_work(service, scope, chance) for _ in range(kills)]
                    await client.cancel(job_ids=[name for name, (_, state) in jobs.items() if state == "cancelled"])
                    async with asyncio.timeout(SETTLE_S):
                        await client.wait(run="boxes")
                    recorded = [view async for view in client.results(run="boxes", follow=False)]
            finally:
                await service.kill()
            ended = time.monotonic()
            left = await asyncio.to_thread(left_of_boxes, scope)
            clean_s = time.monotonic() - ended
    results_by_job = Counter(view.job_id for view in recorded)
    otherwise = {
        view.job_id: (view.state, view.attempt, view.reward, view.failures)
        for view in recorded
        if view.state != jobs[view.job_id][1]
    }
    unsolved = [view.job_id for view in recorded if view.state == "done" and view.reward != 1.0]
    return {
        "jobs": len(jobs),
        "seconds": round(ended - begun, 1),
        "service_kills": kills,
        "boxes_at_kills": at_work,
        "most_attempts": max(view.attempt for view in recorded),
        "lost": len(jobs) - len(results_by_job),
        "doubled": len(recorded) - len(results_by_job),
        "ended_otherwise": len(otherwise),
        "otherwise": otherwise,
        "not_solved": len(unsolved),
        "left": {kind: len(things) for kind, things in left.items()},
        "clean_after_s": None if left else round(clean_s, 1),
    }


def boxes_of(scope: Scope) -> int:
    return len(list(scope.state_dir.glob("*/boxes/*")))


def left_of_boxes(scope: Scope) -> dict[str, list[str]]:
    """Return what is left of boxes when the leases and a grace are over, or as soon as nothing is left."""
    give_up = time.monotonic() + LEASE_S + GRACE_S
    while (left := leftovers(scope)) and time.monotonic() < give_up:
        time.sleep(1.0)
    return left


async def _kill_at_work(service: Service, scope: Scope, chance: random.Random) -> int:
    """Kill the service while there are boxes, and start it again; return the number of boxes."""
    await asyncio.to_thread(until, lambda: boxes_of(scope) > 0, "a box")
    await asyncio.sleep(chance.uniform(0.5, 4.0))
    boxes = boxes_of(scope)
    await service.kill()
    await service.start()
    return boxes


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    chosen = parser.parse_args()
    case = asyncio.run(campaign(chosen.each, chosen.kills))
    zero = ("lost", "doubled", "ended_otherwise", "not_solved")
    bars = [Bar(f"in boxes: {name.replace('_', ' ')}", case[name], "jobs", "= 0", case[name] == 0) for name in zero]
    left = sum(case["left"].values())
    bars.append(Bar("left of boxes after the leases", left, "things", "= 0", left == 0))
    return print_report({"case": case}, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
