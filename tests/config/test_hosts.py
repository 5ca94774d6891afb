"""The ``hosts`` block: what runs where, and what of it is refused."""

from __future__ import annotations

import copy
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym._util.secrets import redact
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import Composition
from nemo_gym.config.hosts import Hosts
from nemo_gym.config.visibility import Address, pipeline_view, server_view
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.stack.ports import bind_listeners, close_listeners
from tests.architecture.docs import example_files

WORDS = ["agent=simple_agent", "environment=math", "model=scripted"]
SECRET = "5e" * 32
BLOCK: dict[str, Any] = {
    "network": "10.1.0.0/16",
    "plain_http": True,
    "stack_secret": SECRET,
    "machines": {
        "trainer": {"address": "10.1.0.1"},
        "worlds-1": {"address": "10.1.0.2", "servers": {"math": 8100, "policy_model": 8101}},
        "worlds-2": {"address": "10.1.0.3", "servers": {"math": 8100, "simple_agent": 8102}},
    },
}


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    def make(block: dict[str, Any], *words: str) -> Composition:
        path = tmp_path / "hosts.yaml"
        path.write_text(yaml.safe_dump({"hosts": block}))
        return compose([*WORDS, f"+config_paths=[{path}]", *words])

    return make


def changed(**changes: Any) -> dict[str, Any]:
    """The block with values at dotted keys (``__`` for the dot) replaced; ``None`` removes one."""
    block = copy.deepcopy(BLOCK)
    for dotted, value in changes.items():
        node = block
        *parents, last = dotted.replace("_N_", "-").split("__")
        for part in parents:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return block


def test_host_runs_its_servers_and_knows_every_replica_of_the_others(composed: Any) -> None:
    composition = composed(BLOCK, "host=worlds-2")
    check_everything(composition)
    hosts = Hosts.of(composition)
    assert hosts is not None
    both = (Address("10.1.0.2", 8100), Address("10.1.0.3", 8100))
    assert hosts.replicas["math"] == both
    assert hosts.local == {"math": both[1], "simple_agent": Address("10.1.0.3", 8102)}
    addresses = {name: places[0] for name, places in hosts.replicas.items()} | dict(hosts.local)
    view = server_view(composition, "simple_agent", addresses, hosts.replicas)
    assert view["math"]["resources_servers"]["math"]["urls"] == ["http://10.1.0.2:8100", "http://10.1.0.3:8100"]
    assert "urls" not in view["policy_model"]["responses_api_models"]["scripted_model"]
    shown = json.dumps([view, pipeline_view(composition, addresses, hosts.replicas), redact(composition.values)])
    assert SECRET not in shown


def test_replicas_take_the_credentials_that_any_host_makes(composed: Any) -> None:
    ours, theirs = (Hosts.of(composed(BLOCK, f"host={name}")) for name in ("trainer", "worlds-1"))
    assert ours is not None and theirs is not None
    credential = ours.keys.caller(Role.PIPELINE, "pipeline", "math")
    assert theirs.keys.for_server("math", Role.ENVIRONMENT, []).check(credential).role is Role.PIPELINE


@pytest.mark.parametrize(
    ("block", "words", "said"),
    [
        (changed(network="8.0.0.0/8"), [], "network 8.0.0.0/8 is not a private network"),
        (changed(network="0.0.0.0/0"), [], "not a private network"),
        (changed(plain_http=False), [], "hosts.tls is missing"),
        (changed(tls={"certificate_file": "a"}), [], "^hosts.tls.key_file: Field required$"),
        (changed(network="10.1.0.5/16"), [], "network"),
        (changed(machines__trainer__address="192.168.0.1"), [], "trainer.address 192.168.0.1 is not in"),
        (changed(machines__trainer__address="trainer.example"), [], "machines.trainer.address"),
        (changed(stack_secret="short"), [], "stack_secret.*openssl rand"),
        (changed(stack_secret=f"{SECRET}5"), [], "stack_secret.*openssl rand"),
        (changed(stack_secret=None), [], "stack_secret"),
        (changed(machines__trainer__servers={"maths": 8100}), [], "did you mean 'math'"),
        (changed(machines__trainer__servers={"math": 0}), [], "servers.math"),
        (changed(machines__worlds_N_1__servers__math=8101), [], "10.1.0.2:8101 is worlds-1"),
        (changed(machines__worlds_N_2__servers={"math": 8100}), [], "no machine runs simple_agent"),
        (
            changed(machines__trainer__adress="10.1.0.1"),
            [],
            r"hosts.machines.trainer.adress' \(did you mean 'address'\?\)$",
        ),
        (BLOCK, ["host=worlds"], "host=worlds is not one.*did you mean 'worlds-"),
        (BLOCK, ["math.resources_servers.math.port=9000"], "port: hosts.machines sets where servers listen"),
    ],
)
def test_wrong_block_is_refused_by_key(block: dict[str, Any], words: list[str], said: str, composed: Any) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_everything(composed(block, *words))
    assert SECRET not in caught.value.message


