"""``num_workers``: one server instance as several processes, which share its rollouts and stand in one pool."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nemo_gym.service.client import ADDRESS_FILE, RolloutClient
from tests.stack.stacks import GROUPS, command, ng_run, until

WORKERS = ("adder.responses_api_agents.adder.num_workers=2", "sums.resources_servers.sums.num_workers=2")


def job(number: int) -> dict[str, object]:
    prompt = {"input": f"What is {number} + {number + 1}?"}
    row = {"responses_create_params": prompt, "expected": str(2 * number + 1), "id": f"sum-{number}"}
    return {"job_id": f"job-{number}", "row": row, "task_index": number}


def test_workers_share_the_rollouts_and_one_that_dies_costs_none(root: Path) -> None:
    with ng_run(root, *GROUPS, *WORKERS, "+serve.port=0", "+serve.concurrency=8") as stack:
        until((stack.run_dir / ADDRESS_FILE).exists, "the service")
        servers = stack.entry["servers"]
        assert [server["instance"] for server in servers].count("sums") == 2
        assert len({server["url"] for server in servers}) == len({server["pid"] for server in servers}) == 5
        assert stack.log("sums") and stack.log("sums.1")
        with RolloutClient(run_dir=stack.run_dir) as client:
            client.submit([job(number) for number in range(40)])
            assert client.wait() == {"done": 40}
            assert {view.reward for view in client.results(follow=False)} == {1.0}
            done = {each["server_id"]: each["done"] for each in client.status()["servers"]}
            assert done.keys() >= {"adder.0", "adder.1", "sums.0", "sums.1"}
            assert all(done[name] >= 10 for name in ("adder.0", "adder.1", "sums.0", "sums.1")), done
            pid = stack.server("sums")["pid"]
            os.kill(pid, signal.SIGKILL)
            client.submit([job(number) for number in range(40, 80)])
            assert client.wait() == {"done": 80}
            until(lambda: stack.server("sums")["pid"] not in (pid, None), "the restart")
        shown = command(root, "collect_rollouts:main_status", f"run_dir={stack.run_dir}").stdout
        assert sum(line.split()[:1] == ["sums"] for line in shown.splitlines()) == 2, shown
