"""env ⊕ agent: the world's spec with the harness's needs, and the doors that keep credentials outside."""

from __future__ import annotations

import pytest

from nemo_gym.agent.bindings import world_doors
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxSpec
from nemo_gym.contract.session import (
    DoorRequest,
    Egress,
    EgressPolicy,
    InferenceEndpoint,
    McpServer,
    RolloutIdentity,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.egress import HarnessNeeds, world_spec

INFERENCE = InferenceEndpoint(base_url="http://127.0.0.1:9/gateway/v1", token="inference-token")
TOOLS = McpServer(name="weather", url="http://127.0.0.1:7/mcp", headers={"X-Token": "mcp-token"})


def descriptor(**egress: object) -> SessionDescriptor:
    return SessionDescriptor(
        environment="env",
        task_id="t",
        rollout=RolloutIdentity(rollout_id="r", task_id="t", group_id="g"),
        egress=Egress.model_validate(egress),
        mcp=(TOOLS,),
    )


def test_world_spec_holds_both_sides_needs() -> None:
    spec = SandboxSpec(env={"A": "1"}, requires=("gpu",))
    needs = HarnessNeeds(env={"C": "3"}, mounts=(Mount("/cli", "/opt/cli"),), requires=("loopback_door",))
    merged = world_spec(spec, descriptor(env={"B": "2"}), needs)
    assert dict(merged.env) == {"A": "1", "B": "2", "C": "3"}
    assert merged.requires == ("gpu", "loopback_door")
    assert merged.mounts == needs.mounts
    assert merged.network is NetworkPolicy.NONE


def test_conflicting_variable_is_an_error_that_names_both_values() -> None:
    with pytest.raises(ConfigError, match=r"sets A='1'.*needs '2'"):
        world_spec(SandboxSpec(env={"A": "1"}), descriptor(), HarnessNeeds(env={"A": "2"}))


def test_conflicting_mount_is_an_error_that_names_both_sources() -> None:
    spec = SandboxSpec(mounts=(Mount("/theirs", "/opt/cli"),))
    with pytest.raises(ConfigError, match="/theirs and /ours"):
        world_spec(spec, descriptor(), HarnessNeeds(mounts=(Mount("/ours", "/opt/cli"),)))


def test_model_door_holds_the_token_and_the_box_does_not() -> None:
    (door,) = world_doors(descriptor(), INFERENCE, topology=Topology.AGENT_IN_ENV, needs=HarnessNeeds())
    assert (door.name, door.port, door.target) == ("model", 8000, "http://127.0.0.1:9/gateway")
    assert door.headers == {"Authorization": "Bearer inference-token"}
    assert "POST /v1/chat/completions" in door.allow
    assert "inference-token" not in repr(door)


def test_tool_door_reaches_one_mcp_server_only() -> None:
    egress = {"doors": [DoorRequest(name="weather", port=8100)]}
    (door,) = world_doors(descriptor(**egress), INFERENCE, topology=Topology.ENV_SANDBOXED, needs=HarnessNeeds())
    assert (door.target, door.port) == ("http://127.0.0.1:7", 8100)
    assert all(route.endswith(" /mcp") for route in door.allow)


def test_door_with_nothing_behind_it_names_what_there_is() -> None:
    egress = {"doors": [DoorRequest(name="wether", port=8100)]}
    with pytest.raises(ConfigError, match="known: model, weather"):
        world_doors(descriptor(**egress), INFERENCE, topology=Topology.ENV_SANDBOXED, needs=HarnessNeeds())


def test_harness_in_the_box_is_refused_where_nothing_may_leave_it() -> None:
    with pytest.raises(ConfigError, match="needs the model"):
        world_doors(
            descriptor(policy=EgressPolicy.NONE),
            INFERENCE,
            topology=Topology.AGENT_IN_ENV,
            needs=HarnessNeeds(model_in_box=True),
        )


def test_allow_list_is_a_proxy_behind_a_door_and_what_programs_find_it_by() -> None:
    asked = descriptor(policy=EgressPolicy.ALLOWLIST, allow=("pypi.org",), doors=(DoorRequest(name="m", port=3128),))
    spec = world_spec(SandboxSpec(), asked, HarnessNeeds())
    assert spec.network is NetworkPolicy.NONE
    assert [(door.name, door.port, door.kind, door.allow) for door in spec.doors] == [
        ("egress", 3129, "proxy", ("pypi.org",))
    ]
    assert spec.env["https_proxy"] == spec.env["HTTP_PROXY"] == "http://127.0.0.1:3129"
    assert "127.0.0.1" in spec.env["NO_PROXY"].split(",")  # the other doors
    with pytest.raises(ConfigError, match="sets HTTP_PROXY='http://mine' in the box"):
        world_spec(SandboxSpec(env={"HTTP_PROXY": "http://mine"}), asked, HarnessNeeds())


def test_environment_may_choose_the_port_of_the_proxy() -> None:
    asked = descriptor(
        policy=EgressPolicy.ALLOWLIST, allow=("pypi.org",), doors=(DoorRequest(name="egress", port=8080),)
    )
    (door,) = world_spec(SandboxSpec(), asked, HarnessNeeds()).doors
    assert door.port == 8080
    assert world_doors(asked, INFERENCE, topology=Topology.AGENT_IN_ENV, needs=HarnessNeeds()) == ()
