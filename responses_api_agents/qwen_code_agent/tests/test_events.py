"""Lines that Qwen Code 0.24.4 printed, and what is read out of them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from nemo_gym.agent.harness.base import HarnessContext, HarnessEnded
from nemo_gym.contract.errors import RowError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.sandbox.base import ExecOutcome
from responses_api_agents.qwen_code_agent.app import MAX_SYSTEM_BYTES, QwenCode, QwenCodeOptions, QwenReader

TEXT = """{"type":"assistant","uuid":"a8","session_id":"de","parent_tool_use_id":null,"message":{"id":"a8",\
"type":"message","role":"assistant","model":"scripted","content":[{"type":"text","text":"Next."}],"stop_reason":null,\
"usage":{"input_tokens":0,"output_tokens":0}}}"""
CALL = """{"type":"assistant","uuid":"79","session_id":"de","parent_tool_use_id":null,"message":{"id":"79",\
"type":"message","role":"assistant","model":"scripted","content":[{"type":"tool_use","id":"call_3e_0",\
"name":"run_shell_command","input":{"command":"cat greeting.txt","is_background":false}}],"stop_reason":"tool_use",\
"usage":{"input_tokens":9148,"output_tokens":53,"cache_read_input_tokens":0,"total_tokens":9201}}}"""
RESULT = """{"type":"user","uuid":"93","session_id":"de","parent_tool_use_id":null,"message":{"role":"user","content":\
[{"type":"tool_result","tool_use_id":"call_3e_0","is_error":false,"content":"hello wrld"}]}}"""
DONE = """{"type":"assistant","uuid":"89","session_id":"de","parent_tool_use_id":null,"message":{"id":"89",\
"type":"message","role":"assistant","model":"scripted","content":[{"type":"text","text":"All done."}],\
"stop_reason":null,"usage":{"input_tokens":9365,"output_tokens":10,"cache_read_input_tokens":0,"total_tokens":9375}}}"""
END = """{"type":"result","subtype":"success","uuid":"95","session_id":"de","is_error":false,"duration_ms":1067,\
"duration_api_ms":691,"num_turns":2,"result":"All done.","usage":{"input_tokens":18513,"output_tokens":63,\
"cache_read_input_tokens":0,"total_tokens":18576},"permission_denials":[]}"""


def read(*lines: str | dict[str, Any]) -> QwenReader:
    reader = QwenReader()
    for line in lines:
        reader.feed((line if isinstance(line, str) else json.dumps(line)).encode())
    reader.finish()
    return reader


def judged(reader: QwenReader, return_code: int = 0) -> tuple[AgentOutcome, str | None]:
    return QwenCode().outcome(HarnessEnded(ExecOutcome.EXITED, return_code, None, "", reader))


def test_reader_counts_an_answer_of_several_events_as_one_turn() -> None:
    transcript = read(TEXT, CALL, RESULT, DONE, END).transcript
    assert (transcript.turns, transcript.tool_calls, transcript.final_text) == (2, 1, "All done.")
    assert transcript.usage == {"input_tokens": 18513, "output_tokens": 63, "cached_tokens": 0}
    assert [item["type"] for item in transcript.items] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


def test_usage_of_a_run_cut_short_is_what_was_seen_of_it() -> None:
    assert read(TEXT, CALL).transcript.usage["input_tokens"] == 9148


def test_sub_agent_is_an_invocation_of_its_own() -> None:
    inner = json.loads(TEXT) | {"parent_tool_use_id": "call_3e_0"}
    transcript = read(TEXT, CALL, inner, RESULT, DONE).transcript
    assert transcript.turns == 2
    records = transcript.bundle("qwen_code").records
    assert [getattr(record, "invocation_id", None) for record in records[:2]] == ["main", "call_3e_0"]


def test_event_of_another_shape_is_a_gap_and_no_error() -> None:
    reader = read('{"type":"assistant","message":7}', "[]", END)
    assert [gap.code for gap in reader.transcript.bundle("qwen_code").gaps] == ["unreadable_event"]
    assert judged(reader) == (AgentOutcome.COMPLETED, None)


def test_run_without_a_result_is_crashed_even_when_it_exits_with_zero() -> None:
    assert judged(read(TEXT)) == (AgentOutcome.CRASHED, "exit status 0")


def test_result_that_is_an_error_is_crashed_with_its_words() -> None:
    end = json.loads(END) | {"is_error": True, "subtype": "error_during_execution", "error": {"message": "422 no"}}
    assert judged(read(end), 1) == (AgentOutcome.CRASHED, "422 no; exit status 1")


def test_exit_status_53_is_the_end_of_its_turns() -> None:
    assert judged(read(TEXT, CALL, RESULT), 53)[0] is AgentOutcome.MAX_TURNS


def test_system_text_that_is_no_argument_of_linux_is_refused_as_the_rows() -> None:
    longest = "é" + "s" * (MAX_SYSTEM_BYTES - 2)
    assert longest in command_of(longest)
    assert subprocess.run(["/bin/true", longest], check=True).returncode == 0
    with pytest.raises(RowError, match=f"its system text has {MAX_SYSTEM_BYTES + 1} bytes.*shorten it"):
        command_of(f"{longest}s")


def command_of(system: str) -> tuple[str, ...]:
    context = HarnessContext(
        prompt="p",
        system=system,
        model="policy",
        model_url="http://127.0.0.1:8000",
        mcp=(),
        home="/home-of-it",
        workdir="/repo",
        install_dir="/i",
        executable="/i/node",
        session_uuid="u",
    )
    return QwenCode(QwenCodeOptions()).command(context).argv
