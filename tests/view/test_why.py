"""Which cause a failure's kind and words speak of. The reasons are those that servers of this suite give."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.text import Text

from nemo_gym._util.terminal import one_line, shown
from nemo_gym.cli import command, jobs
from nemo_gym.cli.show import logs, show, why
from nemo_gym.cli.validate import validate
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import MAX_REASON_CHARS, FailureKind
from nemo_gym.rollouts.report import print_agents, print_table
from nemo_gym.rollouts.result_rows import RolloutSummary, Tally
from nemo_gym.rollouts.store.schema import SCHEMA_VERSION
from nemo_gym.rollouts.store.sql import LOGS_KEY
from nemo_gym.view.rollout import MAX_TEXT_CHARS
from nemo_gym.view.why import CAUSES, cause_of, explain
from tests.view.results import failed, row, said, write

SAID: list[tuple[str, str, str, str]] = [
    ("wrong_key", "model_refused", "engine 'x' refused its API key (401); set the engine's 'api_key'", "run"),
    ("model_refused", "model_refused", "the policy endpoint answered 404: The model `m` does not exist.", "run"),
    ("context_exceeded", "model_refused", "400: maximum context length is 16 tokens", "run"),
    ("context_exceeded", "context_exceeded", "the first request does not fit", "run"),
    ("engine_down", "model_unreachable", "no engine is in service", "run"),
    ("image_missing", "sandbox_failed", "docker: No such image: examples/nowhere:none", "init"),
    ("image_missing", "seed_failed", "image 'examples__x' is not prepared; run ng_prepare swe_bench", "init"),
    ("sandbox_failed", "sandbox_failed", "docker: the engine does not answer", "init"),
    ("disk_full", "sandbox_failed", "no space left on the device of /var/boxes: free some, or set state_dir", "init"),
    ("disk_full", "internal", "docker: the engine's disk is full while unpacking", "eval"),
    ("out_of_memory", "host_out_of_memory", "the host ran out of memory", "eval"),
    ("out_of_memory", "agent_crashed", "the harness was ended: out of memory", "run"),
    ("grader_timeout", "control_run_failed", "the gold patch timed out after 1800 s, too", "eval"),
    ("grader_timeout", "deadline", "not done within 3600 s", "eval"),
    ("control_failed", "control_run_failed", "2 of 4 tests fail with the gold patch", "eval"),
    ("deadline", "deadline", "not done within 3600 s", "run"),
    ("job_deadline", "deadline", "the job's deadline has passed (60 s from its submission)", "run"),
    ("job_deadline", "deadline", "the job's deadline has passed (60 s from its submission)", "eval"),
    ("mcp_down", "mcp_failed", "MCP server 'weather' served none of 3 requests", "run"),
    ("lost_box", "sandbox_lost", "box-1 is gone", "run"),
    ("lost_box", "exec_lost", "the connection to the box was lost", "eval"),
    ("agent_crashed", "agent_crashed", "claude ended with exit code 3", "run"),
    ("agent_lost", "agent_lost", "mini_swe_agent/act: the server closed the connection", "run"),
    ("cancelled", "cancelled", "the group was filled: no space left in it", "run"),
    ("environment_lost", "environment_lost", "the environment 'sums' could not be reached", "run"),
    ("seed_failed", "seed_failed", "sums/seed_session: field 'numbers' must be a list of numbers", "init"),
    ("verifier_failed", "verifier_failed", "verify returned the reward None", "eval"),
    ("internal", "internal", "KeyError: 'x'", "run"),
    ("internal", "a kind of another version", "who knows", "run"),
]


@pytest.mark.parametrize(("cause", "kind", "reason", "stage"), SAID)
def test_cause_of_a_failure(cause: str, kind: str, reason: str, stage: str) -> None:
    found = cause_of(kind, reason, has_reward=False, stage=stage)
    assert found is not None
    assert found.name == cause


def test_cause_of_a_reason_with_many_words_is_found_at_once() -> None:
    reason = "image " * 20_000
    began = time.monotonic()
    assert cause_of("seed_failed", reason, has_reward=False) is CAUSES["seed_failed"]
    assert cause_of("seed_failed", f"{reason}\n an image is missing", has_reward=False) is CAUSES["image_missing"]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", FailureKind)
def test_every_kind_of_failure_has_a_cause_of_its_own_words(kind: FailureKind) -> None:
    found = cause_of(kind, "", has_reward=False)
    assert found is not None
    assert (found.name == "internal") == (kind is FailureKind.INTERNAL)


@pytest.mark.parametrize(
    ("kind", "reason", "said"),
    [
        ("context_exceeded", "the first request does not fit: answered 413: the body is too large", "max_body_bytes"),
        ("mcp_failed", "tool 'look_up' of environment 'odd' is unavailable (status 503)", "503"),
    ],
)
def test_cause_covers_every_way_to_its_kind_of_failure(kind: str, reason: str, said: str) -> None:
    found = cause_of(kind, reason, has_reward=False, stage="run")
    assert found is not None and said in f"{found.happened} {found.helps}"


def test_every_cause_says_what_happened_and_what_helps() -> None:
    for cause in CAUSES.values():
        assert cause.title
        assert cause.happened.endswith(".")
        assert cause.helps.endswith(".")


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"reward": 1.0}, None),
        ({"reward": 0.0}, "not_solved"),
        ({"reward": 0.0, "outcome": "max_turns"}, "ran_out"),
        ({"reward": 0.0, "official": {"timed_out": True}}, "grader_timeout"),
        ({"reward": 0.0, "findings": [{"kind": "values_not_confirmed"}]}, "tampering"),
    ],
)
def test_cause_of_a_reward(fields: dict[str, Any], cause: str | None) -> None:
    held = row(0, **fields)
    columns = {
        "outcome": held["outcome"],
        "reason": None,
        "reward": held["reward"],
        "findings": len(held["findings"]),
    }
    found = explain(columns, held)
    assert (found and found["cause"]) == cause


def test_evidence_names_reason_attempts_and_failing_tests() -> None:
    failures = [{"kind": "agent_crashed"}, {"kind": "model_unreachable"}]
    held = failed(0, failures=failures)
    columns = {"outcome": "model_unreachable", "reason": "connection refused", "reward": None, "findings": 0}
    found = explain(columns, held)
    assert found is not None
    assert found["evidence"] == [
        "model_unreachable in run: connection refused",
        "2 attempts ended so: agent_crashed, model_unreachable",
    ]
    tests = {"FAIL_TO_PASS": {"failure": ["a", "b", "c", "d"]}, "PASS_TO_FAIL": {"failure": ["e"]}}
    graded = row(0, reward=0.0, official={"tests_status": tests})
    found = explain({"outcome": "completed", "reason": "4 fail", "reward": 0.0, "findings": 0}, graded)
    assert found is not None
    assert found["evidence"] == ["4 fail", "4 of FAIL_TO_PASS fail: a, b, c, …"]


def test_rollout_that_was_not_graded_is_not_sent_to_a_command_that_grades_only_graded_ones() -> None:
    assert "retry_failed=true" in CAUSES["verifier_failed"].helps
    assert not [cause.name for cause in CAUSES.values() if "ng_reverify" in cause.helps]


def test_text_in_a_terminal_moves_nothing() -> None:
    assert shown("a\x1b[31mb\u202ec\x00\td\ne") == "a^[[31mb<U+202E>c^@\td\ne"
    assert shown("a\U000e0041b\u3164c\u206ad") == "a<U+E0041>b<U+3164>c<U+206A>d"
    assert one_line("a\n  b\r\n\x07c") == "a b^M ^Gc"
    assert one_line("x" * 10, 5) == "xxxx…"


def test_reason_that_is_a_whole_log_does_not_flood_the_table() -> None:
    summary = RolloutSummary.of_row(row(0, reward=0.0, reward_reason="E assert 1 == 2 " * 10_000))
    assert summary.reason is not None and len(summary.reason) == MAX_REASON_CHARS


def test_lines_of_tables_end_without_blanks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = write(tmp_path / "out.jsonl", row(0, reward=0.0))
    assert show([str(output)]) == 0
    tally = Tally()
    tally.add_row("agent", row(0))
    print_agents(command.result_console(), tally)
    print_table(command.result_console(), [RolloutSummary.of_row(row(0))], title="1 rollout of 1 task")
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line != line.rstrip()] == []
    assert f"1 rollout of {output}" in said and {"Agents", "1 rollout of 1 task"} <= {*said}


def test_full_shows_whole_texts_and_without_it_a_cut_one_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * (MAX_TEXT_CHARS + 100)
    parts = [said("first"), {"type": "message", "role": "assistant", "content": [{"text": long}, {"text": "the end"}]}]
    output = write(tmp_path / "out.jsonl", row(0, response={"output": [said(f"{long}y"), *parts]}))
    assert show([str(output), "task-0"]) == 0
    printed = capsys.readouterr().out
    assert f"{long}y" not in printed and "… 101 more characters (--full)" in printed
    assert show([str(output), "task-0", "--full"]) == 0
    printed = capsys.readouterr().out
    assert f"{long}y" in printed and "the end" in printed and "more characters" not in printed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["other.jsonl", "reward=0", "q=x"], "reward=, q= would have no effect beside a second result file"),
        (["task-0", "limit=3"], "limit= would have no effect beside a rollout"),
        (["other.jsonl", "limit=many"], "limit=many must be a whole number"),
    ],
)
def test_filters_that_would_have_no_effect_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("out.jsonl", "other.jsonl"):
        write(tmp_path / name, row(0))
    with pytest.raises(ConfigError, match=problem):
        show(["out.jsonl", *words])
    assert show(["out.jsonl", "other.jsonl", "limit=1"]) == 0


def test_command_prints_no_class_for_a_rollout_that_did_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = write(tmp_path / "out.jsonl", row(1))
    assert why([str(output), "task-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == []


class Reply(BaseModel):
    answer: str
    reward: float


def lacks_a_field() -> None:
    Reply.model_validate({"reward": 1.0})


def compares() -> None:
    raise AssertionError("these differ:\n  3\n  4")


def fails_in_a_group() -> None:
    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(lacks_a_field))

    asyncio.run(both())


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (fails_in_a_group, "exception=pydantic_core._pydantic_core.ValidationError: 1 validation error for Reply"),
        (lacks_a_field, "ValidationError: 1 validation error for Reply answer Field required [type=missing,"),
        (compares, "exception=AssertionError: these differ: 3 4"),
        (lambda: {}["x"], "exception=KeyError: 'x'"),
    ],
)
def test_command_tells_what_an_error_in_a_log_says_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[[], Any], told: str
) -> None:
    with pytest.raises(Exception) as raised:
        fails()
    trace = "".join(traceback.format_exception(raised.value))
    output = write(tmp_path / "out.jsonl", failed(0, kind="verifier_failed"))
    (tmp_path / "logs").mkdir()
    line = {"event": "verify failed", "level": "error", "rollout_id": "run.0-0", "exception": trace}
    write(tmp_path / "logs" / "sums.log", line)
    with closing(sqlite3.connect(tmp_path / "out_store.sqlite")) as store, store:
        store.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        store.execute("CREATE TABLE run (info)")
        store.execute("INSERT INTO run VALUES (?)", (json.dumps({LOGS_KEY: [str(tmp_path / "logs")]}),))
    assert why([str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert told in printed and "further information" not in printed, printed


MOVES = "\x1b]0;title\x07\x1b[2J"


def hostile_run(folder: Path) -> Path:
    """A result file and its servers' log, with text that a terminal would act on."""
    artifact = {"name": MOVES, "kind": MOVES, "size": 1, "encoding": "utf-8", "data": MOVES}
    fields = {"task_id": f"task{MOVES}", "_ng_rollout_id": f"run.0-0{MOVES}", "artifacts": [artifact]}
    output = write(folder / "out.jsonl", row(0, reward=0.0, reward_reason=f"wrong {MOVES}", **fields))
    (folder / "run" / "logs").mkdir(parents=True)
    line = {"event": MOVES, "rollout_id": "run.7-0", "level": f"error{MOVES}\n", "timestamp": MOVES}
    write(folder / "run" / "logs" / "a.log", {**line, "server": MOVES, f"key{MOVES}\n": MOVES, "exception": MOVES})
    return output


