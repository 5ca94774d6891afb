"""CLIs themselves, with a scripted policy, in a box whose repository has settings for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.agent import CliAgent
from nemo_gym.agent.harness.provision import INSTALL_COMMAND, is_installed
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import AgentOutcome, SandboxClause, SandboxSpecModel, Topology
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.claude_code_agent.app import ClaudeCodeAgent
from responses_api_agents.opencode_agent.app import OpencodeAgent
from tests.harness.stage import DONE, REPOSITORY, act, descriptor, outputs, stage, task
from tests.servers.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

IMAGE = "own-settings"
RULE = "Write what is asked for."
SETTINGS = f"""
echo '{RULE}' | tee AGENTS.md > CLAUDE.md
echo '{{"model": "anthropic/claude-opus-4-5", "permission": {{"bash": "deny"}}}}' > opencode.json
mkdir -p .opencode/command && echo 'Review it.' > .opencode/command/review.md
mkdir .claude && cat > .claude/settings.json << 'END'
{{"env": {{"CLAUDE_CODE_USE_BEDROCK": "1"}}, "permissions": {{"deny": ["Bash"]}},
 "hooks": {{"Stop": [{{"hooks": [{{"type": "command", "command": "exit 2"}}]}}]}}}}
END
git add -A && git -c user.name=t -c user.email=t@example.invalid commit -q -m second
"""


@dataclass(frozen=True)
class Cli:
    """A CLI, its shell tool, and where it writes the repository's rules."""

    agent: type[CliAgent]
    shell: str
    rules: str


CLIS = {"claude_code": Cli(ClaudeCodeAgent, "Bash", "user"), "opencode": Cli(OpencodeAgent, "bash", "system")}


@pytest.fixture
async def image(local: LocalProvider) -> None:
    box = await local.create(SandboxSpec(image="host"))
    made = await local.exec(box, REPOSITORY + SETTINGS)
    assert made.ok, made.stderr
    await local.commit(box, IMAGE, {})
    await local.close(box)


@pytest.fixture(params=CLIS)
def clis(
    request: pytest.FixtureRequest, image: None, tmp_path: Path, local_settings: dict[str, Any]
) -> Iterator[Stack]:
    cli = CLIS[request.param]
    assert is_installed(cli.agent.harness_class.package), f"run: {INSTALL_COMMAND} agents={request.param}"
    arguments = {"command": "sed -i s/wrld/world/ greeting.txt", "description": "Fix it"}
    fix = task("fix the greeting", {"tool_calls": [{"name": cli.shell, "arguments": arguments}]}, DONE)
    fix["when"][cli.rules] = RULE
    with stage(tmp_path, {"local": local_settings}, agent=cli.agent, tasks=[fix]) as stack:
        yield stack


async def test_repository_gives_rules_but_no_settings_and_its_patch_holds_nothing_of_the_cli(clis: Stack) -> None:
    world = SandboxClause(spec=SandboxSpecModel(image=IMAGE, workdir="/repo"))
    asked = descriptor(Topology.AGENT_IN_ENV, sandbox=world)
    answer = await act(clis, "fix the greeting", asked, wall_clock_s=120)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert answer.artifacts[0].facts["paths"] == ["greeting.txt"], outputs(answer)
