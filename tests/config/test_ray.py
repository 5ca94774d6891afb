"""``dispatch: ray``: what is refused before a cluster is asked, and which node gets which servers."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.hosts import NODE_FD, Hosts, NodePart, RayConfig, RayNode, hosts_block
from nemo_gym.contract.errors import ConfigError
from nemo_gym.stack import ray_nodes

REPOSITORY = Path(__file__).parents[2]
GROUPS = ("agent=solver", "environment=mathy", "model=echo")
NODES = [RayNode(f"{number:08x}ff", f"10.3.0.{number}", range(9000, 9064)) for number in (1, 2, 3)]


def composed(root: Path, *words: str) -> Composition:
    return compose([*GROUPS, *words], roots=[root, REPOSITORY])


def block(root: Path, *words: str, nodes: list[RayNode] = NODES) -> tuple[Composition, dict[str, Any]]:
    composition = composed(root, "dispatch=ray", *words)
    config = RayConfig.of(composition)
    assert config is not None
    return composition, hosts_block(composition, config, nodes, nodes[0].address)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dispatch=rey"], "dispatch must be processes .* or ray, got 'rey'"),
        (["++ray.address=auto"], r"add dispatch=ray"),
        (["dispatch=ray", "++ray.adress=auto"], r"ray\.adress.*did you mean 'address'"),
        (["dispatch=ray", "++ray.nodes.mathi=1"], r"no server instance 'mathi' \(did you mean 'mathy'\?\)"),
        (["dispatch=ray", "++ray.nodes.mathy=0"], r"^ray\.nodes\.mathy: "),
        (["dispatch=ray", "++ray=5"], r"^ray must be a block of keys$"),
        (["dispatch=ray", "++ray.pipelines=2"], "use ng_serve_rollouts"),
        (["dispatch=ray", "++ray.pipelines=2", "+serve.port=0"], "keep their jobs in PostgreSQL"),
        (["dispatch=ray", "host=a"], "the hosts come from the cluster"),
    ],
)
def test_wrong_block_is_refused_with_the_fix(root: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayConfig.of(composed(root, *words))


def test_composition_without_ray_is_no_affair_of_rays(root: Path) -> None:
    assert RayConfig.of(composed(root)) is None
    assert RayConfig.of(composed(root, "dispatch=processes")) is None


def test_every_node_runs_every_server_unless_it_is_told_otherwise(root: Path) -> None:
    composition, made = block(root, "++ray.nodes.policy_model=1", "++ray.network=10.3.0.0/24", "++ray.plain_http=true")
    servers = {name: set(machine.get("servers", {})) for name, machine in made["machines"].items()}
    assert servers["pipeline"] == set()
    everywhere = {"mathy", "solver"}
    assert [servers[f"ray-0000000{n}"] - {"policy_model"} for n in (1, 2, 3)] == [everywhere] * 3
    assert sum("policy_model" in each for each in servers.values()) == 1
    composition.values.update(hosts=made, host="ray-00000001")
    check_everything(composition)
    hosts = Hosts.of(composition)
    assert hosts is not None and {address.host for address in hosts.local.values()} == {"10.3.0.1"}
    assert len(hosts.replicas["solver"]) == 3


def test_nodes_of_one_address_get_ports_of_their_own(root: Path) -> None:
    nodes = [RayNode(f"{number:08x}", "127.0.0.2", range(9000, 9064)) for number in (1, 2)]
    _, made = block(root, nodes=nodes)
    ports = [port for machine in made["machines"].values() for port in machine.get("servers", {}).values()]
    assert len(ports) == len(set(ports)) == 6 and made["network"] == "127.0.0.0/8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["++ray.nodes.mathy=4"], r"ray\.nodes\.mathy: 4 nodes are asked for, and the cluster has 3"),
        ([], r"ray\.network is missing: .* ray\.network=10\.3\.0\.0/24"),
    ],
)
def test_cluster_that_does_not_fit_is_refused(root: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        block(root, *words)


def test_servers_leave_a_nodes_last_port_to_its_service_and_have_a_limit(root: Path) -> None:
    words = ("++ray.network=10.3.0.0/24", "++ray.plain_http=true")
    _, made = block(root, *words, nodes=[replace(node, ports=range(9000, 9004)) for node in NODES])
    ports = {port for machine in made["machines"].values() for port in machine.get("servers", {}).values()}
    assert ports == {9000, 9001, 9002}
    with pytest.raises(ConfigError, match=r"ray\.nodes\.\w+: node ray-00000001 has no port left .* all 2;"):
        block(root, *words, nodes=[replace(node, ports=range(9000, 9003)) for node in NODES])


def test_node_takes_its_part_and_leaves_the_run_to_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composition, made = block(root, "++ray.network=10.3.0.0/24", "++ray.plain_http=true", "+serve.port=1")
    composition.values.update(input="rows.jsonl", output="out.jsonl")
    part = NodePart("ray-00000002", made, "run-1", "/tmp/run-1/nodes/2")
    read, write = os.pipe()
    os.write(write, part.to_json())
    os.close(write)
    monkeypatch.setenv(NODE_FD, str(read))
    part_read = NodePart.from_parent()
    assert part_read == part and NodePart.from_parent() is None
    part_read.take(composition)
    assert not composition.has_run and not composition.serves and RayConfig.of(composition) is None
    assert composition.values["host"] == "ray-00000002" and composition.values["run_id"] == "run-1"
    assert made["stack_secret"] not in repr(part) and json.loads(part.to_json())["hosts"] == made


async def test_nodes_settings_are_in_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "print(open('/proc/self/cmdline').read())"
    monkeypatch.setattr(ray_nodes, "CODE", f"{seen}; {ray_nodes.CODE}")
    words = ["policy_api_key='sk-live-123456789'", "no_such_agent=1", f"note={'x' * 200_000}"]
    part = NodePart("ray-00000002", {}, "run-1", str(tmp_path))
    code, tail = await ray_nodes.NodeActor().run(words, str(tmp_path), {}, part)
    log = (tmp_path / "ng_run.log").read_text()
    assert code == 2 and "ng_run: error:" in tail and "-c" in log and "sk-live" not in log


class RayStub:
    """Starts that end as told: with an exit code, or the actor killed (``None``); the last one stops the nodes."""

    class RayError(Exception):
        pass

    def __init__(self, *codes: int | None) -> None:
        self.exceptions = SimpleNamespace(RayError=self.RayError)
        self.codes = [*codes]
        self.said: list[str] = []
        self.nodes = object.__new__(ray_nodes.RayNodes)
        self.nodes._ray, self.nodes._say, self.nodes._stopping = self, self.said.append, False
        self.nodes._actor = lambda _: SimpleNamespace(run=SimpleNamespace(remote=self.run))  # type: ignore[method-assign]
        self.nodes._is_alive = lambda _: True  # type: ignore[method-assign]

    async def run(self, *_: object) -> tuple[int, str]:
        code = self.codes.pop(0)
        self.nodes._stopping = not self.codes
        if code is None:
            raise self.RayError
        return code, "a stack runs in /run already"


@pytest.mark.parametrize(("codes", "failed"), [((2, 0), True), ((None, 2, 2, 0), False), ((1, 2, 0), False)])
async def test_node_tells_only_at_its_first_start_that_the_configuration_is_wrong(
    codes: tuple[int | None, ...], failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "FIRST_PAUSE_S", 0.01)
    stub = RayStub(*codes)
    running = ray_nodes._Running(NodePart("ray-1", {}, "run-1", "/run"), NODES[0])
    failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    await stub.nodes._keep(running, [], "/", {}, failure)
    assert failure.done() == failed and (failed or not stub.codes)
    assert len(stub.said) == (0 if failed else len(codes) - 1)
