"""An agent from a folder the suite has never seen, in every topology, in real boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome, SandboxClause, SandboxSpecModel, Topology
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.codex_agent.app import CodexAgent
from tests.architecture.docs import example_files
from tests.harness.conftest import Weather
from tests.harness.stage import IMAGE, RUN, act, descriptor, outputs, stage
from tests.servers.stack import Stack


@pytest.mark.parametrize("topology", [Topology.AGENT_IN_ENV, Topology.WHOLE_INTERACTION])
async def test_agent_works_in_the_world_and_its_patch_holds_nothing_of_the_harness(
    stack: Stack, local: LocalProvider, topology: Topology
) -> None:
    answer = await act(stack, "fix the greeting", descriptor(topology))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    patch = answer.artifacts[0].content().decode()
    assert "+hello world" in patch
    assert patch.count("diff --git") == 1
    assert "hello wrld" in outputs(answer)[0]
    assert "/repo" in outputs(answer)[1]
    assert await local.list({BoxLabel.RUN: RUN}) == []


async def test_proxy_of_the_image_does_not_stand_between_the_agent_and_its_model(stack: Stack) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "internal.example"}
    world = SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo", env=proxies))
    answer = await act(stack, "look around", descriptor(Topology.AGENT_IN_ENV, sandbox=world))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert "NO_PROXY=localhost,127.0.0.1,::1,internal.example\n" in outputs(answer)[0]


async def test_agent_without_a_world_works_in_a_box_of_its_own(stack: Stack, local: LocalProvider) -> None:
    answer = await act(stack, "write the answer", descriptor(Topology.NONE))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert b"42" in answer.artifacts[0].content()
    assert await local.list({BoxLabel.RUN: RUN}) == []


@pytest.mark.parametrize("topology", [*Topology])
async def test_environments_tools_are_reached_by_mcp_from_every_box(
    stack: Stack, weather: Weather, topology: Topology
) -> None:
    harvest = () if topology is Topology.NONE else descriptor(topology).harvest
    answer = await act(stack, "ask the weather", descriptor(topology, mcp=weather.url, harvest=harvest))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert outputs(answer) == ["Oslo: snow"]
    assert weather.seen == ["initialize", "tools/list", "tools/call"]


async def test_every_run_has_the_same_observation_record(stack: Stack) -> None:
    answer = await act(stack, "fix the greeting", descriptor(Topology.AGENT_IN_ENV))
    seen = answer.observations
    assert (seen["turns"], seen["tool_calls"], seen["harness"], seen["harness_version"]) == (3, 2, "tiny", "1")
    assert seen["input_tokens"] > 0
    assert seen["doors"]["model"]["answered"] == 3
    kinds = [record["kind"] for record in seen["records"]["records"]]
    assert kinds == ["agent_invocation", "tool_call", "tool_call"]
    assert seen["records"]["records"][0]["status"] == "completed"
    assert '"type": "end"' in seen["event_log"]["text"]
    assert [item["type"] for item in answer.response["output"]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


async def test_box_holds_no_credential_and_no_way_out(stack: Stack, weather: Weather) -> None:
    answer = await act(stack, "look around", descriptor(Topology.AGENT_IN_ENV, mcp=weather.url))
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail
    (seen,) = outputs(answer)
    assert "HOME=/var/tmp/nemo-gym-agent" in seen
    for word in ("Bearer", "ng-", "mcp-of-this-attempt", "NEMO_GYM"):
        assert word not in seen
    assert [line for line in seen.splitlines() if line.startswith(("eth", "wlan", "en"))] == []


def test_cli_agent_of_the_documentation_takes_less_than_a_hundred_lines() -> None:
    app = example_files("add-an-agent.md")["responses_api_agents/tiny_agent/app.py"]
    assert "harness_class" in app
    assert len(app.splitlines()) < 100


def test_setting_the_harness_does_not_know_is_refused_with_those_it_does(
    tmp_path: Path, local_settings: dict[str, Any]
) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"unknown key '\S+\.harness\.trys' \(did you mean 'tries'\?\); it takes: tries"
        ),
        stage(tmp_path, {"local": local_settings}, harness={"trys": 1}),
    ):
        pass


def test_agent_whose_cli_was_not_fetched_does_not_start(
    tmp_path: Path, local_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "empty"))
    with (
        pytest.raises(ConfigError, match=r"the agent CLI 'codex' .* is not in .*empty; run: ng_prepare agents"),
        stage(tmp_path, {"local": local_settings}, agent=CodexAgent),
    ):
        pass


def test_agent_whose_boxes_cannot_be_had_does_not_start(tmp_path: Path, local_settings: dict[str, Any]) -> None:
    with (
        pytest.raises(ConfigError, match=r"sandbox provider 'local': unknown key 'state_dri' \(did you mean"),
        stage(tmp_path, {"local": {**local_settings, "state_dri": "/x"}}),
    ):
        pass


async def test_topology_b_without_mcp_is_refused_with_what_would_work(stack: Stack) -> None:
    with pytest.raises(AssertionError, match="use topology=agent_in_env"):
        await act(stack, "fix the greeting", descriptor(Topology.ENV_SANDBOXED))
