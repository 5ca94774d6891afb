"""Lines that Claude Code 2.1.329 printed, cut to what is read of them, and what they come to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_gym.agent.harness.base import HarnessContext, HarnessEnded, McpEndpoint
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome
from responses_api_agents.claude_code_agent.app import ClaudeCode, ClaudeCodeOptions, ClaudeCodeReader


def init(*servers: tuple[str, str]) -> dict[str, Any]:
    listed = [{"name": name, "status": status, "source": "dynamic"} for name, status in servers]
    return {"type": "system", "subtype": "init", "cwd": "/repo", "mcp_servers": listed, "model": "scripted"}


def block(message_id: str, content: dict[str, Any], parent: str | None = None, model: str = "m") -> dict[str, Any]:
    usage = {"input_tokens": 4000, "cache_creation_input_tokens": 100, "cache_read_input_tokens": 160}
    message = {"id": message_id, "role": "assistant", "model": model, "content": [content], "usage": usage}
    return {"type": "assistant", "message": message, "parent_tool_use_id": parent}


def say(message_id: str, text: str, **more: Any) -> dict[str, Any]:
    return block(message_id, {"type": "text", "text": text}, **more)


def call(message_id: str, call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return block(message_id, {"type": "tool_use", "id": call_id, "name": name, "input": arguments})


def returned(call_id: str, content: Any, failed: bool = False) -> dict[str, Any]:
    part = {"tool_use_id": call_id, "type": "tool_result", "content": content, "is_error": failed}
    return {"type": "user", "message": {"role": "user", "content": [part]}, "parent_tool_use_id": None}


def result(**fields: Any) -> dict[str, Any]:
    used = {"inputTokens": 8000, "cacheReadInputTokens": 320, "cacheCreationInputTokens": 200, "outputTokens": 49}
    ended = {"type": "result", "subtype": "success", "is_error": False, "api_error_status": None, "result": "Done."}
    return {**ended, "stop_reason": "end_turn", "modelUsage": {"scripted": used}, **fields}


def read(*events: dict[str, Any] | bytes) -> ClaudeCodeReader:
    reader = ClaudeCodeReader()
    for event in events:
        reader.feed(event if isinstance(event, bytes) else json.dumps(event).encode())
    reader.finish()
    return reader


def judged(*events: dict[str, Any], status: int = 0) -> tuple[AgentOutcome, str | None]:
    return ClaudeCode().outcome(HarnessEnded(ExecOutcome.EXITED, status, None, "", read(*events)))


def test_run_is_read_into_turns_calls_and_usage() -> None:
    transcript = read(
        init(),
        say("msg_1", "Next."),
        call("msg_1", "call_1", "Bash", command="pwd"),
        returned("call_1", "/repo"),
        call("msg_2", "call_2", "mcp__weather__weather", city="Oslo"),
        returned("call_2", [{"type": "text", "text": "Oslo: snow"}], failed=True),
        say("msg_3", "Done."),
        result(),
    ).transcript
    assert (transcript.turns, transcript.tool_calls, transcript.final_text) == (3, 2, "Done.")
    assert dict(transcript.usage) == {"input_tokens": 8520, "cached_tokens": 320, "output_tokens": 49}
    assert [item["type"] for item in transcript.items] == [
        "message",
        "function_call",
        "function_call_output",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert [item["output"] for item in transcript.items if "output" in item] == ["/repo", "Oslo: snow"]
    records = transcript.bundle("claude_code").model_dump()["records"]
    assert [record["status"] for record in records if record["kind"] == "tool_call"] == ["completed", "failed"]


def test_usage_is_the_sum_of_the_answers_when_the_run_was_cut_short() -> None:
    usage = read(init(), say("a", "One."), say("b", "Two.")).transcript.usage
    assert (usage["input_tokens"], usage["cached_tokens"]) == (2 * 4260, 320)


def test_answers_of_a_sub_agent_are_its_own() -> None:
    transcript = read(
        init(),
        call("msg_1", "call_1", "Task", prompt="look"),
        say("msg_2", "Inside.", parent="call_1"),
        returned("call_1", "seen"),
        say("msg_3", "Outside."),
        init(),
        result(),
        result(result="Later."),
    ).transcript
    assert (transcript.turns, transcript.final_text) == (2, "Outside.")
    invocations = [r for r in transcript.bundle("c").model_dump()["records"] if r["kind"] == "agent_invocation"]
    assert [(r["invocation_id"], r["spawned_by_tool_call_id"]) for r in invocations] == [
        ("main", None),
        ("call_1", "call_1"),
    ]


def test_words_of_the_cli_are_no_answer_of_the_model() -> None:
    assert read(init(), say("x", "API Error: 500", model="<synthetic>")).transcript.turns == 0


@pytest.mark.parametrize(
    ("events", "status", "outcome", "detail"),
    [
        ([init(), result()], 0, AgentOutcome.COMPLETED, None),
        ([init(), result(), init(), result()], 0, AgentOutcome.COMPLETED, None),
        ([init()], 0, AgentOutcome.CRASHED, "without a result"),  # an interrupt
        ([init(), result()], 143, AgentOutcome.CRASHED, "exit status 143"),
        ([init(), result(subtype="error_max_turns", is_error=True)], 1, AgentOutcome.MAX_TURNS, "turns"),
        ([init(), result(is_error=True, api_error_status=400)], 1, AgentOutcome.CRASHED, "API status 400: Done."),
        ([init(), result(subtype="error_during_execution")], 1, AgentOutcome.CRASHED, "Done."),
        ([init(), result(stop_reason="refusal", is_error=True)], 1, AgentOutcome.REFUSED, "refused"),
        ([init(("weather", "failed")), result()], 0, AgentOutcome.MCP_FAILED, "weather"),
        ([init(("weather", "failed")), init(("weather", "connected")), result()], 0, AgentOutcome.COMPLETED, None),
        ([init(("weather", "pending")), result()], 0, AgentOutcome.COMPLETED, None),
    ],
)
def test_outcome_is_what_the_events_mean_and_not_what_they_say(
    events: list[dict[str, Any]], status: int, outcome: AgentOutcome, detail: str | None
) -> None:
    judgement = judged(*events, status=status)
    assert judgement[0] is outcome
    assert judgement[1] == detail if detail is None else detail in (judgement[1] or "")


def test_events_of_another_shape_are_gaps() -> None:
    reader = read(b"not JSON", b"[1]", {"type": "assistant", "message": None}, {"no": "type"}, result(modelUsage=7))
    assert reader.other_lines == 2
    assert [gap["code"] for gap in reader.transcript.bundle("c").model_dump()["gaps"]] == ["unreadable_event"]
    assert reader.result is not None


def test_command_holds_no_prompt_and_points_everything_into_the_home() -> None:
    context = HarnessContext(
        prompt="p" * 200_000,
        system="Be brief.",
        model="policy",
        model_url="http://127.0.0.1:8000",
        mcp=(McpEndpoint("weather", "http://127.0.0.1:8100/mcp"),),
        home="/home-of-it",
        workdir="/repo",
        install_dir="/i",
        executable="/i/claude",
        session_uuid="u",
        max_turns=7,
        max_output_tokens=99,
    )
    command = ClaudeCode(ClaudeCodeOptions(tools=[], context_tokens=32_000, compaction=False)).command(context)
    assert command.stdin == context.prompt.encode()
    assert max(len(word) for word in command.argv) < 1000
    words = dict(zip(command.argv, command.argv[1:], strict=False))
    assert (words["--max-turns"], words["--tools"]) == ("7", "")
    assert json.loads(command.files[words["--mcp-config"]])["mcpServers"]["weather"]["url"] == context.mcp[0].url
    assert command.files[words["--append-system-prompt-file"]] == b"Be brief."
    assert all(path.startswith(context.home) for path in command.files)
    assert command.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32000"
    assert command.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "99"
