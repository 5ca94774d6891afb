"""The limits that are kept from outside of the box, with CLIs that know none or ask a failing model for very long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.provision import INSTALL_COMMAND, is_installed
from nemo_gym.contract.session import AgentOutcome, Topology
from nemo_gym.sandbox.base import BoxLabel
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from responses_api_agents.codex_agent.app import CodexAgent
from responses_api_agents.opencode_agent.app import OpencodeAgent
from responses_api_agents.openhands_agent.app import OpenHandsAgent
from responses_api_agents.qwen_code_agent.app import QwenCodeAgent
from tests.harness.conftest import local, local_settings
from tests.harness.stage import DONE, RUN, act, descriptor, outputs, stage, task
from tests.servers.stack import Stack

__all__ = ["local", "local_settings"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

WORLD = descriptor(Topology.AGENT_IN_ENV)
FIX = "echo hello world > greeting.txt"  # some CLIs refuse sed -i on a file that was not read


@dataclass(frozen=True)
class Cli:
    """A CLI, and how its shell tool is called."""

    agent: type[CliAgent]
    shell: str
    command: str = "command"
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, command: str) -> dict[str, Any]:
        arguments = {self.command: command, **self.arguments}
        return {"text": "Next.", "tool_calls": [{"name": self.shell, "arguments": arguments}]}

    def tasks(self) -> list[dict[str, Any]]:
        failing = {**DONE, "fault": {"status": 500, "times": 9999}}
        return [
            task("never stop", self.run(FIX), self.run("pwd"), repeat_last=True),
            task("server error", self.run(FIX), failing),
        ]


CLIS = {
    "claude_code": Cli(ClaudeCodeAgent, "Bash"),
    "codex": Cli(CodexAgent, "exec_command", "cmd"),
    "opencode": Cli(OpencodeAgent, "bash", arguments={"description": "Run a command"}),
    "openhands": Cli(OpenHandsAgent, "terminal"),
    "qwen_code": Cli(QwenCodeAgent, "run_shell_command", arguments={"is_background": False}),
}


@pytest.fixture(params=CLIS)
def clis(
    request: pytest.FixtureRequest, tmp_path: Path, local: LocalProvider, local_settings: dict[str, Any]
) -> Iterator[Stack]:
    cli = CLIS[request.param]
    assert is_installed(cli.agent.harness_class.package), f"run: {INSTALL_COMMAND} agents={request.param}"
    with stage(tmp_path, {"local": local_settings}, agent=cli.agent, tasks=cli.tasks(), max_model_failures=4) as stack:
        yield stack


async def test_looping_cli_ends_at_its_turn_limit_with_its_work_kept(clis: Stack, local: LocalProvider) -> None:
    answer = await act(clis, "never stop", WORLD, max_turns=6, wall_clock_s=240)
    assert answer.outcome is AgentOutcome.MAX_TURNS, (answer.outcome_detail, answer.observations)
    assert answer.observations["doors"]["model"]["turns"] <= 6
    assert "+hello world" in answer.artifacts[0].content().decode(), outputs(answer)
    assert await local.list({BoxLabel.RUN: RUN}) == []


async def test_cli_whose_model_only_fails_ends_before_its_deadline(clis: Stack, local: LocalProvider) -> None:
    answer = await act(clis, "server error", WORLD, wall_clock_s=500)
    assert answer.outcome is AgentOutcome.MODEL_UNREACHABLE, (answer.outcome_detail, answer.observations)
    assert answer.observations["doors"]["model"]["failed"] <= 8
    assert answer.observations["seconds"] < 250
    assert "+hello world" in answer.artifacts[0].content().decode(), outputs(answer)
    assert await local.list({BoxLabel.RUN: RUN}) == []
