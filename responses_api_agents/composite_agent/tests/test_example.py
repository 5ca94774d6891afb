"""Two processes, a planner and a coder, with their world in one box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import ActRequest, ActResponse, AgentOutcome, InferenceEndpoint, SandboxClause, Topology
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.composite_agent.tests.conftest import composite
from responses_api_models.gateway.app import Gateway
from tests.harness.conftest import Weather
from tests.harness.stage import IMAGE, RUN, act, descriptor, outputs
from tests.servers.stack import Stack

Boxes = tuple[SandboxProvider, dict[str, Any]]
WORLD = descriptor(Topology.WHOLE_INTERACTION)


@pytest.fixture
def stack(tmp_path: Path, local: LocalProvider, local_block: dict[str, Any]) -> Iterator[Stack]:
    with composite(tmp_path, local_block) as running:
        yield running


def patch(answer: ActResponse) -> str:
    return answer.artifacts[0].content().decode()


async def test_planner_drives_the_coder_in_one_box_with_the_world(tmp_path: Path, boxes: Boxes) -> None:
    provider, block = boxes
    with composite(tmp_path, block) as running:
        answer = await act(running, "fix the greeting", WORLD)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert "+hello world" in patch(answer)
    assert patch(answer).count("diff --git") == 1
    assert outputs(answer) == ["It says wrld.", "It says world now.", " M greeting.txt\n"]
    seen = answer.observations
    assert (seen["harness"], seen["turns"], seen["tool_calls"]) == ("planner_and_coder", 4, 7)
    assert seen["doors"]["model"]["turns"] == 4 + 6, "the coder's answers too"
    agents = [record for record in seen["records"]["records"] if record["kind"] == "agent_invocation"]
    assert [(made["invocation_id"], made.get("parent_invocation_id")) for made in agents] == [
        ("main", None),
        ("coder", "main"),
    ]
    assert await provider.list({BoxLabel.RUN: RUN}) == []


async def test_coder_sees_what_the_agent_adds_and_no_credential(stack: Stack) -> None:
    answer = await act(stack, "fix the greeting", WORLD)
    log = answer.observations["event_log"]["text"]
    assert "by-the-agent" in log
    assert "'old' is in the file 0 times" in log, "an edit that cannot be made is told"
    for word in ("Bearer", "ng-", "NEMO_GYM"):
        assert word not in log


async def test_limit_of_turns_is_that_of_both_processes_together(stack: Stack) -> None:
    answer = await act(stack, "never stop", WORLD, max_turns=6)
    assert answer.outcome is AgentOutcome.MAX_TURNS, (answer.outcome_detail, answer.observations)
    assert answer.observations["doors"]["model"]["turns"] == 6
    assert "+kept" in patch(answer)


async def test_coder_that_dies_is_a_crash_within_reach_and_its_work_is_kept(stack: Stack) -> None:
    answer = await act(stack, "kill the coder", WORLD, wall_clock_s=120)
    assert answer.outcome is AgentOutcome.CRASHED, (answer.outcome_detail, answer.observations)
    assert "the coder ended with status -9" in (answer.outcome_detail or "")
    assert answer.within_reach
    assert "+kept" in patch(answer)


async def test_planner_uses_the_environments_tools(stack: Stack, weather: Weather) -> None:
    answer = await act(stack, "ask the weather", descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert outputs(answer) == ["Oslo: snow"]


async def test_task_without_a_world_is_done_in_a_box_of_the_agents(stack: Stack) -> None:
    answer = await act(stack, "write the answer", descriptor(Topology.NONE))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert b"42" in answer.artifacts[0].content()


async def test_image_without_python_is_refused_with_the_reason(stack: Stack, local: LocalProvider) -> None:
    box = await local.create(SandboxSpec(image=IMAGE))
    await local.exec(box, "while p=$(command -v python3); do rm -f $p; hash -r; done")
    await local.commit(box, "no-python", {})
    await local.close(box)
    clause = WORLD.sandbox
    assert clause is not None
    assert clause.spec is not None
    bare = SandboxClause(spec=clause.spec.model_copy(update={"image": "no-python"}))
    with pytest.raises(AssertionError, match="no python3, which planner_and_coder needs"):
        await act(stack, "fix the greeting", WORLD.model_copy(update={"sandbox": bare}))


async def test_gateway_shows_a_chain_for_each_process_in_one_session(stack: Stack, tmp_path: Path) -> None:
    client, rollout = stack.client(), WORLD.rollout.model_dump()
    # The engine is the scripted model: a session of its own is an OpenAI-compatible endpoint.
    policy = await (await client.post("policy", "/sessions", json={"rollout": rollout})).json()
    engine = {
        "type": "openai",
        "base_url": policy["base_url"],
        "api_key": policy["inference_token"],
        "model": policy["model"],
    }
    stack.add("gateway", Gateway, Role.MODEL, engines=[engine], journal_dir=str(tmp_path / "journal"))
    client = stack.client()
    opened = await (await client.post("gateway", "/sessions", json={"rollout": rollout})).json()
    assert "base_url" in opened, opened
    asked = ActRequest(
        responses_create_params={"input": "fix the greeting"},
        descriptor=WORLD,
        inference=InferenceEndpoint(
            base_url=opened["base_url"], token=opened["inference_token"], model=opened["model"]
        ),
    )
    reply = await client.post("tiny", "/act", json=asked.model_dump(mode="json"))
    answer = ActResponse.model_validate(await reply.json())
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    headers = {CONTROL_TOKEN_HEADER: opened["control_token"]}
    path = f"/sessions/{opened['session_id']}/finalize"
    finished = await (await client.post("gateway", path, json={}, headers=headers)).json()
    assert finished["turns"] == 10
    chains = finished["trajectories"]
    shown = {chain["messages"][0]["content"][:17]: (len(chain["turns"]), chain["split_reason"]) for chain in chains}
    assert len(chains) == 2
    assert shown == {"You are the plann": (4, "initial"), "You are the coder": (6, "sub_agent")}
