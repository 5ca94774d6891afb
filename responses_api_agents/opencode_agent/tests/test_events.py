"""Lines that opencode 1.18.33 printed, and what is read out of them."""

from __future__ import annotations

import json
from typing import Any

from nemo_gym.agent.harness.base import HarnessEnded
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.rollout_observability import ToolCallObservation
from nemo_gym.sandbox.base import ExecOutcome
from responses_api_agents.opencode_agent.app import Opencode, OpencodeReader

START = """{"type":"step_start","timestamp":1795243188608,"sessionID":"ses_e0","part":{"id":"prt_1",\
"messageID":"msg_1","sessionID":"ses_e0","snapshot":"9221","type":"step-start"}}"""
TEXT = """{"type":"text","timestamp":1795243188610,"sessionID":"ses_e0","part":{"id":"prt_2","messageID":"msg_1",\
"sessionID":"ses_e0","type":"text","text":"Next.","time":{"start":1795243188587,"end":1795243188605}}}"""
TOOL = """{"type":"tool_use","timestamp":1795243188686,"sessionID":"ses_e0","part":{"type":"tool","tool":"bash",\
"callID":"call_c2_0","state":{"status":"completed","input":{"command":"cat greeting.txt","description":"x"},\
"output":"hello wrld\\n","metadata":{"output":"hello wrld\\n","exit":0,"truncated":false},"title":"cat greeting.txt",\
"time":{"start":1795243188599,"end":1795243188675}},"id":"prt_3","sessionID":"ses_e0","messageID":"msg_1"}}"""
STEP = """{"type":"step_finish","timestamp":1795243188723,"sessionID":"ses_e0","part":{"id":"prt_4",\
"reason":"tool-calls","snapshot":"9221","messageID":"msg_1","sessionID":"ses_e0","type":"step-finish",\
"tokens":{"total":2484,"input":2435,"output":49,"reasoning":0,"cache":{"write":0,"read":0}},"cost":0}}"""
ERROR = {"type": "error", "error": {"name": "APIError", "data": {"message": "no such model", "statusCode": 400}}}


def stop() -> str:
    return STEP.replace("tool-calls", "stop")


def read(*lines: str | dict[str, Any]) -> OpencodeReader:
    reader = OpencodeReader()
    for line in lines:
        reader.feed((line if isinstance(line, str) else json.dumps(line)).encode())
    reader.finish()
    return reader


def judged(reader: OpencodeReader, return_code: int = 0, stderr: str = "") -> tuple[AgentOutcome, str | None]:
    return Opencode().outcome(HarnessEnded(ExecOutcome.EXITED, return_code, None, stderr, reader))


def test_reader_finds_turns_calls_results_and_usage() -> None:
    transcript = read(START, TEXT, TOOL, STEP, START, TEXT, stop()).transcript
    assert (transcript.turns, transcript.tool_calls, transcript.final_text) == (2, 1, "Next.")
    assert transcript.usage == {"input_tokens": 4870, "output_tokens": 98, "cached_tokens": 0}
    assert [item["type"] for item in transcript.items] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    assert transcript.items[2]["output"] == "hello wrld\n"


def test_failed_tool_call_is_read_as_failed() -> None:
    event = json.loads(TOOL)
    event["part"]["state"] = {"status": "error", "input": {"command": "x"}, "error": "not allowed"}
    transcript = read(event).transcript
    assert transcript.items[1]["output"] == "not allowed"
    record = transcript.bundle("opencode").records[1]
    assert isinstance(record, ToolCallObservation) and record.status == "failed"


def test_event_of_another_shape_is_a_gap_and_no_error() -> None:
    reader = read('{"type":"tool_use","part":{}}', '{"no":"type"}', "not json", stop())
    assert [gap.code for gap in reader.transcript.bundle("opencode").gaps] == ["unreadable_event"]
    assert (reader.other_lines, reader.reason) == (1, "stop")


def test_run_that_stopped_is_completed() -> None:
    assert judged(read(START, stop())) == (AgentOutcome.COMPLETED, None)


def test_run_is_crashed_when_it_exits_with_zero_in_the_middle_of_a_step() -> None:
    assert judged(read(START, stop(), START))[0] is AgentOutcome.CRASHED
    assert judged(read())[0] is AgentOutcome.CRASHED
    assert judged(read(START, STEP))[0] is AgentOutcome.CRASHED


def test_error_event_is_crashed_with_its_words() -> None:
    outcome, detail = judged(read(START, ERROR), 1, "Error: oh")
    assert outcome is AgentOutcome.CRASHED
    assert detail == "APIError: no such model; exit status 1; stderr: Error: oh"
