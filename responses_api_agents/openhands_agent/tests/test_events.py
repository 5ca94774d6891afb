"""What the conversation in the box tells, as the transcript and the outcome of the attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_gym.agent.harness.base import HarnessContext, HarnessEnded, McpEndpoint
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome
from responses_api_agents.openhands_agent.app import OpenHands, OpenHandsReader

CONTEXT = HarnessContext(
    prompt="fix it",
    system="Be brief.",
    model="policy",
    model_url="http://127.0.0.1:8900",
    mcp=(McpEndpoint("weather", "http://127.0.0.1:8100/mcp"),),
    home="/var/tmp/home",
    workdir="/repo",
    install_dir="/opt/nemo-gym/agents/openhands",
    executable="/opt/nemo-gym/agents/openhands/bin/python",
    session_uuid="u",
    max_turns=7,
)


def action(response: str, call: str, **fields: Any) -> dict[str, Any]:
    given = {"text": "", "reasoning": "", "tool": "terminal", "arguments": '{"command": "ls"}', "message": None}
    return {"type": "action", "response": response, "call": call, **given, **fields}


def read(*events: dict[str, Any]) -> OpenHandsReader:
    reader = OpenHandsReader()
    for event in events:
        reader.feed(json.dumps(event).encode())
    return reader


def test_calls_with_one_response_are_one_turn() -> None:
    reader = read(
        action("r1", "c1", text="Both.", reasoning="Hm."),
        action("r1", "c2"),
        {"type": "observation", "call": "c2", "text": "no", "failed": True},
        {"type": "observation", "call": "c1", "text": "yes", "failed": False},
        {"type": "condensation"},
        {"type": "usage", "input_tokens": 10, "output_tokens": 2, "cached_tokens": 1},
        {"type": "usage", "input_tokens": 30, "output_tokens": 5, "cached_tokens": 1},
        action("r2", "c3", tool="finish", message="All done."),
    )
    transcript = reader.transcript
    assert (transcript.turns, transcript.tool_calls, transcript.final_text) == (2, 3, "All done.")
    assert transcript.usage == {"input_tokens": 30, "output_tokens": 5, "cached_tokens": 1}
    kinds = [item["type"] for item in transcript.items]
    assert kinds == [
        *("reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "function_call", "message"),
    ]


@pytest.mark.parametrize(
    ("end", "outcome", "said"),
    [
        ({"status": "finished"}, AgentOutcome.COMPLETED, None),
        ({"status": "stuck"}, AgentOutcome.MAX_TURNS, "repeated itself"),
        (
            {"status": "error", "code": "MaxIterationsReached", "detail": "…"},
            AgentOutcome.MAX_TURNS,
            "all of its turns",
        ),
        ({"status": "error", "code": "LLMContextWindowExceedError"}, AgentOutcome.MAX_TURNS, "no longer fits"),
        ({"status": "error", "code": "LLMContentPolicyViolationError", "detail": "no"}, AgentOutcome.REFUSED, "no"),
        (
            {"status": "idle", "code": "RuntimeError", "detail": "no bash"},
            AgentOutcome.CRASHED,
            "RuntimeError: no bash",
        ),
        (
            {"status": "error", "code": "LLMContentPolicyViolationError", "detail": {"a": 1}},
            AgentOutcome.REFUSED,
            "{'a': 1}",
        ),
        ({"status": None, "code": [], "detail": 3}, AgentOutcome.CRASHED, "exit status 0"),
        ({}, AgentOutcome.CRASHED, "exit status 0"),
        (None, AgentOutcome.CRASHED, "exit status 1; stderr: Killed"),
    ],
)
def test_outcome_is_what_the_conversation_ended_with(
    end: dict[str, Any] | None, outcome: AgentOutcome, said: str | None
) -> None:
    reader = read() if end is None else read({"type": "end", **end})
    ended = HarnessEnded(ExecOutcome.EXITED, 1 if end is None else 0, None, "Killed\n", reader)
    judged, detail = OpenHands().outcome(ended)
    assert judged is outcome
    assert detail is None if said is None else said in (detail or "")


def test_settings_name_the_doors_and_nothing_else_of_the_attempt() -> None:
    command = OpenHands().command(CONTEXT)
    settings = json.loads(command.files["/var/tmp/home/settings.json"])
    assert command.argv[0] == CONTEXT.executable
    assert command.stdin == b"fix it"
    assert settings["llm"]["model"] == "openai/policy"
    assert settings["llm"]["base_url"] == "http://127.0.0.1:8900/v1"
    assert settings["mcp"] == {"weather": {"url": "http://127.0.0.1:8100/mcp", "transport": "http"}}
    assert (settings["max_turns"], settings["system"], settings["workdir"]) == (7, "Be brief.", "/repo")
    assert not any(name.startswith(("PYTHON", "LD_")) for name in command.env), "the image has its own"
