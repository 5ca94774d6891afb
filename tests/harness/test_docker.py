"""The unseen agent in containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.agent.world import Harness, HarnessRun, World, act_in_world
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    AgentOutcome,
    InferenceEndpoint,
    McpServer,
    SandboxClause,
    SandboxSpecModel,
    Topology,
)
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from tests.docker_engine import docker_engine
from tests.harness import stage as staging
from tests.harness.conftest import Weather
from tests.harness.stage import RUN, act, descriptor, outputs, patience_s
from tests.servers.stack import Stack

__all__ = ["docker_engine"]


@pytest.fixture
async def docker(docker_engine: str) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(base_url=docker_engine)
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


@pytest.fixture
def stack(tmp_path: Path, docker: DockerProvider, docker_engine: str) -> Iterator[Stack]:
    with staging.stage(tmp_path, {"docker": {"base_url": docker_engine}}) as running:
        yield running


async def test_agent_works_in_the_world_and_its_patch_holds_nothing_of_the_harness(
    stack: Stack, docker: DockerProvider
) -> None:
    answer = await act(stack, "fix the greeting", descriptor(Topology.AGENT_IN_ENV))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    patch = answer.artifacts[0].content().decode()
    assert "+hello world" in patch
    assert patch.count("diff --git") == 1
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def act_in_small_world(docker: DockerProvider, harness: Harness) -> ActResponse:
    """Run a harness in a box that may write 0.05 GiB."""
    spec = SandboxSpecModel.model_validate(
        {"image": staging.IMAGE, "workdir": "/repo", "resources": {"disk_gib": 0.05}}
    )
    request = ActRequest(
        responses_create_params={"input": "do it"},
        descriptor=descriptor(Topology.AGENT_IN_ENV, sandbox=SandboxClause(spec=spec)),
        inference=InferenceEndpoint(base_url="http://127.0.0.1:9/v1", token="token"),
    )
    return await act_in_world(request, docker, harness)


async def test_box_that_was_ended_for_what_its_policy_wrote_is_a_crash_to_be_graded(docker: DockerProvider) -> None:
    async def fills_the_disk(world: World, run: HarnessRun) -> None:
        await world.exec("head -c 200000000 /dev/zero > /repo/big; sleep 600")

    answer = await act_in_small_world(docker, fills_the_disk)
    assert (answer.outcome, answer.within_reach) == (AgentOutcome.CRASHED, True)
    assert "its limit disk_gib allows 53687091" in (answer.outcome_detail or "")
    assert [artifact.error for artifact in answer.artifacts] == [answer.outcome_detail]
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_work_that_its_harvest_box_has_no_disk_for_is_graded_without_it(docker: DockerProvider) -> None:
    async def writes_much(world: World, run: HarnessRun) -> None:
        done = await world.exec("for i in 1 2 3; do head -c 14000000 /dev/urandom > /repo/$i; done")
        assert done.ok, done

    (artifact,) = (await act_in_small_world(docker, writes_much)).artifacts
    assert "its limit disk_gib allows 53687091" in (artifact.error or "")
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_environments_tools_are_reached_from_a_scratch_box(stack: Stack, weather: Weather) -> None:
    answer = await act(stack, "ask the weather", descriptor(Topology.ENV_SANDBOXED, mcp=weather.url))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert outputs(answer) == ["Oslo: snow"]


async def test_daemons_neither_hold_the_run_up_nor_outlive_the_box(stack: Stack, docker: DockerProvider) -> None:
    answer = await act(stack, "fork daemons", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=30)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert "+kept" in answer.artifacts[0].content().decode()
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_daemon_that_holds_the_output_open_does_not_hold_the_run_up(
    stack: Stack, docker: DockerProvider
) -> None:
    answer = await act(stack, "hold the output", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=200)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    assert "+kept" in answer.artifacts[0].content().decode()
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_agent_that_is_stopped_is_ended_at_its_deadline_and_its_work_kept(
    stack: Stack, docker: DockerProvider
) -> None:
    world = descriptor(Topology.AGENT_IN_ENV)
    patience = await patience_s(act(stack, "fix the greeting", world))
    answer = await act(stack, "stop the agent", world, wall_clock_s=patience)
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert "+kept" in answer.artifacts[0].content().decode()
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_wrong_mcp_token_is_mcp_failed(stack: Stack, weather: Weather) -> None:
    wrong = McpServer(name="weather", url=f"{weather.url}/mcp", headers={"Authorization": "Bearer wrong"})
    world = descriptor(Topology.AGENT_IN_ENV).model_copy(update={"mcp": (wrong,)})
    answer = await act(stack, "write the answer", world)
    assert answer.outcome is AgentOutcome.MCP_FAILED, answer.outcome_detail


async def test_hanging_agent_is_stopped_at_its_deadline_and_its_work_kept(
    stack: Stack, docker: DockerProvider
) -> None:
    world = descriptor(Topology.AGENT_IN_ENV)
    answer = await act(stack, "hang", world, wall_clock_s=await patience_s(act(stack, "fix the greeting", world)))
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert "+kept" in answer.artifacts[0].content().decode()
    assert await docker.list({BoxLabel.RUN: RUN}) == []


async def test_model_that_keeps_failing_is_unreachable(stack: Stack) -> None:
    answer = await act(stack, "server error", descriptor(Topology.AGENT_IN_ENV), wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, answer.outcome_detail
