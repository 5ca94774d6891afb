"""The agent over real sockets, with a real box and the scripted model as its policy."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    AgentOutcome,
    FilesHarvest,
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
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_agents.mini_swe_agent.app import MiniSWEAgent
from responses_api_models.scripted_model.app import ScriptedModel
from tests.harness.stage import patience_s
from tests.servers.stack import Stack, running_stack

IMAGE = "greeting"
REPOSITORY = """
set -e
mkdir -p /repo && cd /repo && printf 'hello wrld\\n' > greeting.txt
git init -q -b main . && git add -A
git -c user.name=t -c user.email=t@example.invalid commit -q -m first
"""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str, **turn: Any) -> dict[str, Any]:
    return {"text": "Next.", "tool_calls": [{"name": "bash", "arguments": {"command": command}}], **turn}


SYSTEM_TEXTS = (
    "You are {{ cycler.__init__.__globals__.os.getcwd() }}",
    'Answer as {"x": {{name}} }',
    "A stray {% and {# a remark #}",
)
SCRIPT = {
    "model": "scripted",
    "tasks": [
        {
            "name": "fix",
            "when": {"user": "fix the greeting"},
            "turns": [
                bash("cat greeting.txt; echo ${ADDED:-}"),
                bash("sed -i s/wrld/world/ greeting.txt"),
                bash(SUBMIT),
            ],
        },
        {"name": "hang on", "when": {"user": "hang on"}, "turns": [bash("sleep 300")], "repeat_last": True},
        {"name": "loop", "when": {"user": "never stop"}, "turns": [bash("pwd")], "repeat_last": True},
        {
            "name": "talk",
            "when": {"user": "only talk"},
            "turns": [{"text": "I would rather talk."}],
            "repeat_last": True,
        },
        {
            "name": "slow",
            "when": {"user": "hang please"},
            "turns": [bash("echo kept >> greeting.txt; (setsid sleep 300 &) ; sleep 300"), bash(SUBMIT)],
        },
        {
            "name": "limited",
            "when": {"user": "rate limit"},
            "turns": [bash("true", fault={"status": 429, "retry_after_s": 0}), bash(SUBMIT)],
        },
        {
            "name": "odd",
            "when": {"user": "odd commands"},
            "turns": [
                {"tool_calls": [{"name": "bash", "arguments": {"command": ["ls", "-l"]}}]},
                {"tool_calls": [{"name": "bash", "arguments": '{"command": "echo \\u0000"}'}]},
                {"tool_calls": [{"name": "bash", "arguments": '{"command": "echo \\ud800"}'}]},
                {"tool_calls": [{"name": "bash", "arguments": "not json"}]},
                {"tool_calls": [{"name": "python", "arguments": {"command": "1"}}]},
                bash("echo " + "x" * 200_000 + " | wc -c"),
                bash(SUBMIT),
            ],
        },
        {
            "name": "answer",
            "when": {"user": "what is six times seven", "system": "engineer"},
            "turns": [
                bash("echo $((6 * 7)) | tee answer.txt; pwd; cat /proc/net/tcp"),
                bash(SUBMIT, text="It is \\boxed{42}."),
            ],
        },
        {
            "name": "silent",
            "when": {"user": "silent model"},
            "turns": [bash("true", fault={"hang_s": 600})],
        },
        *(
            {
                "name": system,
                "when": {"user": "as told", "system": rf"\A{re.escape(system)}\Z"},
                "turns": [bash(SUBMIT)],
            }
            for system in SYSTEM_TEXTS
        ),
        {
            "name": "down",
            "when": {"user": "broken model"},
            "turns": [bash("true", fault={"status": 500, "times": 99})],
        },
    ],
}


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    settings = {"state_dir": str(tmp_path / "state"), "image_dir": str(tmp_path / "images")}
    local = LocalProvider(**settings)
    box = await local.create(SandboxSpec(image="host"))
    made = await local.exec(box, REPOSITORY)
    assert made.ok, made.stderr
    await local.commit(box, IMAGE, {})
    await local.close(box)
    await local.aclose()
    yield settings
    await close_global_aiohttp_client()


def settings_of(provider: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(
        (Path(__file__).parents[1] / "configs" / "mini_swe_agent.yaml").read_text()
    )["mini_swe_agent"]["responses_api_agents"]["mini_swe_agent"]
    settings.pop("entrypoint")
    return settings | {
        "resources_server": {"type": "resources_servers", "name": "env"},
        "model_server": {"type": "responses_api_models", "name": "policy"},
        "sandbox_provider": {"local": provider},
        "command_timeout_s": 4,
        "model_max_tries": 2,
    }


@pytest.fixture
def stack(tmp_path: Path, provider: dict[str, Any]) -> Iterator[Stack]:
    script = tmp_path / "script.yaml"
    script.write_text(json.dumps(SCRIPT))
    with running_stack() as running:
        running.add("policy", ScriptedModel, Role.MODEL, script=str(script))
        running.add("mini", MiniSWEAgent, Role.AGENT, ("policy",), **settings_of(provider))
        yield running


async def act(
    stack: Stack,
    task: str,
    *,
    harvest: bool = True,
    topology: Topology = Topology.AGENT_IN_ENV,
    image: str = IMAGE,
    instructions: str | None = None,
    **limits: Any,
) -> ActResponse:
    """In a world with a repository; in topology A, which has none, what is left in the agent's box is harvested."""
    has_world = topology is not Topology.NONE
    collected = GitDiffHarvest(path="/repo") if has_world else FilesHarvest(paths=("/tmp/answer.txt",))
    rollout = RolloutIdentity(rollout_id="r", task_id="t", group_id="g")
    client = stack.client()
    opened = await (await client.post("policy", "/sessions", json={"rollout": rollout.model_dump()})).json()
    asked = ActRequest(
        responses_create_params={"input": [{"role": "user", "content": task}], "instructions": instructions},
        descriptor=SessionDescriptor(
            environment="env",
            task_id="t",
            rollout=rollout,
            placement=Placement(topology=topology),
            sandbox=SandboxClause(spec=SandboxSpecModel(image=image, workdir="/repo")) if has_world else None,
            harvest=(collected,) if harvest else (),
            limits=Limits(**limits),
        ),
        inference=InferenceEndpoint(
            base_url=opened["base_url"], token=opened["inference_token"], model=opened["model"]
        ),
    )
    reply = await client.post("mini", "/act", json=asked.model_dump(mode="json"))
    body = await reply.json()
    assert reply.status == 200, body
    return ActResponse.model_validate(body)


