"""Pipelines, agents, environments and brokers on hosts of their own, two of each, that share a network and no file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from nemo_gym._util.files import cache_root
from nemo_gym.sandbox.providers.local.client import default_image_dir
from nemo_gym.sandbox.providers.local.images import ImageStore
from resources_servers.swe_bench.confirm.controls import default_controls_dir
from tests.acceptance.hosts.network import OWN, ROOT, Host, switched_hosts
from tests.acceptance.hosts.stack import RUN_DIR, RUN_WITHIN_S, Stack, until
from tests.acceptance.matrix.cells import rows_of
from tests.acceptance.matrix.run import prepare_agent

PIPELINES = ("pipeline-1", "pipeline-2")
ENVIRONMENTS = ("world-1", "world-2")
BROKERS = ("broker-1", "broker-2")
NAMES = (*PIPELINES, "agent-1", "agent-2", *ENVIRONMENTS, *BROKERS, "model-1", "model-2")

_WITH_OVERLAY = ("--xattrs", "--xattrs-include=*", "--numeric-owner", "-p", "-f", "-")
"""What a layer of an image consists of, beside files: notes of overlayfs."""

_REGISTRY = """
import json, sqlite3, sys
db = sqlite3.connect(sys.argv[1])
boxes = db.execute("select creator, state from broker_boxes").fetchall()
lent = db.execute("select count(*) from broker_leases where scope = 'operate'").fetchone()[0]
print(json.dumps({"boxes": boxes, "lent": lent}))
"""
_INVENTORY = """
import asyncio, json
from nemo_gym.sandbox.facade import create_provider

async def main():
    provider = create_provider({"local": {}})
    try:
        print(json.dumps([box.sandbox_id for box in await provider.list({})]))
    finally:
        await provider.aclose()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    (cache_root() / "agents").mkdir(parents=True, exist_ok=True)  # what is fetched later is seen by the hosts as well
    with switched_hosts(NAMES) as made:
        yield made


def take_examples_to(hosts: dict[str, Host]) -> None:
    """Copy the example tasks' images to each host that makes boxes, and their controls to each that grades."""
    archive, path = example_images(), str(default_image_dir())
    for name in BROKERS:
        hosts[name].run(["mkdir", "-p", path])
        hosts[name].run(["tar", *_WITH_OVERLAY, "-x", "-C", path], stdin=archive, timeout_s=300)
    command = ["tar", "-c", "-f", "-", "-C", str(default_controls_dir()), "."]
    controls = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True).stdout
    for name in ENVIRONMENTS:
        path = str(Path.home() / ".local" / "state" / "nemo-gym" / "swe-bench" / "controls")
        hosts[name].run(["mkdir", "-p", path])
        hosts[name].run(["tar", "-x", "-p", "-f", "-", "-C", path], stdin=controls)


def example_images() -> bytes:
    """The images of the example tasks, made where there are package indexes, as an archive to be taken to hosts."""
    words = ["swe_bench", f"rows={rows_of('swe_bench')}", "sandbox=local", "--json"]
    command = [str(Path(sys.executable).parent / "ng_prepare"), *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=900, check=True)
    store = ImageStore(default_image_dir())
    members = set()
    for row in json.loads(done.stdout)["rows"]:
        manifest = store.manifest(row["image"])
        assert manifest is not None and manifest.host_base
        members |= {f"images/{quote(manifest.name, safe='')}.json", *(f"layers/{each}" for each in manifest.layers)}
    archive = ["tar", *_WITH_OVERLAY, "-c", "-C", str(store.root), *sorted(members)]
    return subprocess.run(archive, stdout=subprocess.PIPE, timeout=300, check=True).stdout


@pytest.fixture(autouse=True)
def _empty_state(hosts: dict[str, Host]) -> None:
    for host in hosts.values():
        if host.is_up:
            host.run(["rm", "-rf", RUN_DIR])


def registry(host: Host) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        host.run(["python", "-c", _REGISTRY, f"{RUN_DIR}/run/state/sandbox_broker/broker.sqlite"])
    )
    return found


def inventory(host: Host) -> list[str]:
    """The boxes that there are on a host, as those say who made them."""
    found: list[str] = json.loads(host.run(["python", "-c", _INVENTORY]))
    return found