def test_commands_print_what_rows_and_logs_hold_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(hostile_run(tmp_path))
    assert show([output]) == 0
    assert show([output, f"task{MOVES}"]) == 0
    assert why([output]) == 0
    assert logs(["rollout=run.7-0", f"run_dir={tmp_path / 'run'}"]) == 0
    monkeypatch.setattr(
        "nemo_gym.cli.validate.check_with_oracle", lambda words: [f"task{MOVES} with oracle=gold: reward 0"]
    )
    assert validate(["--oracle"]) == 1
    jobs._print_stderr(f"job: {MOVES}")
    with pytest.raises(SystemExit):
        command.run("ng_show", show, [output, f"tusk{MOVES}"])
    printed = capsys.readouterr()
    assert "did you mean 'task^[]0;title^G^[[2J'" in printed.err
    assert "error^[]0;title^G^[[2J: ^[]0;title^G^[[2J key^[]0;title^G^[[2J=^[]0;title^G^[[2J" in printed.out
    assert [text for text in (printed.out, printed.err) if "\x1b" in text or "\x07" in text] == []


def test_console_of_results_prints_text_of_a_run_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    console = command.result_console()
    console.print(Text(f"wrong answer {MOVES}"))
    console.print("[bold]as rich formats it[/bold]")
    assert capsys.readouterr().out == "wrong answer ^[]0;title^[[2J\nas rich formats it\n"


def test_table_of_results_shows_the_whole_of_odd_texts(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "\x1b[31mwrong\x1b[0m: expected 3"
    summary = RolloutSummary("a\u200bquestion-1", 0, 0, "solver", 0.0, "completed", 0, 1, 1.0, 1, reason)
    print_table(command.result_console(), [summary], title="of a run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "question" in line or "wrong" in line]
    assert "│ a<U+200B>question-1 │" in line and "│ ^[[31mwrong^[[0m: expected 3 │" in line
