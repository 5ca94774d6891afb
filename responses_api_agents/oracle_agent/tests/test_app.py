"""The oracle sees solutions in validation mode only, and says so in everything it returns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    GitDiffHarvest,
    InferenceEndpoint,
    Placement,
    RolloutIdentity,
    SandboxClause,
    SandboxSpecModel,
    SessionDescriptor,
    Topology,
)
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.oracle_agent.app import OracleAgent
from tests.servers.stack import Stack, running_stack

IMAGE = "greeting"
REPOSITORY = """
set -e
mkdir -p /repo && cd /repo && printf 'hello wrld\\n' > greeting.txt
git init -q -b main . && git add -A
git -c user.name=t -c user.email=t@example.invalid commit -q -m first
"""
PATCH = "--- a/greeting.txt\n+++ b/greeting.txt\n@@ -1 +1 @@\n-hello wrld\n+hello world\n"
SOLUTION = {"git_patch": {"path": "/repo", "patch": PATCH}}


@pytest.fixture
async def settings(tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    chosen = {"state_dir": str(tmp_path / "state"), "image_dir": str(tmp_path / "images")}
    local = LocalProvider(**chosen)
    box = await local.create(SandboxSpec(image="host"))
    assert (await local.exec(box, REPOSITORY)).ok
    await local.commit(box, IMAGE, {})
    await local.close(box)
    await local.aclose()
    yield chosen
    await close_global_aiohttp_client()


@pytest.fixture
def stack(settings: dict[str, Any]) -> Iterator[Stack]:
    with running_stack() as running:
        for mode in ("gold", "nothing"):
            running.add(
                mode,
                OracleAgent,
                Role.AGENT,
                resources_server={"type": "resources_servers", "name": "env"},
                sandbox_provider={"local": settings},
                mode=mode,
            )
        yield running


def request(validation: dict[str, Any] | None, *, world: bool = True) -> dict[str, Any]:
    asked = ActRequest(
        responses_create_params={"input": "anything"},
        descriptor=SessionDescriptor(
            environment="env",
            task_id="t",
            rollout=RolloutIdentity(rollout_id="r", task_id="t", group_id="g"),
            placement=Placement(topology=Topology.AGENT_IN_ENV if world else Topology.NONE),
            sandbox=SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo")) if world else None,
            harvest=(GitDiffHarvest(path="/repo"),) if world else (),
        ),
        inference=InferenceEndpoint(base_url="", token=""),
        validation=validation,
    )
    return asked.model_dump(mode="json")


async def act(stack: Stack, mode: Literal["gold", "nothing"], asked: dict[str, Any]) -> ActResponse:
    reply = await stack.client().post(mode, "/act", json=asked)
    body = await reply.json()
    assert reply.status == 200, body
    return ActResponse.model_validate(body)


async def test_gold_applies_the_solution_and_is_labelled(stack: Stack) -> None:
    answer = await act(stack, "gold", request(SOLUTION))
    assert "+hello world" in answer.artifacts[0].content().decode()
    assert answer.validation


async def test_nothing_leaves_the_world_as_it_is_although_it_was_given_the_solution(stack: Stack) -> None:
    answer = await act(stack, "nothing", request(SOLUTION))
    assert answer.artifacts[0].content() == b""
    assert answer.validation


async def test_gold_answers_in_text_where_there_is_no_world(stack: Stack) -> None:
    answer = await act(stack, "gold", request({"text": "42"}, world=False))
    assert answer.response["output"][0]["content"][0]["text"] == "42"


async def test_patch_without_a_box_to_apply_it_in_is_an_error_and_no_empty_answer(stack: Stack) -> None:
    reply = await stack.client().post("gold", "/act", json=request(SOLUTION, world=False))
    body = await reply.json()
    assert reply.status == 502 and "a patch as its gold solution, and no box" in body["detail"]


async def test_oracle_outside_of_validation_mode_is_refused(stack: Stack) -> None:
    reply = await stack.client().post("gold", "/act", json=request(None))
    body = await reply.json()
    assert reply.status == 400
    assert "oracle=gold" in body["detail"]


async def test_solution_that_does_not_apply_is_a_crash_not_a_wrong_answer(stack: Stack) -> None:
    broken = {"git_patch": {"path": "/repo", "patch": PATCH.replace("wrld", "other")}}
    answer = await act(stack, "gold", request(broken))
    assert answer.outcome == "crashed"
    assert "does not apply" in (answer.outcome_detail or "")
