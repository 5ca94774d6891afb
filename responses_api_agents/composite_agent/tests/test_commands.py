"""Any command as an agent: what it is given, what is read from it, and what its ending means."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.agent.harness.events import Transcript
from nemo_gym.cli.sandbox_check import check_sandbox
from nemo_gym.config.compose import compose
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome, Topology
from nemo_gym.sandbox.base import SandboxProvider
from nemo_gym.sandbox.providers.local import LocalProvider
from responses_api_agents.composite_agent.app import CompositeReader
from responses_api_agents.composite_agent.tests.conftest import EXAMPLE, composite
from tests.harness.stage import act, descriptor

ROOT = Path(__file__).parents[3]
WORLD = descriptor(Topology.WHOLE_INTERACTION)
ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert task == json.load(open(sys.argv[1])) and task["prompt"] == open(sys.argv[2]).read()
body = {"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}
url = os.environ["MODEL"] + "/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["message"]["content"], "$model", os.environ["COST"], json.load(open("$mcp_file")))
"""


async def test_command_gets_the_task_and_its_text_is_the_answer(
    tmp_path: Path, boxes: tuple[SandboxProvider, dict[str, Any]]
) -> None:
    harness = {
        "command": ["python3", "$home/ask.py", "$task_file", "${prompt_file}"],
        "runtime": "python",
        "files": {"$home/ask.py": ASK},
        "env": {"MODEL": "$model_url", "COST": "$$3 $HOME"},
        "stdin": "task",
    }
    with composite(tmp_path, boxes[1], harness=harness) as running:
        answer = await act(running, "say a word", WORLD)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    (said,) = [item["content"][0]["text"] for item in answer.response["output"] if item["type"] == "message"]
    assert said == "A word. scripted $3 $HOME {'mcpServers': {}}"
    assert answer.observations["turns"] == 1, "as the door counted"
    (gap,) = answer.observations["records"]["gaps"]
    assert gap["code"] == "no_turns_in_the_events"


ODD_EVENTS = """
print('{"type": "say", "text": "x", "agent": "a", "parent": "a"}')
print('{"type": "answer", "text": "Done.", "usage": {"input_tokens": 1e30}}')
print('{"type": "say", "text": 5}')
"""


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_run_is_completed_whatever_its_events_say(
    tmp_path: Path,
    local: LocalProvider,
    local_block: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    is_recorded: bool,
) -> None:
    def fail(*arguments: object) -> None:
        raise RecursionError("too deep")

    if not is_recorded:
        monkeypatch.setattr(Transcript, "bundle", fail)
    harness = {
        "command": ["python3", "$home/ask.py", "$task_file", "$prompt_file"],
        "runtime": "python",
        "files": {"$home/ask.py": ASK + ODD_EVENTS},
        "env": {"MODEL": "$model_url", "COST": ""},
        "stdin": "task",
    }
    with composite(tmp_path, local_block, harness=harness) as running:
        answer = await act(running, "say a word", WORLD)
    assert answer.outcome is AgentOutcome.COMPLETED, (answer.outcome_detail, answer.observations)
    assert [item["content"][0]["text"] for item in answer.response["output"]] == ["Done.", "5"]
    assert answer.response["usage"]["input_tokens"] == 2**53
    assert ("records" in answer.observations) is is_recorded
    assert answer.observations.get("observations_error") == (None if is_recorded else "RecursionError: too deep")


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("exit 3", AgentOutcome.MAX_TURNS),
        ("exit 4", AgentOutcome.CRASHED),
        ("""echo '{"type": "end", "outcome": "refused"}'; exit 1""", AgentOutcome.REFUSED),
        ("""echo '{"type": "end", "outcome": "completed"}'; exit 1""", AgentOutcome.CRASHED),
        ("""echo '{"type": "end", "outcome": "model_unreachable"}'; exit 1""", AgentOutcome.CRASHED),
        ("""echo '{"type": "end", "outcome": "completed"}'""", AgentOutcome.CRASHED),  # it never asked the model
    ],
)
async def test_ending_is_what_status_and_events_say_unless_the_door_knows_better(
    tmp_path: Path, local: LocalProvider, local_block: dict[str, Any], script: str, outcome: AgentOutcome
) -> None:
    harness = {"command": ["sh", "-c", f"echo kept >> greeting.txt; {script}"], "outcomes": {3: "max_turns"}}
    with composite(tmp_path, local_block, harness=harness) as running:
        answer = await act(running, "say a word", WORLD)
    assert answer.outcome is outcome, answer.outcome_detail
    assert "+kept" in answer.artifacts[0].content().decode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"program": "no/such/place"}, "harness.program: there is no directory .*no/such/place"),
        ({"command": []}, "command: .*at least 1"),
        ({"command": ["x", "$modle_url"]}, r"'\$modle_url' in '\$modle_url' is not known .did you mean 'model_url'"),
        ({"files": {"ask.py": ""}}, "files: 'ask.py' is not an absolute path"),
        ({"outcomes": {1: "model_unreachable"}}, "exit status 1 cannot mean 'model_unreachable'"),
        (
            {"comand": ["x"]},
            r"unknown key '\S+harness.comand' .did you mean 'command'.*it takes: name, version, program",
        ),
    ],
)
def test_wrong_setting_is_refused_when_the_server_starts(
    tmp_path: Path, local_block: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words), composite(tmp_path, local_block, harness={**EXAMPLE, **changes}):
        pass


