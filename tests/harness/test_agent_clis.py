"""Claude Code and Codex themselves, with a scripted policy, in real boxes without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.contract.session import AgentOutcome, McpServer, Topology
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from responses_api_agents.codex_agent.app import CodexAgent
from tests.acceptance.clis.place import installed
from tests.docker_engine import docker_engine
from tests.harness import stage as staging
from tests.harness.conftest import Weather
from tests.harness.stage import DONE, RUN, act, descriptor, outputs, patience_s, stage, task
from tests.servers.stack import Stack

__all__ = ["docker_engine"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LOOK = "cat /proc/[0-9]*/environ | tr '\\0' '\\n'; cat /proc/net/route; id -u"


@dataclass(frozen=True)
class Tools:
    """A CLI, and how its tools are called."""

    agent: type[CliAgent]
    shell: str
    command: str
    settings: dict[str, Any]

    def run(self, command: str, **turn: Any) -> dict[str, Any]:
        return {"text": "Next.", "tool_calls": [{"name": self.shell, "arguments": {self.command: command}}], **turn}

    def tasks(self) -> list[dict[str, Any]]:
        fix = self.run("sed -i s/wrld/world/ greeting.txt; pwd")
        ask = {"tool_calls": [{"name": "mcp__weather__weather", "arguments": {"city": "Oslo"}}]}
        failing = {**DONE, "fault": {"status": 500, "times": 999}}
        return [
            task("fix the greeting", self.run("cat greeting.txt"), fix, DONE),
            task("write the answer", self.run("echo 42 > /tmp/answer.txt"), DONE),
            task("ask the weather", ask, DONE),
            task("look around", self.run(LOOK), DONE),
            task("never stop", fix, self.run("pwd"), repeat_last=True),
            task("hang", fix, {**DONE, "fault": {"hang_s": 600}}),
            task("kill the agent", fix, self.run("kill -9 $PPID; sleep 5"), DONE),
            task("server error", fix, failing),
            task("rate limit", fix, {**DONE, "fault": {"status": 429, "times": 999, "retry_after_s": 0}}),
        ]


CLAUDE = Tools(ClaudeCodeAgent, "Bash", "command", {"max_retries": 1})
CODEX = Tools(CodexAgent, "exec_command", "cmd", {"max_retries": 0})


@pytest.fixture(scope="module", params=[CLAUDE, CODEX], ids=["claude_code", "codex"])
def tools(request: pytest.FixtureRequest) -> Tools:
    found: Tools = request.param
    installed(found.agent.harness_class.package.name)
    return found


@pytest.fixture
def clis(tmp_path: Path, local: SandboxProvider, local_settings: dict[str, Any], tools: Tools) -> Iterator[Stack]:
    settings = {"agent": tools.agent, "tasks": tools.tasks(), "harness": tools.settings}
    with stage(tmp_path, {"local": local_settings}, **settings) as running:
        yield running


@pytest.mark.parametrize("topology", [Topology.AGENT_IN_ENV, Topology.WHOLE_INTERACTION])
async def test_cli_works_in_the_world_and_its_patch_holds_nothing_of_it(
    clis: Stack, local: SandboxProvider, topology: Topology
) -> None:
    answer = await act(clis, "fix the greeting", descriptor(topology))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    patch = answer.artifacts[0].content().decode()
    assert "+hello world" in patch
    assert patch.count("diff --git") == 1
    assert "hello wrld" in outputs(answer)[0]
    seen = answer.observations
    assert (seen["turns"], seen["tool_calls"], seen["doors"]["model"]["answered"]) == (3, 2, 3)
    assert seen["input_tokens"] > 1000
    assert seen["output_tokens"] > 0
    assert await local.list({BoxLabel.RUN: RUN}) == []


async def test_cli_without_a_world_works_in_a_box_of_its_own(clis: Stack, local: SandboxProvider) -> None:
    answer = await act(clis, "write the answer", descriptor(Topology.NONE))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert b"42" in answer.artifacts[0].content()


@pytest.mark.parametrize("topology", [Topology.ENV_SANDBOXED, Topology.AGENT_IN_ENV])
async def test_cli_uses_the_environments_tools(clis: Stack, weather: Weather, topology: Topology) -> None:
    answer = await act(clis, "ask the weather", descriptor(topology, mcp=weather.url, harvest=()))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert outputs(answer) == ["Oslo: snow"], answer.observations
    assert "tools/call" in weather.seen


async def test_run_failed_by_mcp_when_its_token_is_wrong(clis: Stack, weather: Weather) -> None:
    wrong = McpServer(name="weather", url=f"{weather.url}/mcp", headers={"Authorization": "Bearer no"})
    answer = await act(
        clis,
        "ask the weather",
        descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()).model_copy(update={"mcp": (wrong,)}),
    )
    assert answer.outcome is AgentOutcome.MCP_FAILED, (answer.outcome_detail, answer.observations)


async def test_cli_sees_no_credential_and_no_route(clis: Stack) -> None:
    answer = await act(clis, "look around", descriptor(Topology.AGENT_IN_ENV))
    (seen,) = outputs(answer)
    assert "no-key-needed-behind-this-door" in seen
    assert "Iface" in seen
    assert seen.count("00000000\t") == 0, "a route"
    assert "NEMO_GYM" not in seen


async def test_cli_that_waits_is_stopped_at_its_deadline_and_its_work_kept(
    clis: Stack, local: SandboxProvider
) -> None:
    world = descriptor(Topology.AGENT_IN_ENV)
    answer = await act(clis, "hang", world, wall_clock_s=await patience_s(act(clis, "fix the greeting", world)))
    assert answer.outcome is AgentOutcome.TIMED_OUT, (answer.outcome_detail, answer.observations)
    assert "+hello world" in answer.artifacts[0].content().decode()
    assert await local.list({BoxLabel.RUN: RUN}) == []


@pytest.mark.parametrize("fault", ["server error", "rate limit"])
async def test_model_that_keeps_failing_is_unreachable_and_the_work_kept(clis: Stack, fault: str) -> None:
    answer = await act(clis, fault, descriptor(Topology.AGENT_IN_ENV), wall_clock_s=80)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, (answer.outcome_detail, answer.observations)
    assert "+hello world" in answer.artifacts[0].content().decode()


async def test_cli_killed_by_the_policy_has_crashed_within_its_reach(clis: Stack) -> None:
    answer = await act(clis, "kill the agent", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=60)
    assert answer.outcome is AgentOutcome.CRASHED, (answer.outcome_detail, answer.observations)
    assert answer.within_reach
    assert "+hello world" in answer.artifacts[0].content().decode()


async def test_loop_ends_at_the_limit_of_turns(clis: Stack) -> None:
    answer = await act(clis, "never stop", descriptor(Topology.AGENT_IN_ENV), max_turns=4, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MAX_TURNS, answer.outcome_detail
    assert "+hello world" in answer.artifacts[0].content().decode()


@pytest.fixture
async def containers(docker_engine: str) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(base_url=docker_engine)
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


async def test_cli_works_in_containers(
    tmp_path: Path, containers: DockerProvider, docker_engine: str, tools: Tools, weather: Weather
) -> None:
    settings = {"agent": tools.agent, "tasks": tools.tasks()}
    with stage(tmp_path, {"docker": {"base_url": docker_engine}}, **settings) as running:
        answer = await act(running, "fix the greeting", descriptor(Topology.AGENT_IN_ENV))
        assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
        assert "+hello world" in answer.artifacts[0].content().decode()
        answer = await act(running, "ask the weather", descriptor(Topology.ENV_SANDBOXED, mcp=weather.url, harvest=()))
        assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
        assert outputs(answer) == ["Oslo: snow"]
    assert await containers.list({BoxLabel.RUN: RUN}) == []
