"""Limits that are kept from outside of the box, whatever runs in it: turns, and a model that only fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent import bindings as doors
from nemo_gym.agent.harness.base import HarnessCommand, HarnessContext
from nemo_gym.agent.world import HarnessRun, OutputLimitError, OutputMeter, World, act_in_world
from nemo_gym.contract.sandbox import SandboxResources, SandboxSpec
from nemo_gym.contract.session import (
    ActRequest,
    ActResponse,
    AgentOutcome,
    InferenceEndpoint,
    Limits,
    ResourcesModel,
    SandboxClause,
    SandboxSpecModel,
    Topology,
)
from nemo_gym.sandbox.base import BoxLabel, ExecOutcome
from nemo_gym.sandbox.egress import HarnessNeeds, world_spec
from nemo_gym.sandbox.providers.local import LocalProvider
from tests.harness.conftest import local, local_settings
from tests.harness.stage import DONE, RUN, act, bash, descriptor, plugin, stage, task
from tests.servers.stack import Stack

__all__ = ["local", "local_settings"]

WORLD = descriptor(Topology.AGENT_IN_ENV)
KEEP = "echo kept >> greeting.txt; "
ASK = """
import json, urllib.error, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "never stop"}]}
for _ in range(20):
    try:
        url = "http://127.0.0.1:8000/v1/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), {})).read()
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
"""
TASKS = [
    task("never stop", bash(KEEP), bash("pwd"), repeat_last=True),
    task("ask by itself", bash(f"{KEEP} cat > /tmp/ask.py <<'EOF'\n{ASK}\nEOF\npython3 /tmp/ask.py"), DONE),
    task("server error", bash(KEEP), {**DONE, "fault": {"status": 500, "times": 999}}),
    task("rate limit", bash(KEEP), {**DONE, "fault": {"status": 429, "times": 999, "retry_after_s": 0}}),
    task("three hiccups", bash(KEEP), {**DONE, "fault": {"status": 500, "times": 3}}),
]


@contextmanager
def deaf_agent(directory: Path, settings: dict[str, Any], **config: Any) -> Iterator[Stack]:
    """A CLI that is told of no limit and asks a failing model for ever."""
    agent = plugin(directory / "plugins")

    class Deaf(agent.harness_class):  # type: ignore[name-defined,misc]
        def command(self, context: HarnessContext) -> HarnessCommand:
            command: HarnessCommand = super().command(replace(context, max_turns=None))
            return command

    class DeafAgent(agent):  # type: ignore[valid-type,misc]
        harness_class = Deaf

    sandbox = {"local": settings}
    with stage(directory, sandbox, agent=DeafAgent, tasks=TASKS, harness={"tries": 9999}, **config) as running:
        yield running


@pytest.fixture
def deaf(tmp_path: Path, local: LocalProvider, local_settings: dict[str, Any]) -> Iterator[Stack]:
    with deaf_agent(tmp_path, local_settings, max_model_failures=4) as running:
        yield running


def patch(answer: ActResponse) -> str:
    return answer.artifacts[0].content().decode()


async def test_looping_agent_ends_at_its_turns_and_its_work_is_kept(deaf: Stack, local: LocalProvider) -> None:
    answer = await act(deaf, "never stop", WORLD, max_turns=7, wall_clock_s=60)
    assert (answer.outcome, answer.observations["turns"]) == (AgentOutcome.MAX_TURNS, 7), answer.outcome_detail
    door = answer.observations["doors"]["model"]
    assert (door["turns"], door["answered"]) == (7, 7)
    assert 1 <= door["over_limit"] <= 3, "it may ask again before it is stopped"
    assert "+kept" in patch(answer)
    assert await local.list({BoxLabel.RUN: RUN}) == []


async def test_command_that_asks_the_model_by_itself_gets_no_more_turns(deaf: Stack) -> None:
    answer = await act(deaf, "ask by itself", WORLD, max_turns=5, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MAX_TURNS, answer.outcome_detail
    assert answer.observations["doors"]["model"]["turns"] == 5
    assert "+kept" in patch(answer)


@pytest.mark.parametrize("words", ["server error", "rate limit"])
async def test_model_that_only_fails_ends_the_attempt_early(deaf: Stack, words: str) -> None:
    answer = await act(deaf, words, WORLD, wall_clock_s=300)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, answer.outcome_detail
    assert "stopped after" in (answer.outcome_detail or "")
    assert 4 <= answer.observations["doors"]["model"]["failed"] < 50
    assert not answer.within_reach
    assert "+kept" in patch(answer)


async def test_failures_that_end_before_the_limit_end_nothing(deaf: Stack) -> None:
    answer = await act(deaf, "three hiccups", WORLD, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.COMPLETED, answer.outcome_detail


async def test_limit_holds_where_the_provider_does_not_count(
    tmp_path: Path, local: LocalProvider, local_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "door_statistics", lambda *_: None)
    monkeypatch.setattr(doors, "_model_door", lambda port, inference, _, door=doors._model_door: door(port, inference))
    with deaf_agent(tmp_path, local_settings) as running:
        answer = await act(running, "never stop", WORLD, max_turns=3, wall_clock_s=60)
    assert answer.outcome is AgentOutcome.MAX_TURNS, answer.outcome_detail
    assert answer.observations["turns"] > 3
    assert "+kept" in patch(answer)


async def test_runs_turns_win_over_the_agents_and_over_the_environments(
    tmp_path: Path, local: LocalProvider, local_settings: dict[str, Any]
) -> None:
    with deaf_agent(tmp_path, local_settings, max_turns=3) as running:
        answer = await act(running, "never stop", WORLD, run=Limits(max_turns=5), max_turns=2, wall_clock_s=60)
        lowered = await act(running, "never stop", WORLD, max_turns=2, wall_clock_s=60)
    assert answer.observations["doors"]["model"]["turns"] == 5, answer.outcome_detail
    assert lowered.observations["doors"]["model"]["turns"] == 2, lowered.outcome_detail


async def test_agent_that_writes_more_than_it_may_is_stopped_and_its_work_is_kept(deaf: Stack) -> None:
    answer = await act(deaf, "never stop", WORLD, max_output_bytes=2_000, wall_clock_s=300)
    assert answer.outcome is AgentOutcome.MAX_OUTPUT, answer.outcome_detail
    assert "2000 bytes" in (answer.outcome_detail or "")
    assert answer.observations["turns"] > 0
    assert "+kept" in patch(answer)


async def test_output_of_commands_is_counted_together(local: LocalProvider) -> None:
    box = await local.create(SandboxSpec(image="host"))
    world = World(local, box, SandboxSpec(image="host"), Topology.AGENT_IN_ENV, OutputMeter(1000))
    try:
        for _ in range(2):
            assert len((await world.exec("head -c 400 /dev/zero | tr '\\0' x")).stdout_bytes) == 400
        with pytest.raises(OutputLimitError, match="1000 bytes"):
            await world.exec("head -c 100 /dev/zero | tr '\\0' x; head -c 300000000 /dev/zero | tr '\\0' y >&2")
    finally:
        await local.close(box)


async def test_box_has_the_attempts_memory_whatever_its_spec_says(local: LocalProvider) -> None:
    spec = SandboxSpecModel(image="host", resources=ResourcesModel(memory_mib=2048, unlimited=("cpu",)))
    asked = descriptor(
        Topology.AGENT_IN_ENV,
        sandbox=SandboxClause(spec=spec),
        harvest=(),
        limits=Limits(memory_mib=64, cpu=1),
    )
    inference = InferenceEndpoint(base_url="", token="")
    request = ActRequest(responses_create_params={}, descriptor=asked, inference=inference)
    seen = []

    async def harness(world: World, _: HarnessRun) -> None:
        seen.append(world.spec.resources)
        seen.append((await world.exec("tail -n 7771 /dev/zero", timeout_s=120)).outcome)

    await act_in_world(request, local, harness)
    assert seen == [SandboxResources(memory_mib=64, cpu=1), ExecOutcome.OUT_OF_MEMORY]


def test_limits_of_a_lent_box_are_those_of_its_attempt() -> None:
    spec = SandboxSpec(resources=SandboxResources(memory_mib=2048, pids=9))
    asked = descriptor(Topology.AGENT_IN_ENV, limits=Limits(memory_mib=64))
    assert world_spec(spec, asked, HarnessNeeds()).resources == SandboxResources(memory_mib=64, pids=9)