@pytest.mark.parametrize("sandbox", ["local", "docker"])
def test_nested_boxes_are_refused_at_composition_with_the_reason(sandbox: str, docker_engine: str) -> None:
    words = ["agent=composite", "environment=swe_bench", f"sandbox={sandbox}", "model=scripted"]
    wanted = "++composite_agent.responses_api_agents.composite_agent.requires=[nested_containers]"
    fitting = compose([*words, "topology=whole_interaction"], roots=(ROOT,))
    check_sandbox(fitting, Topology.WHOLE_INTERACTION)
    composition = compose([*words, "topology=whole_interaction", wanted], roots=(ROOT,))
    with pytest.raises(ConfigError, match="cannot serve 'composite_agent' on this machine: nested_containers: "):
        check_sandbox(composition, Topology.WHOLE_INTERACTION)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "responses_api_agents/composite_agent/example").glob("*.py")), ids=lambda path: path.name
)
def test_example_is_written_for_the_pythons_of_old_images(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 6))


def test_events_of_all_parts_become_one_transcript() -> None:
    reader = CompositeReader()
    for line in (
        b'{"type": "answer", "text": "I plan.", "reasoning": "Hm.", "usage": {"input_tokens": 7, "output_tokens": 2}}',
        b'{"type": "call", "id": 1, "name": "delegate", "arguments": {"step": "look"}}',
        b'{"type": "answer", "agent": "coder", "text": "I look.", "usage": {"input_tokens": 5}}',
        b'{"type": "call", "agent": "coder", "id": "a", "name": "bash", "arguments": "{}"}',
        b'{"type": "result", "agent": "coder", "id": "a", "output": "x", "failed": true}',
        b'{"type": "answer", "agent": "helper", "parent": "coder", "text": ""}',
        b'{"type": "result", "id": 1, "output": {"found": 1}}',
        b"some noise",
        b'{"type": "surprise"}',
        b'{"type": "end", "outcome": "mcp_failed"}',
        b'{"type": "say", "text": "Done."}',
        b'{"type": "end", "outcome": "max_turns", "detail": "enough"}',
    ):
        reader.feed(line)
    reader.finish()
    transcript = reader.transcript
    assert (transcript.turns, transcript.tool_calls, reader.claim, reader.detail) == (1, 2, "max_turns", "enough")
    assert (transcript.usage["input_tokens"], transcript.final_text) == (12, "Done.")
    kinds = [item["type"] for item in transcript.items]
    assert kinds == ["reasoning", "message", "function_call", "function_call_output", "message"]
    bundle = transcript.bundle("t").model_dump(mode="json")
    parents = [record["parent_invocation_id"] for record in bundle["records"] if record["kind"] == "agent_invocation"]
    assert parents == [None, "main", "coder"]
    assert [gap["code"] for gap in bundle["gaps"]] == ["unreadable_event"]
