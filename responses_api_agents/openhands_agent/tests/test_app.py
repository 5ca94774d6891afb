"""The OpenHands SDK itself, with a scripted policy, in real boxes without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.provision.fetch import fetch
from nemo_gym.contract.session import AgentOutcome, McpServer, Topology
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.openhands_agent.app import PACKAGE, OpenHandsAgent
from tests.docker_engine import docker_engine
from tests.harness import stage as staging
from tests.harness.conftest import Weather, local, local_settings, weather
from tests.harness.stage import DONE, RUN, act, descriptor, outputs, stage, task
from tests.servers.stack import Stack

__all__ = ["docker_engine", "local", "local_settings", "weather"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LOOK = "cat /proc/[0-9]*/environ | tr '\\0' '\\n'; cat /proc/net/route; command -v python3"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def run(command: str) -> dict[str, Any]:
    return {"text": "Next.", "tool_calls": [call("terminal", command=command)]}


FIX = run("sed -i s/wrld/world/ greeting.txt; pwd")
EDIT = call("file_editor", command="str_replace", path="/repo/greeting.txt", old_str="wrld", new_str="world")
FINISH = {"tool_calls": [call("finish", message="All is done.")]}
TASKS = [
    task("fix the greeting", run("cat greeting.txt"), {"tool_calls": [EDIT]}, FINISH),
    task("write the answer", run("echo 42 > /tmp/answer.txt"), DONE),
    task("ask the weather", {"tool_calls": [call("weather", city="Oslo")]}, DONE),
    task("look around", run(LOOK), DONE),
    task("two at once", {"tool_calls": [call("terminal", command="echo a"), call("weather", city="Oslo")]}, DONE),
    task("call wrongly", {"tool_calls": [call("no_such_tool")]}, {"tool_calls": [call("terminal")]}, DONE),
    task("never stop", FIX, run("pwd"), repeat_last=True),
    task("hang", FIX, {**DONE, "fault": {"hang_s": 60}}),
    task("kill the agent", FIX, run("kill -9 $PPID; sleep 5"), DONE),
    task("server error", FIX, {**DONE, "fault": {"status": 500, "times": 999}}),
    task("one hiccup", FIX, {**DONE, "fault": {"status": 500, "times": 1}}),
    task("rate limit", FIX, {**DONE, "fault": {"status": 429, "times": 999, "retry_after_s": 0}}),
]
SETTINGS: dict[str, Any] = {"agent": OpenHandsAgent, "tasks": TASKS, "harness": {"max_retries": 1}}


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    fetch(PACKAGE)


@pytest.fixture
def boxes(tmp_path: Path, local: SandboxProvider, local_settings: dict[str, Any]) -> Iterator[Stack]:
    with stage(tmp_path, {"local": local_settings}, **SETTINGS) as running:
        yield running


@pytest.mark.parametrize("topology", [Topology.AGENT_IN_ENV, Topology.WHOLE_INTERACTION])
async def test_sdk_works_in_the_world_and_its_patch_holds_nothing_of_it(
    boxes: Stack, local: SandboxProvider, topology: Topology
) -> None:
    answer = await act(boxes, "fix the greeting", descriptor(topology))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    patch = answer.artifacts[0].content().decode()
    assert "+hello world" in patch
    assert patch.count("diff --git") == 1
    assert "hello wrld" in outputs(answer)[0]
    seen = answer.observations
    assert (seen["turns"], seen["tool_calls"], seen["doors"]["model"]["answered"]) == (3, 3, 3)
    assert seen["input_tokens"] > 1000
    assert seen["output_tokens"] > 0
    assert answer.response["output"][-2]["content"][0]["text"] == "All is done."
    assert await local.list({BoxLabel.RUN: RUN}) == []


async def test_sdk_without_a_world_works_in_a_box_of_its_own(boxes: Stack) -> None:
    answer = await act(boxes, "write the answer", descriptor(Topology.NONE))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert b"42" in answer.artifacts[0].content()


@pytest.mark.parametrize("topology", [Topology.ENV_SANDBOXED, Topology.AGENT_IN_ENV])
async def test_sdk_uses_the_environments_tools(boxes: Stack, weather: Weather, topology: Topology) -> None:
    answer = await act(boxes, "ask the weather", descriptor(topology, mcp=weather.url, harvest=()))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert "Oslo: snow" in outputs(answer)[0]
    assert "tools/call" in weather.seen


async def test_calls_of_one_answer_are_one_turn(boxes: Stack, weather: Weather) -> None:
    answer = await act(boxes, "two at once", descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert (answer.observations["turns"], answer.observations["tool_calls"]) == (2, 2)
    assert any("Oslo: snow" in output for output in outputs(answer))


async def test_policy_is_told_when_it_calls_a_tool_wrongly(boxes: Stack) -> None:
    answer = await act(boxes, "call wrongly", descriptor(Topology.AGENT_IN_ENV))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    unknown, incomplete = outputs(answer)
    assert "no_such_tool" in unknown
    assert "command" in incomplete


async def test_run_failed_by_mcp_when_its_token_is_wrong(boxes: Stack, weather: Weather) -> None:
    wrong = McpServer(name="weather", url=f"{weather.url}/mcp", headers={"Authorization": "Bearer no"})
    asked = descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()).model_copy(update={"mcp": (wrong,)})
    answer = await act(boxes, "ask the weather", asked)
    assert answer.outcome is AgentOutcome.MCP_FAILED, (answer.outcome_detail, answer.observations)


async def test_sdk_sees_no_credential_and_no_route_and_leaves_the_images_python(boxes: Stack) -> None:
    answer = await act(boxes, "look around", descriptor(Topology.AGENT_IN_ENV))
    (seen,) = outputs(answer)
    assert "Iface" in seen
    assert seen.count("00000000\t") == 0, "a route"
    assert "NEMO_GYM" not in seen
    assert not any(line.startswith(("PYTHON", "LD_")) for line in seen.splitlines())
    assert PACKAGE.install_dir not in seen.splitlines()[-1]


async def test_sdk_that_waits_is_stopped_at_its_deadline_and_its_work_kept(
    boxes: Stack, local: SandboxProvider
) -> None:
    answer = await act(boxes, "hang", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=20)
    assert answer.outcome is AgentOutcome.TIMED_OUT, (answer.outcome_detail, answer.observations)
    assert "+hello world" in answer.artifacts[0].content().decode()
    assert await local.list({BoxLabel.RUN: RUN}) == []


@pytest.mark.parametrize("fault", ["server error", "rate limit"])
async def test_model_that_keeps_failing_is_unreachable_and_the_work_kept(boxes: Stack, fault: str) -> None:
    answer = await act(boxes, fault, descriptor(Topology.AGENT_IN_ENV), wall_clock_s=80)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, (answer.outcome_detail, answer.observations)
    assert "+hello world" in answer.artifacts[0].content().decode()
    assert answer.observations["doors"]["model"]["requests"] == 3, "one retry"


async def test_one_failure_of_the_model_is_tried_again(boxes: Stack) -> None:
    answer = await act(boxes, "one hiccup", descriptor(Topology.AGENT_IN_ENV))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)


async def test_sdk_killed_by_the_policy_has_crashed_within_its_reach(boxes: Stack) -> None:
    answer = await act(boxes, "kill the agent", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=60)
    assert answer.outcome is AgentOutcome.CRASHED, (answer.outcome_detail, answer.observations)
    assert answer.within_reach
    assert "+hello world" in answer.artifacts[0].content().decode()


async def test_loop_ends_at_the_limit_of_turns(boxes: Stack) -> None:
    answer = await act(boxes, "never stop", descriptor(Topology.AGENT_IN_ENV), max_turns=3, wall_clock_s=60)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.MAX_TURNS, 3), answer.outcome_detail
    assert "+hello world" in answer.artifacts[0].content().decode()


async def test_sdk_ends_a_policy_that_repeats_itself(boxes: Stack) -> None:
    answer = await act(boxes, "never stop", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MAX_TURNS, (answer.outcome_detail, answer.observations)
    assert "repeated itself" in (answer.outcome_detail or "")


@pytest.fixture
async def containers(docker_engine: str) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(base_url=docker_engine)
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


async def test_sdk_works_in_containers(
    tmp_path: Path, containers: DockerProvider, docker_engine: str, weather: Weather
) -> None:
    with stage(tmp_path, {"docker": {"base_url": docker_engine}}, **SETTINGS) as running:
        answer = await act(running, "fix the greeting", descriptor(Topology.AGENT_IN_ENV))
        assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
        assert "+hello world" in answer.artifacts[0].content().decode()
        answer = await act(running, "ask the weather", descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()))
        assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
        assert "Oslo: snow" in outputs(answer)[0]
    assert await containers.list({BoxLabel.RUN: RUN}) == []
