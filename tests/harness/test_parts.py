"""A harness's directory, its files, its output and its transcript, whatever comes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.agent.harness.agent import CliAgent, CliAgentConfig
from nemo_gym.agent.harness.events import (
    MAX_ITEMS,
    MAX_LINE_BYTES,
    MAX_OUTPUT_CHARS,
    MAX_TRANSCRIPT_BYTES,
    BoundedLog,
    JsonEventReader,
    LineSplitter,
    TextReader,
    Transcript,
)
from nemo_gym.agent.harness.run import CANDIDATES, home_candidates, setup_script
from nemo_gym.contract.errors import AgentError
from nemo_gym.contract.session import FilesHarvest, GitDiffHarvest
from nemo_gym.rollout_observability import AgentInvocation


class Names(JsonEventReader):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def event(self, event: dict[str, Any]) -> None:
        self.names.append(event["name"])


def test_home_is_outside_of_the_work_directory_and_of_what_is_harvested() -> None:
    assert next(home_candidates("/repo", ())) == CANDIDATES[0]
    assert next(home_candidates("/var/tmp", ())) == CANDIDATES[1]
    assert next(home_candidates("/", ())) == CANDIDATES[0]
    harvest = (GitDiffHarvest(path="/var"), FilesHarvest(paths=("/tmp",)))
    assert next(home_candidates("/", harvest)) == CANDIDATES[2]
    with pytest.raises(AgentError, match="no place in the box"):
        next(home_candidates("/", (GitDiffHarvest(path="/"),)))


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_setup_writes_every_byte_for_the_user_alone(tmp_path: Path, shell: str) -> None:
    home = tmp_path / "a dir's" / "home"
    files = {
        f"{home}/a/text.json": b"it's %s \\n $HOME `id`\n\n",
        f"{home}/every": bytes(range(256)),
        f"{home}/empty": b"",
        f"{tmp_path}/el sewhere/x": "ü".encode(),
    }
    done = subprocess.run([shell, "-s"], input=setup_script(str(home), files), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path: Path(path).read_bytes() for path in files} == files
    assert (home / "tmp").is_dir()
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "every").stat().st_mode & 0o777 == 0o600
    again = subprocess.run([shell, "-s"], input=setup_script(str(home), {}), capture_output=True, check=False)
    assert again.returncode != 0, "a directory that is there already is not fresh"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_lines_are_read_whole_however_they_arrive(size: int) -> None:
    data = b'{"name": "a"}\nnoise\n\n{"name": 1, "odd": "\xff"}\n[1]\n{"other": 1}\n{"name": "last"}'
    reader = Names()
    lines = LineSplitter(reader)
    for start in range(0, len(data), size):
        lines.feed(data[start : start + size])
    lines.finish()
    assert reader.names == ["a", "last"]
    assert reader.other_lines == 3
    assert [gap.code for gap in reader.transcript.bundle("t").gaps] == ["unreadable_event"]


def test_endless_line_is_dropped_and_the_next_is_read() -> None:
    reader = Names()
    lines = LineSplitter(reader)
    for _ in range(MAX_LINE_BYTES // 1_000_000 + 2):
        lines.feed(b"x" * 1_000_000)
    lines.feed(b'\n{"name": "after"}\n')
    lines.finish()
    assert reader.names == ["after"]
    assert [gap.code for gap in reader.transcript.bundle("t").gaps] == ["line_too_long"]


def test_text_is_what_the_agent_said() -> None:
    reader = TextReader()
    lines = LineSplitter(reader)
    lines.feed(b"thinking\nthe answer ")
    lines.feed(b"is 4\n")
    lines.finish()
    assert reader.transcript.final_text == "thinking\nthe answer is 4"


@pytest.mark.parametrize("piece", [1, 3, 50, 1000])
def test_log_keeps_both_ends_and_counts_the_rest(piece: int) -> None:
    data = bytes(97 + number % 26 for number in range(1000))
    log = BoundedLog(100)
    for start in range(0, len(data), piece):
        log.write(data[start : start + piece])
    text = data.decode()
    assert log.text() == f"{text[:75]}\n[900 bytes left out]\n{text[-25:]}"
    assert log.size == 1000


def test_short_log_is_kept_as_it_is() -> None:
    log = BoundedLog(100)
    log.write(b"a" * 60)
    log.write(b"b" * 40)
    assert log.text() == "a" * 60 + "b" * 40


def test_transcript_is_one_record_for_every_harness() -> None:
    transcript = Transcript()
    transcript.turn(input_tokens=10, output_tokens=2)
    transcript.says("Looking.")
    transcript.calls("c1", "bash", {"command": "ls"})
    transcript.calls("c1", "bash", {"command": "ls"})
    transcript.returns("c1", "x" * (MAX_OUTPUT_CHARS + 500), failed=True)
    transcript.returns("c2", "of nothing")
    transcript.invokes("helper", by_call="c1")
    transcript.calls("c3", "read", "{}", invocation="helper")
    transcript.compacts(trigger="auto")
    transcript.ends("completed")
    bundle = transcript.bundle("some-cli").model_dump(mode="json")
    assert [record["kind"] for record in bundle["records"]] == [
        "agent_invocation",
        "agent_invocation",
        "tool_call",
        "tool_call",
        "context_compaction",
    ]
    assert [record["status"] for record in bundle["records"][2:4]] == ["failed", "incomplete"]
    assert [gap["code"] for gap in bundle["gaps"]] == ["tool_result_without_call"]
    response = transcript.response("m")
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call_output"]
    assert "[500 characters left out]" in response["output"][2]["output"]
    assert response["usage"]["total_tokens"] == 12


def test_call_that_is_reported_once_is_its_own_whatever_its_id() -> None:
    transcript = Transcript()
    keys = [transcript.calls("c1", name, "{}", reported_once=True) for name in ("a", "b", "c")]
    for key, output in zip(reversed(keys), "cba", strict=True):
        transcript.returns(key, output)
    assert transcript.tool_calls == len({*keys}) == 3
    calls, outputs = transcript.items[:3], transcript.items[3:]
    assert [(call["call_id"], call["name"]) for call in calls] == [("c1", "a"), ("c1", "b"), ("c1", "c")]
    assert [(each["call_id"], each["output"]) for each in outputs] == [("c1", "c"), ("c1", "b"), ("c1", "a")]
    assert len({call["id"] for call in calls}) == 3


def test_whole_transcript_cuts_nothing() -> None:
    transcript = Transcript(whole=True)
    output = "x" * (MAX_OUTPUT_CHARS + 1)
    for number in range(MAX_ITEMS // 2 + 1):
        transcript.returns(transcript.calls(f"c{number}", "read", "{}"), output)
    assert len(transcript.items) == MAX_ITEMS + 2
    assert transcript.items[-1]["output"] == output
    assert not transcript.bundle("loop").gaps


def test_transcript_of_a_cli_is_bounded_and_keeps_the_last_message() -> None:
    transcript = Transcript()
    loops = MAX_ITEMS + 10
    for number in range(loops):
        key = transcript.calls(f"c{number}", "read", {}, invocation="helper" if number % 2 else "main")
        transcript.returns(key, "x")
        transcript.invokes(f"i{number}", parent=f"i{number - 1}")
        transcript.compacts()
        transcript.says(f"message {number}")
    bundle = transcript.bundle("some-cli")
    assert (len(bundle.records), transcript.tool_calls) == (3 * MAX_ITEMS, loops)
    assert [gap.code for gap in bundle.gaps] == ["transcript_too_long"]
    output = transcript.response("m")["output"]
    assert len(output) == MAX_ITEMS + 1
    assert output[-1]["content"][0]["text"] == transcript.final_text == f"message {loops - 1}"


def test_large_texts_of_a_cli_are_left_out_except_the_last() -> None:
    transcript = Transcript()
    large = "\u0001" * (MAX_TRANSCRIPT_BYTES // 12)
    for number in range(5):
        transcript.thinks(large)
        transcript.calls(f"c{number}", large, {"text": large})
        transcript.calls(f"d{number}", large, {}, invocation="helper")
        transcript.compacts(trigger=large)
        transcript.says(f"{number}{large}")
    kept = orjson.dumps([transcript.response("m"), transcript.bundle("some-cli").model_dump(mode="json")])
    assert len(kept) < 2 * MAX_TRANSCRIPT_BYTES
    assert transcript.response("m")["output"][-1]["content"][0]["text"].startswith("4")
    assert "transcript_too_long" in [gap.code for gap in transcript.bundle("some-cli").gaps]


def test_values_of_wrong_types_become_text_and_numbers_in_their_range() -> None:
    transcript = Transcript()
    wrong: Any = 5
    transcript.says(wrong)
    transcript.thinks({"a": 1})  # type: ignore[arg-type]
    transcript.compacts(tokens_before=10**30)
    transcript.turn(input_tokens=int(1e30), output_tokens=-4)
    transcript.add_usage(input_tokens=1)
    response = transcript.response("m")
    assert response["output"][0]["content"][0]["text"] == "5"
    assert response["output"][1]["summary"][0]["text"] == '{"a":1}'
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (2**53, 0)
    assert orjson.dumps([response, transcript.bundle("some-cli").model_dump(mode="json")])


def test_invocation_that_would_be_its_own_ancestor_belongs_to_the_main_agent() -> None:
    transcript = Transcript()
    transcript.invokes("a", parent="a")
    transcript.invokes("b", parent="c")
    transcript.invokes("c", parent="d")
    transcript.invokes("d", parent="b")
    bundle = transcript.bundle("some-cli")
    parents = [record.parent_invocation_id for record in bundle.records if isinstance(record, AgentInvocation)]
    assert parents == [None, "main", "c", "d", "main"]
    assert [gap.code for gap in bundle.gaps] == ["invocation_is_its_own_ancestor"]


@pytest.mark.parametrize(
    ("given", "failures", "wall_clock_s"),
    [({}, 10, 3600), ({"max_model_failures": None}, None, 3600), ({"wall_clock_s": None}, 10, 3600)],
)
def test_null_is_no_limit_where_the_setting_knows_none_and_its_default_elsewhere(
    given: dict[str, None], failures: int | None, wall_clock_s: float
) -> None:
    block = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "x"},
        "model_server": {"type": "responses_api_models", "name": "x"},
        "sandbox_provider": "local",
        **given,
    }
    config = CliAgent.config_from("agent", {"agent": {"responses_api_agents": {"agent": block}}})
    assert isinstance(config, CliAgentConfig)
    assert (config.max_model_failures, config.wall_clock_s) == (failures, wall_clock_s)
