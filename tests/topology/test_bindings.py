"""Which box an attempt gets in each topology, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.agent.bindings import AgentBoxes, bind, joined, output_items
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Mount, NetworkPolicy, SandboxResources, SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    DoorRequest,
    Egress,
    EgressPolicy,
    InferenceEndpoint,
    McpServer,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.egress import HarnessNeeds

CLI = HarnessNeeds(mounts=(Mount("/cache/cli", "/opt/cli"),), model_in_box=True)
BOXES = AgentBoxes(scratch=SandboxSpec(image="scratch"), outer=SandboxSpec(requires=("nested_containers",)))
WEATHER = McpServer(name="weather", url="http://10.0.0.1:9000/mcp", headers={"Authorization": "Bearer m"})
WORLD = SandboxClause(spec=SandboxSpecModel(image="world", workdir="/repo"))


def request(topology: Topology, **fields: Any) -> ActRequest:
    needs_world = topology is Topology.AGENT_IN_ENV
    given = {"sandbox": WORLD if needs_world else None, **fields}
    descriptor = SessionDescriptor(
        environment="env",
        task_id="t",
        rollout=RolloutIdentity(rollout_id="r", task_id="t", group_id="g"),
        placement=Placement(topology=topology),
        **given,
    )
    return ActRequest(
        responses_create_params={},
        descriptor=descriptor,
        inference=InferenceEndpoint(base_url="http://gateway/sessions/s/v1", token="i"),
    )


def doors(spec: SandboxSpec) -> dict[str, int]:
    return {door.name: door.port for door in spec.doors}


@pytest.mark.parametrize(
    ("topology", "fields", "image", "is_world"),
    [
        (Topology.NONE, {}, "scratch", True),
        (Topology.ENV_SANDBOXED, {"mcp": (WEATHER,)}, "scratch", False),
        (Topology.ENV_SANDBOXED, {"mcp": (WEATHER,), "sandbox": WORLD}, "scratch", False),
        (Topology.AGENT_IN_ENV, {}, "world", True),
        (Topology.WHOLE_INTERACTION, {"sandbox": WORLD}, "world", True),
        (Topology.WHOLE_INTERACTION, {}, None, True),
    ],
)
def test_process_harness_gets_the_box_of_its_topology(
    topology: Topology, fields: dict[str, Any], image: str | None, is_world: bool
) -> None:
    binding = bind(request(topology, **fields), topology, CLI, BOXES)
    assert (binding.spec.image, binding.is_world) == (image, is_world)
    assert binding.spec.network is NetworkPolicy.NONE
    assert Mount("/cache/cli", "/opt/cli") in binding.spec.mounts
    assert ("nested_containers" in binding.spec.requires) == (topology is Topology.WHOLE_INTERACTION)
    assert doors(binding.spec)["model"] == 8000
    model = next(door for door in binding.spec.doors if door.name == "model")
    assert (model.target, model.headers) == ("http://gateway/sessions/s", {"Authorization": "Bearer i"})


def test_harness_in_the_server_acts_on_the_described_world_in_b() -> None:
    binding = bind(request(Topology.ENV_SANDBOXED, sandbox=WORLD), Topology.ENV_SANDBOXED, HarnessNeeds(), BOXES)
    assert (binding.spec.image, binding.is_world, doors(binding.spec)) == ("world", True, {})


@pytest.mark.parametrize("topology", [*Topology])
def test_every_mcp_server_has_a_door_on_a_port_of_its_own(topology: Topology) -> None:
    other = WEATHER.model_copy(update={"name": "maps"})
    egress = Egress(doors=(DoorRequest(name="maps", port=8100), DoorRequest(name="model", port=8101)))
    asked = request(topology, mcp=(WEATHER, other), egress=egress, sandbox=WORLD)
    assert doors(bind(asked, topology, CLI, BOXES).spec) == {"maps": 8100, "model": 8101, "weather": 8102}


def test_scratch_box_reaches_the_model_although_the_world_may_not() -> None:
    closed = Egress(policy=EgressPolicy.NONE)
    binding = bind(request(Topology.NONE, egress=closed), Topology.NONE, CLI, BOXES)
    assert "model" in doors(binding.spec)
    with pytest.raises(ConfigError, match="lets nothing out of the box"):
        bind(request(Topology.AGENT_IN_ENV, egress=closed), Topology.AGENT_IN_ENV, CLI, BOXES)


@pytest.mark.parametrize(
    ("topology", "fields", "message"),
    [
        (Topology.ENV_SANDBOXED, {}, "offers no MCP server.*use topology=agent_in_env"),
        (
            Topology.NONE,
            {"mcp": (WEATHER.model_copy(update={"transport": "sse"}),)},
            "'weather' at .* streamable HTTP transport at a URL that ends in /mcp",
        ),
    ],
)
def test_what_cannot_be_bound_is_refused_with_the_reason(
    topology: Topology, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bind(request(topology, **fields), topology, CLI, BOXES)


def test_outer_box_is_both_specs_together() -> None:
    world = SandboxSpec(image="world", env={"A": "1"}, files={"/a": "a"}, resources=SandboxResources(memory_mib=512))
    agent = SandboxSpec(env={"B": "2"}, resources=SandboxResources(memory_mib=512, pids=64), requires=("gpu",))
    both = joined(world, agent, "env")
    assert (both.image, both.env, both.files) == ("world", {"A": "1", "B": "2"}, {"/a": "a"})
    assert (both.resources, both.requires) == (SandboxResources(memory_mib=512, pids=64), ("gpu",))


@pytest.mark.parametrize(
    ("world", "agent", "key"),
    [
        ({"image": "a"}, {"image": "b"}, "image"),
        ({"resources": SandboxResources(cpu=1)}, {"resources": SandboxResources(cpu=2)}, "resources.cpu"),
        (
            {"resources": SandboxResources(unlimited=("pids",))},
            {"resources": SandboxResources(pids=9)},
            "resources.pids",
        ),
        ({"files": {"/a": "1"}}, {"files": {"/a": "2"}}, "files./a"),
        ({"mounts": (Mount("/x", "/m"),)}, {"mounts": (Mount("/y", "/m"),)}, "mounts of /m"),
        ({"env": {"A": "1"}}, {"env": {"A": "2"}}, "A='1'"),
    ],
)
def test_conflict_over_the_outer_box_names_both_sides(world: dict[str, Any], agent: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        joined(SandboxSpec(**world), SandboxSpec(**agent), "env")
    assert key in error.value.message
    assert "environment 'env'" in error.value.message and "the agent" in error.value.message


def test_refusal_in_a_chat_message_is_the_agents_text_in_the_response() -> None:
    (item,) = output_items([{"role": "assistant", "content": "", "refusal": "I will not."}])
    assert item["content"][0]["text"] == "I will not."