def test_public_network_takes_tls_and_each_host_its_own_files(composed: Any, tmp_path: Path) -> None:
    files = {"certificate_file": str(tmp_path / "host.crt"), "key_file": str(tmp_path / "host.key")}
    machines = {"one": {"address": "8.1.0.1", "servers": {"math": 1, "simple_agent": 2, "policy_model": 3}}}
    block = {**BLOCK, "plain_http": False, "network": "8.1.0.0/16", "machines": machines, "tls": files}
    hosts = Hosts.of(composed(block, "host=one"))
    assert hosts is not None
    assert {place.url for places in hosts.replicas.values() for place in places} == {
        f"https://8.1.0.1:{port}" for port in (1, 2, 3)
    }
    with pytest.raises(ConfigError, match=r"tls.certificate_file .* cannot be read on this host"):
        hosts.require_here()
    for path in files.values():
        Path(path).touch()
    hosts.require_here()


def test_block_of_the_documentation_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(example_files("hosts.md")["hosts.yaml"])
    monkeypatch.setenv("NG_STACK_SECRET", SECRET)
    words = ["agent=claude_code", "environment=swe_bench", "sandbox=broker_local", "model=scripted", "host=boxes-1"]
    composition = compose([*words, f"+config_paths=[{path}]"])
    check_everything(composition)
    hosts = Hosts.of(composition)
    assert hosts is not None and [*hosts.local] == ["sandbox_broker"]


def test_host_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="no 'hosts' block"):
        check_everything(compose([*WORDS, "host=trainer"]))


def test_block_can_be_looked_at_on_any_host_and_run_on_none_but_its_own(composed: Any) -> None:
    hosts = Hosts.of(composed(BLOCK))
    assert hosts is not None and hosts.local == {}
    with pytest.raises(ConfigError, match="host="):
        hosts.require_here()


def test_servers_listen_on_their_machine_s_address_alone(composed: Any) -> None:
    with socket.create_server(("127.0.0.3", 0)) as probe:
        port = probe.getsockname()[1]
    machines = {
        "here": {
            "address": "127.0.0.3",
            "servers": dict(zip(("math", "simple_agent", "policy_model"), range(port, port + 3), strict=True)),
        }
    }
    composition = composed({**BLOCK, "network": "127.0.0.0/8", "machines": machines}, "host=here")
    hosts = Hosts.of(composition)
    assert hosts is not None
    listeners = bind_listeners(composition.servers.values(), places=hosts.local)
    try:
        assert {each.socket.getsockname() for each in listeners.values()} == {
            ("127.0.0.3", port + number) for number in range(3)
        }
        with pytest.raises(ConfigError, match="in use"):
            bind_listeners(composition.servers.values(), places=hosts.local)
    finally:
        close_listeners(listeners.values())


def test_wrong_host_is_told_from_a_taken_port(composed: Any) -> None:
    composition = composed(BLOCK, "host=worlds-1")
    hosts = Hosts.of(composition)
    assert hosts is not None
    with pytest.raises(ConfigError, match=r"10\.1\.0\.\d is not an address of this machine; set host="):
        bind_listeners(composition.servers.values(), places=hosts.local)
