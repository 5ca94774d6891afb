"""One attempt in a real box: what it leaves is harvested, and nothing else is left, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.agent.bindings import prompt_text, response_object, text_message
from nemo_gym.agent.world import Harness, HarnessRun, World, act_in_world
from nemo_gym.contract.errors import AgentError, ConfigError, ModelError, RowError, SandboxLostError
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    AgentOutcome,
    GitDiffHarvest,
    InferenceEndpoint,
    Limits,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.providers.local import LocalProvider
from tests.harness.stage import patience_s
from tests.topology.conftest import IMAGE

ROLLOUT = RolloutIdentity(rollout_id="r", task_id="t", group_id="g", run_id="world-tests")


def act_request(base_url: str = "http://127.0.0.1:9/v1", **changes: Any) -> ActRequest:
    fields: dict[str, Any] = {
        "environment": "env",
        "task_id": "t",
        "rollout": ROLLOUT,
        "placement": Placement(topology=Topology.AGENT_IN_ENV),
        "sandbox": SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo")),
        "harvest": (GitDiffHarvest(path="/repo"),),
        **changes,
    }
    return ActRequest(
        responses_create_params={"input": "do it"},
        descriptor=SessionDescriptor(**fields),
        inference=InferenceEndpoint(base_url=base_url, token="attempt-token"),
    )


async def act(provider: LocalProvider, harness: Harness, **changes: Any) -> ActResponse:
    return await act_in_world(act_request(**changes), provider, harness)


async def boxes(provider: LocalProvider) -> list[str]:
    return [info.sandbox_id for info in await provider.list({BoxLabel.RUN: "world-tests"})]


async def edit(world: World, run: HarnessRun) -> None:
    result = await world.exec("echo two >> kept.txt; rm dropped.txt; printf '\\0\\1' > new.bin")
    assert result.ok, result.stderr
    run.response = response_object([text_message("edited")], model="test")


async def test_harness_changes_are_harvested_and_the_box_is_gone(provider: LocalProvider) -> None:
    answer = await act(provider, edit)
    assert answer.outcome is AgentOutcome.COMPLETED
    (artifact,) = answer.artifacts
    patch = artifact.content().decode()
    assert "+two" in patch
    assert "deleted file mode" in patch
    assert "GIT binary patch" in patch
    assert await boxes(provider) == []


async def test_work_done_before_the_wall_clock_ran_out_is_harvested(provider: LocalProvider) -> None:
    async def slow(world: World, run: HarnessRun) -> None:
        await edit(world, run)
        await world.exec("sleep 600")

    patience = await patience_s(act(provider, edit))
    answer = await act(provider, slow, limits=Limits(wall_clock_s=patience))
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert "+two" in answer.artifacts[0].content().decode()
    assert await boxes(provider) == []


async def test_attempt_that_never_asked_its_model_is_not_graded(provider: LocalProvider) -> None:
    async def slow(world: World, run: HarnessRun) -> None:
        run.model = DoorStatistics()
        await world.exec("sleep 600")

    patience = await patience_s(act(provider, edit))
    answer = await act(provider, slow, limits=Limits(wall_clock_s=patience))
    assert answer.outcome is AgentOutcome.CRASHED and "never asked the model" in (answer.outcome_detail or "")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModelError("no answer"), AgentOutcome.MODEL_UNREACHABLE),
        (AgentError("bad exit"), AgentOutcome.CRASHED),
        (ZeroDivisionError("foreign code"), AgentOutcome.CRASHED),
    ],
)
async def test_failing_harness_is_an_outcome_and_its_work_is_kept(
    provider: LocalProvider, error: Exception, outcome: AgentOutcome
) -> None:
    async def failing(world: World, run: HarnessRun) -> None:
        await edit(world, run)
        raise error

    answer = await act(provider, failing)
    assert answer.outcome is outcome
    assert "+two" in answer.artifacts[0].content().decode()


async def test_cancelled_act_leaves_no_box(provider: LocalProvider) -> None:
    started = asyncio.Event()

    async def waiting(world: World, run: HarnessRun) -> None:
        started.set()
        await world.exec("sleep 600")

    acting = asyncio.create_task(act(provider, waiting))
    await asyncio.wait_for(started.wait(), 60)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    assert await boxes(provider) == []


async def test_box_that_vanishes_is_lost_and_no_outcome(provider: LocalProvider) -> None:
    async def destroyed(world: World, run: HarnessRun) -> None:
        await provider.reap({BoxLabel.RUN: "world-tests"})
        await world.exec("true")

    with pytest.raises(SandboxLostError):
        await act(provider, destroyed)


async def test_model_is_reached_through_the_door_with_a_token_the_box_never_sees(provider: LocalProvider) -> None:
    seen: list[str] = []

    async def models(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    output: list[str] = []

    async def ask(world: World, run: HarnessRun) -> None:
        fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/v1/models', timeout=20).read())"
        result = await world.exec(["/usr/bin/python3", "-c", fetch])
        environment = await world.exec("cat /proc/*/environ")
        output.extend([result.stdout or "", result.stderr or "", environment.stdout or ""])

    try:
        await act_in_world(act_request(f"http://127.0.0.1:{port}/v1"), provider, ask)
    finally:
        await runner.cleanup()
    assert "data" in output[0], output
    assert seen == ["Bearer attempt-token"]
    assert "attempt-token" not in output[2]


async def test_attempt_whose_model_never_answers_is_unreachable_at_the_wall_clock(provider: LocalProvider) -> None:
    asked = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async def ask(world: World, run: HarnessRun) -> None:
        fetch = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v1/models', timeout=600)"
        await world.exec(["/usr/bin/python3", "-c", fetch])

    patience = await patience_s(act(provider, edit))
    async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        answer = await act_in_world(act_request(url, limits=Limits(wall_clock_s=patience)), provider, ask)
    assert asked.is_set()
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, answer.outcome_detail


async def test_unserved_topology_is_refused_with_the_ones_that_work(provider: LocalProvider) -> None:
    with pytest.raises(ConfigError, match="it serves agent_in_env"):
        await act(provider, edit, placement=Placement(topology=Topology.WHOLE_INTERACTION))
    assert await boxes(provider) == []


def test_prompt_is_the_text_of_its_system_and_user_messages() -> None:
    parts = [{"type": "input_text", "text": "Fix"}, {"type": "text", "text": " it."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert prompt_text({"instructions": "Be kind.", "input": messages}) == ("Be kind.\n\nBe brief.", "Fix it.")
    assert prompt_text({"input": "Fix it."}) == ("", "Fix it.")


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"role": "assistant", "content": "I did it."}, r"input\[1\] is a turn of the assistant"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, "of type 'function_call'"),
        ({"type": "function_call_output", "call_id": "c", "output": "x"}, "of type 'function_call_output'"),
        ({"role": "tool", "content": "x"}, "a turn of the tool"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image"}]},
            r"input\[1\]\.content\[1\] is of type 'input_image'",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "of type 'input_file'"),
    ],
)
def test_part_of_a_prompt_that_a_text_harness_cannot_be_given_is_refused_by_name(
    item: dict[str, Any], said: str
) -> None:
    with pytest.raises(RowError, match=f"{said}.*simple_agent"):
        prompt_text({"input": [{"role": "user", "content": "Look."}, item]})
