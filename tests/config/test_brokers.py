"""Compositions in which boxes are behind a broker."""

from __future__ import annotations

import pytest

from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.config.composition import backend_of
from nemo_gym.config.visibility import Address, call_targets, server_view
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import Topology

WORDS = ["agent=claude_code", "environment=swe_bench", "model=scripted"]


@pytest.mark.parametrize("backend", ["local", "docker"])
def test_servers_may_call_the_broker_that_their_sandbox_leads_to(backend: str) -> None:
    composition = compose([*WORDS, f"sandbox=broker_{backend}"])
    assert composition.chosen["environment"] == "swe_bench"
    for server in ("claude_code_agent", "swe_bench"):
        assert "sandbox_broker" in call_targets(composition, server)
    for server in ("policy_model", "sandbox_broker"):
        assert "sandbox_broker" not in call_targets(composition, server)
    addresses = {name: Address("127.0.0.1", 1000 + n) for n, name in enumerate(composition.servers)}
    view = server_view(composition, "swe_bench", addresses)
    assert view["sandbox_broker"]["resources_servers"]["sandbox"]["url"] == addresses["sandbox_broker"].url
    assert "broker_backend" in server_view(composition, "sandbox_broker", addresses)
    assert backend_of(composition, "sandbox") == backend_of(composition, "broker_backend") == {backend: {}}


def test_without_a_broker_a_sandbox_is_its_own_backend() -> None:
    assert backend_of(compose([*WORDS, "sandbox=local"]), "sandbox") == {"local": {}}
    elsewhere = compose([*WORDS, "sandbox=broker_local"])
    assert backend_of(elsewhere, {"remote": {"url": "http://b"}}) == {"remote": {"url": "http://b"}}


@pytest.mark.parametrize("name", ["sandbox_brokr", "policy_model"])
def test_sandbox_that_leads_to_no_broker_is_refused_with_a_way_out(name: str) -> None:
    composition = compose([*WORDS, "sandbox=broker_local", f"sandbox.remote.server.name={name}"])
    with pytest.raises(ConfigError, match=f"'{name}', which is not a broker.*broker_local"):
        backend_of(composition, "sandbox")


@pytest.mark.parametrize("backend", ["local", "docker"])
def test_world_that_is_worked_in_from_outside_is_lent_by_a_broker_of_the_run(backend: str) -> None:
    words = ["agent=mini_swe_agent", "environment=swe_bench", "model=scripted", f"sandbox={backend}"]
    composition = compose([*words, "topology=env_sandboxed"])
    assert check_everything(composition) is Topology.ENV_SANDBOXED
    assert "sandbox_broker" in call_targets(composition, "swe_bench")
    assert "sandbox_broker" in call_targets(composition, "mini_swe_agent")
    assert backend_of(composition, "sandbox") == {backend: {}}
    inside = compose(words)
    assert check_everything(inside) is Topology.AGENT_IN_ENV
    assert "sandbox_broker" not in inside.servers
    named = compose([*words[:3], "sandbox=broker_local", "topology=env_sandboxed"])
    assert [*named.servers].count("sandbox_broker") == 1


def test_settings_of_the_sandbox_are_those_of_the_backend_behind_the_runs_broker() -> None:
    words = ["agent=mini_swe_agent", "environment=swe_bench", "model=scripted", "sandbox=local", "topology=B"]
    composition = compose([*words, "+sandbox.local.use_cgroups=false"])
    assert backend_of(composition, "sandbox") == {"local": {"use_cgroups": False}}


def test_agent_whose_loop_is_outside_of_the_box_is_no_whole_interaction() -> None:
    words = ["agent=mini_swe_agent", "environment=swe_bench", "model=scripted", "sandbox=local"]
    with pytest.raises(ConfigError, match="'mini_swe_agent' cannot run in topology 'whole_interaction'"):
        check_everything(compose([*words, "topology=D"]))
