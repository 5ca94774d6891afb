"""A composition on two real Ray nodes: the same rollouts, also when a node is lost, and no CPU held by what waits.

In an environment of its own (`scripts/install-trainers ray`) and a network of its own; see `tests.stack.test_on_ray`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.service.client import ADDRESS_FILE, RolloutClient
from resources_servers.sandbox.tests.postgres import running_postgres
from tests.stack.on_ray.cluster import ADDRESSES, Nodes, running_head, two_nodes, until
from tests.stack.stacks import CALCULATOR_APP, GROUPS, environment, ng_run, write_root, write_rows

SLOWLY = CALCULATOR_APP.replace("import re\n", "import asyncio\nimport re\n").replace(
    "        total =", "        await asyncio.sleep(0.4)\n        total ="
)


@pytest.fixture
def cluster() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = write_root(tmp_path)
    (made / "responses_api_models/calculator/app.py").write_text(SLOWLY)
    return made


def on(nodes: Nodes) -> tuple[str, ...]:
    return (*GROUPS, "dispatch=ray", f"++ray.address={nodes.address}")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def free_cpus(address: str) -> float:
    """As a process that is no part of the run sees it."""
    code = (
        f"import ray; ray.init(address={address!r}, log_to_driver=False); print(ray.available_resources().get('CPU'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return float(said.stdout.split()[-1])


def test_rollouts_run_on_both_nodes_and_hold_no_cpu(cluster: Nodes, root: Path) -> None:
    write_rows(root / "in.jsonl", 120)
    with ng_run(root, *on(cluster), "input=in.jsonl", "output=out.jsonl", "concurrency=8") as stack:
        until(lambda: len(rows_of(root / "out.jsonl")) > 10, "the first rollouts")
        assert free_cpus(cluster.address) == 2.0
        assert stack.wait_end() == 0, stack.stderr
    rows = rows_of(root / "out.jsonl")
    assert len(rows) == 120 and {row["reward"] for row in rows} == {1.0}
    assert Counter(row["replicas"]["adder"] for row in rows).keys() == {0, 1}
    assert len(list((stack.run_dir / "nodes").iterdir())) == 2


def test_rollouts_of_a_lost_node_are_run_by_the_other(cluster: Nodes, root: Path) -> None:
    write_rows(root / "in.jsonl", 120)
    with ng_run(root, *on(cluster), "input=in.jsonl", "output=out.jsonl", "concurrency=16") as stack:
        until(lambda: len(rows_of(root / "out.jsonl")) > 20, "the first rollouts")
        cluster.kill(1)
        assert stack.wait_end() == 0, stack.stderr
        assert f"({ADDRESSES[1]}) is lost; its jobs go to others" in stack.stderr
    rows = rows_of(root / "out.jsonl")
    assert len({row["_ng_rollout_id"] for row in rows}) == len(rows) == 120
    assert {row["reward"] for row in rows} == {1.0}
    assert max(row["_ng_attempt_index"] for row in rows) > 0


def test_services_on_nodes_share_a_store_and_one_survives_the_loss_of_the_other(cluster: Nodes, root: Path) -> None:
    def job(number: int) -> dict[str, Any]:
        prompt = {"input": f"What is {number} + {number + 1}?"}
        row = {"responses_create_params": prompt, "expected": str(2 * number + 1), "id": f"sum-{number}"}
        return {"job_id": f"job-{number}", "row": row, "task_index": number, "run_id": "r"}

    keys = ["+serve.concurrency=8", "+serve.lease_s=6", "+serve.watch_s=0.5", "+serve.silent_s=3"]
    with running_postgres() as database:
        keys += [f"+serve.store={database.new_database()}", "++ray.pipelines=2"]
        with ng_run(root, *on(cluster), *keys) as stack:
            until(lambda: "are served at" in stack.stdout or stack.process.poll() is not None, "the services")
            assert "are served at" in stack.stdout, stack.stderr
            urls = stack.stdout.split("are served at ")[1].split(";")[0].split(" and ")
            token = json.loads((stack.run_dir / ADDRESS_FILE).read_text())["tokens"]["operate"]
            with RolloutClient(urls[0], token) as first:
                with RolloutClient(urls[1], token) as second:
                    assert first.submit([job(n) for n in range(100)]).accepted == 100
                    assert second.submit([job(n) for n in range(100)]).known == 100
                    until(lambda: sum(1 for _ in second.results(follow=False)) > 10, "the first results")
                    done = [sum(each["done"] for each in one.status()["servers"]) for one in (first, second)]
                    assert min(done) > 0
                cluster.kill(1)
                assert first.wait(run="r") == {"done": 100}
                told = Counter(view.job_id for view in first.results(run="r", follow=False))
                assert len(told) == 100 and set(told.values()) == {1}


def test_command_that_finds_no_cluster_names_the_key(root: Path) -> None:
    words = [*GROUPS, "dispatch=ray", "++ray.address=127.0.0.1:1"]
    code = "from nemo_gym.cli.run import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env=environment(root),
        check=False,
    )
    assert ended.returncode == 2 and "ray.address: no cluster answers at '127.0.0.1:1'" in ended.stderr


def test_cluster_that_wants_a_token_is_joined_with_it_and_otherwise_the_command_says_how(root: Path) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    words = [*GROUPS, "dispatch=ray", f"++ray.address={ADDRESSES[0]}:6399", "input=in.jsonl", "output=out.jsonl"]
    write_rows(root / "in.jsonl", 2)
    with running_head(ADDRESSES[0], 6399, token):
        with ng_run(root, *words) as stack:
            assert stack.wait_end() == 2 and "set RAY_AUTH_MODE=token" in stack.stderr, stack.stderr
        with ng_run(root, *words, **token) as stack:
            assert stack.wait_end() == 0, stack.stderr
    assert [row["reward"] for row in rows_of(root / "out.jsonl")] == [1.0, 1.0]
