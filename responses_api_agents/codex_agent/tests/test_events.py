"""Lines that Codex 0.169.0 printed, and what they come to."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from nemo_gym.agent.harness.base import HarnessContext, HarnessEnded, McpEndpoint
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome
from responses_api_agents.codex_agent.app import Codex, CodexOptions, CodexReader

RUN = rb"""
{"type":"thread.started","thread_id":"01a1fcd9-677c-7b92-8d73-3a8cad8ddcdc"}
{"type":"item.completed","item":{"id":"item_0","type":"error","message":"Model metadata for `m` not found."}}
{"type":"turn.started"}
{"type":"item.completed","item":{"id":"item_1","type":"agent_message","text":"Next."}}
{"type":"item.started","item":{"id":"item_2","type":"command_execution","command":"/bin/bash -c pwd","aggregated_output":"","exit_code":null,"status":"in_progress"}}
{"type":"item.completed","item":{"id":"item_2","type":"command_execution","command":"/bin/bash -c pwd","aggregated_output":"/repo\n","exit_code":0,"status":"completed"}}
{"type":"item.started","item":{"id":"item_3","type":"mcp_tool_call","server":"weather","tool":"weather","arguments":{"city":"Oslo"},"result":null,"error":null,"status":"in_progress"}}
{"type":"item.completed","item":{"id":"item_3","type":"mcp_tool_call","server":"weather","tool":"weather","arguments":{"city":"Oslo"},"result":{"content":[{"type":"text","text":"Oslo: snow"}],"structured_content":null},"error":null,"status":"completed"}}
{"type":"item.completed","item":{"id":"item_4","type":"command_execution","command":"/bin/bash -c false","aggregated_output":"","exit_code":1,"status":"failed"}}
{"type":"item.completed","item":{"id":"item_5","type":"agent_message","text":"All done."}}
{"type":"turn.completed","usage":{"input_tokens":10220,"cached_input_tokens":20,"cache_write_input_tokens":0,"output_tokens":53,"reasoning_output_tokens":0}}
"""  # noqa: E501 - lines of another program
COMPLETED = {"type": "turn.completed", "usage": {"input_tokens": 1, "output_tokens": 1}}
FAILED = {"type": "turn.failed", "error": {"message": "unexpected status 400 Bad Request"}}
NOTICE = {"type": "error", "message": "Reconnecting... 1/4"}
SAID = {"type": "item.completed", "item": {"id": "item_1", "type": "agent_message", "text": "Next."}}
MCP = "Fatal error: Failed to initialize session: required MCP servers failed to initialize: weather: handshaking"


def read(lines: bytes) -> CodexReader:
    reader = CodexReader()
    for line in lines.splitlines():
        reader.feed(line)
    reader.finish()
    return reader


def gaps(reader: CodexReader) -> list[str]:
    return [gap["code"] for gap in reader.transcript.bundle("codex").model_dump()["gaps"]]


def test_run_is_read_into_turns_calls_and_usage() -> None:
    reader = read(RUN)
    transcript = reader.transcript
    assert (transcript.turns, transcript.tool_calls, transcript.final_text) == (4, 3, "All done.")
    assert dict(transcript.usage) == {"input_tokens": 10220, "cached_tokens": 20, "output_tokens": 53}
    names = [item["name"] for item in transcript.items if item["type"] == "function_call"]
    assert names == ["exec_command", "mcp__weather__weather", "exec_command"]
    assert [item["output"] for item in transcript.items if "output" in item] == ["/repo\n", "Oslo: snow", ""]
    records = transcript.bundle("codex").model_dump()["records"]
    statuses = [record["status"] for record in records if record["kind"] == "tool_call"]
    assert statuses == ["completed", "completed", "failed"]
    assert gaps(reader) == ["turns_inferred", "codex_notice"]


@pytest.mark.parametrize(
    ("events", "status", "stderr", "outcome", "detail"),
    [
        ([SAID, COMPLETED], 0, "", AgentOutcome.COMPLETED, None),
        ([NOTICE, SAID, COMPLETED], 0, "", AgentOutcome.COMPLETED, None),
        ([SAID], 0, "", AgentOutcome.CRASHED, "exit status 0"),
        ([SAID, COMPLETED], 1, "late", AgentOutcome.CRASHED, "exit status 1; stderr: late"),
        ([SAID, NOTICE, FAILED], 1, "", AgentOutcome.CRASHED, "unexpected status 400 Bad Request"),
        ([], 1, MCP, AgentOutcome.MCP_FAILED, "required MCP servers failed"),
        # Once the model has answered, the policy can have written it.
        ([SAID], 1, MCP, AgentOutcome.CRASHED, "exit status 1"),
    ],
)
def test_outcome_is_what_the_events_mean(
    events: list[dict[str, Any]], status: int, stderr: str, outcome: AgentOutcome, detail: str | None
) -> None:
    reader = read(b"\n".join(json.dumps(event).encode() for event in events))
    judgement = Codex().outcome(HarnessEnded(ExecOutcome.EXITED, status, None, stderr, reader))
    assert judgement[0] is outcome
    assert judgement[1] == detail if detail is None else detail in (judgement[1] or "")


def test_events_of_another_shape_are_gaps() -> None:
    reader = read(b'x\n{"type":"item.completed","item":null}\n{"type":"turn.failed"}\n{}\n')
    assert (reader.other_lines, reader.ended) == (1, None)
    assert gaps(reader) == ["turns_inferred", "unreadable_event"]


def test_configuration_is_toml_whatever_the_row_says() -> None:
    system = 'Say "no".\n\\ \x7f ü 🙂 \x01'
    context = HarnessContext(
        prompt="p" * 200_000,
        system=system,
        model='po"licy',
        model_url="http://127.0.0.1:8000",
        mcp=(McpEndpoint("our weather", "http://127.0.0.1:8100/mcp"),),
        home="/home-of-it",
        workdir="/repo",
        install_dir="/i",
        executable="/i/codex",
        session_uuid="u",
    )
    command = Codex(CodexOptions(context_tokens=32_000, reasoning_effort="low")).command(context)
    (config,) = (tomllib.loads(text.decode()) for text in command.files.values())
    assert (config["developer_instructions"], config["model"]) == (system, 'po"licy')
    assert (config["model_context_window"], config["model_reasoning_effort"]) == (32_000, "low")
    assert "model_auto_compact_token_limit" not in config
    assert config["model_providers"]["policy"]["base_url"] == "http://127.0.0.1:8000/v1"
    server = config["mcp_servers"]["our weather"]
    assert (server["url"], server["required"]) == (context.mcp[0].url, True)
    assert command.stdin == context.prompt.encode()
    assert all(path.startswith(context.home) for path in command.files)