def test_hosts_share_a_network_and_no_file(hosts: dict[str, Host]) -> None:
    devices = [host.run(["stat", "-c", "%d", *OWN]).split() for host in hosts.values()]
    every = [device for own in devices for device in own]
    assert len({*every}) == len(every), "each host has each directory for itself"
    for host in hosts.values():
        assert b"default" not in host.run(["ip", "route"]), "nothing leads out of the switch"
        assert host.run(["sh", "-c", f"[ -w {ROOT} ] || echo no"]) == b"no\n", "the checkout is read-only"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "environment", "topology", "owner", "wrong", "tls"),
    [
        pytest.param("claude_code", "swe_bench", "agent_in_env", "environment", set(), False, marks=pytest.mark.full),
        pytest.param("codex", "example_mcp_weather", "env_sandboxed", "agent", {4}, True, marks=pytest.mark.full),
        pytest.param("simple_agent", "example_mcp_weather", "env_sandboxed", None, {4}, True, marks=pytest.mark.full),
        ("mini_swe_agent", "math", "none", "agent", {5}, False),
    ],
    ids=["swe_bench", "example_mcp_weather", "no_box", "math"],
)
def test_examples_pass_when_every_role_has_two_hosts(
    agent: str,
    environment: str,
    topology: str,
    owner: str | None,
    wrong: set[int],
    tls: bool,
    hosts: dict[str, Host],
    tmp_path: Path,
) -> None:
    """``owner``: who makes the boxes, if there are any; ``wrong``: what the scripted policy answers wrongly on
    purpose."""
    prepare_agent(agent)
    if owner == "environment":
        take_examples_to(hosts)
    data = rows_of(environment)
    chosen = [f"agent={agent}", f"environment={environment}", "sandbox=broker_local", f"topology={topology}"]
    stack = Stack(hosts, chosen, tmp_path, tls=tls)
    with stack.running():
        shards = {name: [f"shard={n}/2", "concurrency=2"] for n, name in enumerate(PIPELINES, start=1)}
        pipelines = stack.collect(shards, data)
        for each in pipelines.values():
            assert each.wait(RUN_WITHIN_S) == 0, each.said[-3000:]
        by_pipeline = [stack.rows(name) for name in PIPELINES]
        left = {name: inventory(hosts[name]) for name in BROKERS}
        registries = [registry(hosts[name]) for name in BROKERS]
    rows = [row for own in by_pipeline for row in own]
    tasks = sorted(row["_ng_task_index"] for row in rows)
    assert tasks == [*range(len(data.read_text().splitlines()))], "each task once, whichever pipeline ran it"
    assert all(by_pipeline)
    assert {row["_ng_task_index"]: row["reward"] for row in rows} == {task: float(task not in wrong) for task in tasks}
    assert {row["topology"] for row in rows} == {topology}
    for server in (stack.agent, stack.environment, "policy_model"):
        assert {row["replicas"][server] for row in rows} == {0, 1}, f"both replicas of {server} worked"
    assert left == {name: [] for name in BROKERS}
    made = {(getattr(stack, owner), "gone")} if owner else set()
    for found in registries:
        assert {tuple(box) for box in found["boxes"]} == made, "both brokers made boxes, and none is left"
        assert (found["lent"] > 0) == (owner == "environment"), "an environment lends its boxes"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["agent-2", "world-2", "broker-2"])
def test_no_row_is_lost_when_a_host_dies(victim: str, tmp_path: Path) -> None:
    """The host with one of two replicas, in the middle of attempts; the other replica has them anew."""
    prepare_agent("claude_code")
    data = rows_of("swe_bench")
    with switched_hosts(NAMES) as hosts:
        take_examples_to(hosts)
        chosen = ["agent=claude_code", "environment=swe_bench", "sandbox=broker_local"]
        lease = "swe_bench.resources_servers.swe_bench.work_lease_s=30"
        stack = Stack(hosts, [*chosen, lease, "sandbox.remote.patience_s=10"], tmp_path)
        with stack.running():
            (pipeline,) = stack.collect({PIPELINES[0]: ["concurrency=4"]}, data).values()
            until(lambda: is_under_way(hosts, victim), "attempts work in boxes, some of them by way of the host")
            hosts[victim].kill()
            assert pipeline.wait(RUN_WITHIN_S) == 0, pipeline.said[-3000:]
            rows = stack.rows(PIPELINES[0])
            up = [hosts[name] for name in BROKERS if hosts[name].is_up]
            until(lambda: not any(map(inventory, up)), "boxes of who died are gone with their leases")
    assert [row["reward"] for row in rows] == [1.0] * len(data.read_text().splitlines())
    assert any(row["_ng_attempt_index"] > 0 for row in rows), "an attempt was under way on the dead host"


def is_under_way(hosts: dict[str, Host], victim: str) -> bool:
    """Four attempts are spread evenly over agents and environments, so three boxes are not one replica's."""
    boxes = {name: len(inventory(hosts[name])) for name in BROKERS}
    return sum(boxes.values()) >= 3 and boxes.get(victim, 1) > 0
