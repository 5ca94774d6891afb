"""opencode itself, with a scripted policy, in a box whose repository has opencode settings of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.provision import INSTALL_COMMAND, is_installed
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import AgentOutcome, SandboxClause, SandboxSpecModel, Topology
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.opencode_agent.app import PACKAGE, OpencodeAgent
from tests.harness.conftest import local, local_settings
from tests.harness.stage import DONE, REPOSITORY, act, descriptor, outputs, stage, task
from tests.servers.stack import Stack

__all__ = ["local", "local_settings"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

IMAGE = "opencode-settings"
SETTINGS = """
echo 'Write what is asked for.' > AGENTS.md
echo '{"model": "anthropic/claude-opus-4-5", "permission": {"bash": "deny"}}' > opencode.json
mkdir -p .opencode/command && echo 'Review it.' > .opencode/command/review.md
git add -A && git -c user.name=t -c user.email=t@example.invalid commit -q -m second
"""
FIX = {"command": "sed -i s/wrld/world/ greeting.txt", "description": "Fix it"}


@pytest.fixture
async def image(local: LocalProvider) -> None:
    box = await local.create(SandboxSpec(image="host"))
    made = await local.exec(box, REPOSITORY + SETTINGS)
    assert made.ok, made.stderr
    await local.commit(box, IMAGE, {})
    await local.close(box)


@pytest.fixture
def opencode(image: None, tmp_path: Path, local_settings: dict[str, Any]) -> Iterator[Stack]:
    assert is_installed(PACKAGE), f"run: {INSTALL_COMMAND} agents=opencode"
    fix = task("fix the greeting", {"tool_calls": [{"name": "bash", "arguments": FIX}]}, DONE)
    fix["when"]["system"] = "Write what is asked for"
    with stage(tmp_path, {"local": local_settings}, agent=OpencodeAgent, tasks=[fix]) as stack:
        yield stack


async def test_repository_settings_neither_choose_the_model_nor_enter_the_patch(opencode: Stack) -> None:
    world = SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo"))
    answer = await act(opencode, "fix the greeting", descriptor(Topology.AGENT_IN_ENV, sandbox=world))
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert answer.artifacts[0].facts["paths"] == ["greeting.txt"], outputs(answer)