def test_agent_whose_boxes_cannot_be_had_does_not_start() -> None:
    with (
        running_stack() as running,
        pytest.raises(ConfigError, match=r"sandbox provider 'local': unknown key 'hid' \(did you mean 'hide'"),
    ):
        running.add("mini", MiniSWEAgent, Role.AGENT, **settings_of({"hid": []}))


async def test_loop_works_in_the_box_and_its_edit_is_harvested(stack: Stack) -> None:
    answer = await act(stack, "Please fix the greeting")
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.COMPLETED, 3)
    assert "+hello world" in answer.artifacts[0].content().decode()
    kinds = [item["type"] for item in answer.response["output"]]
    assert kinds.count("function_call") == 3
    outputs = [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]
    assert "hello wrld" in outputs[0]


async def test_commands_run_in_a_scratch_box_without_doors_where_there_is_no_world(stack: Stack) -> None:
    answer = await act(stack, "what is six times seven", topology=Topology.NONE)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    (output, *_) = [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]
    assert "/tmp" in output
    listening = [line for line in output.splitlines() if " 0A " in line]
    assert listening == [], "a door"
    assert answer.artifacts[0].content()
    texts = [part["text"] for item in answer.response["output"] for part in item.get("content") or ()]
    assert texts[-1] == "It is \\boxed{42}."


@pytest.mark.parametrize("step_limit", [100, 0])
async def test_turn_limit_of_the_descriptor_ends_the_attempt(stack: Stack, step_limit: int) -> None:
    stack.servers["mini"].config.step_limit = step_limit  # type: ignore[attr-defined]
    answer = await act(stack, "never stop", harvest=False, max_turns=4)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.MAX_TURNS, 4)


async def test_policy_that_only_talks_is_told_and_then_refused(stack: Stack) -> None:
    answer = await act(stack, "only talk", harvest=False)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.REFUSED, 3)


async def test_hung_command_is_killed_with_its_tree_and_its_work_kept(stack: Stack) -> None:
    answer = await act(stack, "hang please")
    assert answer.outcome is AgentOutcome.COMPLETED
    outputs = [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]
    assert "killed after 4 seconds" in outputs[0]
    assert "+kept" in answer.artifacts[0].content().decode()


async def test_wall_clock_ends_the_attempt_and_its_transcript_is_kept(stack: Stack) -> None:
    patience = await patience_s(act(stack, "fix the greeting"))
    answer = await act(stack, "hang on", wall_clock_s=patience)
    assert answer.outcome is AgentOutcome.TIMED_OUT
    assert answer.observations["turns"] >= 1
    assert any(item["type"] == "function_call" for item in answer.response["output"])


async def test_model_that_never_answers_is_unreachable_at_the_wall_clock(stack: Stack) -> None:
    patience = await patience_s(act(stack, "fix the greeting"))
    answer = await act(stack, "silent model", harvest=False, wall_clock_s=patience)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, answer.outcome_detail
    assert "stopped after" in (answer.outcome_detail or "")


@pytest.mark.parametrize("system", SYSTEM_TEXTS)
async def test_system_text_of_a_row_reaches_the_model_as_it_is(stack: Stack, system: str) -> None:
    answer = await act(stack, "as told", harvest=False, instructions=system)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail


async def test_commands_no_shell_can_run_are_answered_and_never_crash_the_harness(stack: Stack) -> None:
    answer = await act(stack, "odd commands", harvest=False)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.COMPLETED, 7), answer.outcome_detail
    outputs = [item["output"] for item in answer.response["output"] if item["type"] == "function_call_output"]
    assert [word in output for word, output in zip(("list", "NUL", "surrogate"), outputs, strict=False)] == [True] * 3
    assert "200001" in outputs[5]


async def test_rate_limit_is_waited_out(stack: Stack) -> None:
    assert (await act(stack, "rate limit", harvest=False)).outcome is AgentOutcome.COMPLETED


async def test_model_that_keeps_failing_is_an_outcome_not_a_reward(stack: Stack) -> None:
    answer = await act(stack, "broken model", harvest=False)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE
    assert "500" in (answer.outcome_detail or "")


async def test_unknown_inference_token_is_model_refused(stack: Stack) -> None:
    rollout = RolloutIdentity(rollout_id="x", task_id="t", group_id="g")
    asked = ActRequest(
        responses_create_params={"input": "fix the greeting"},
        descriptor=SessionDescriptor(
            environment="env",
            task_id="t",
            rollout=rollout,
            placement=Placement(topology=Topology.AGENT_IN_ENV),
            sandbox=SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo")),
        ),
        inference=InferenceEndpoint(base_url=f"{stack.url('policy')}/v1", token="forged"),
    )
    answer = ActResponse.model_validate(await (await stack.client().post("mini", "/act", json=asked)).json())
    assert answer.outcome is AgentOutcome.MODEL_REFUSED
    assert "401" in (answer.outcome_detail or "")
