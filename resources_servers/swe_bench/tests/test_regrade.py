"""Stored logs, as the field publishes them, and what must become of them when somebody tampers with the text."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.contract.errors import RowError, VerifierError
from resources_servers.swe_bench import grading
from resources_servers.swe_bench.grading import MarkerState, grade_log, graded, marker_state
from resources_servers.swe_bench.regrade import load_rows, main
from resources_servers.swe_bench.row import SweBenchRow, spelled_as_expected

START, END = "+ : '>>>>> Start Test Output'", "+ : '>>>>> End Test Output'"
EVAL_SCRIPT = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout 0000 tests/test_a.py
git apply -v - <<'EOF_1'
EOF_1
{START.removeprefix("+ ")}
pytest -rA tests/test_a.py
{END.removeprefix("+ ")}
git checkout 0000 tests/test_a.py
"""
RAW_ROW = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "version": "1.0",
    "base_commit": "0" * 40,
    "problem_statement": "It is broken.",
    "patch": "",
    "test_patch": "",
    "FAIL_TO_PASS": '["tests/test_a.py::test_new"]',
    "PASS_TO_PASS": ["tests/test_a.py::test_old"],
    "eval_script": EVAL_SCRIPT,
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}
ROW = SweBenchRow.from_mapping(RAW_ROW)
HONEST_LOG = f"""+ git apply -v -
Checking patch tests/test_a.py...
Applied patch tests/test_a.py cleanly.
{START}
+ pytest -rA tests/test_a.py
PASSED tests/test_a.py::test_old
PASSED tests/test_a.py::test_new
========= 2 passed in 0.01s =========
{END}
+ git checkout 0000 tests/test_a.py
Updated 1 path from 1234567
"""
FORGED_RESULTS = "PASSED tests/test_a.py::test_old\nPASSED tests/test_a.py::test_new\n"
FAILING_LOG = HONEST_LOG.replace("PASSED tests/test_a.py::test_new", "FAILED tests/test_a.py::test_new - assert 0")


def test_grade_is_resolved_when_every_expected_test_passes_between_the_markers() -> None:
    grade = grade_log(ROW, HONEST_LOG)
    assert grade.resolved and grade.markers is MarkerState.GENUINE
    assert grade.tests_status["FAIL_TO_PASS"] == {"success": ["tests/test_a.py::test_new"], "failure": []}


MUTATIONS: dict[str, Callable[[str], str]] = {
    "flipped_result": lambda log: log.replace(
        "PASSED tests/test_a.py::test_old", "FAILED tests/test_a.py::test_old - x"
    ),
    "dropped_result": lambda log: log.replace("PASSED tests/test_a.py::test_new\n", ""),
    "truncated_in_the_run": lambda log: log[: log.index("=========")],
    "truncated_at_the_start": lambda log: log[: log.index(START)],
    "patch_failed_to_apply": lambda log: ">>>>> Patch Apply Failed\n" + log,
    "test_patch_refused": lambda log: log.replace(
        "Applied patch tests/test_a.py cleanly.", "error: tests/test_a.py: already exists in working directory"
    ),
    "test_patch_failed": lambda log: log.replace(
        "Applied patch tests/test_a.py cleanly.", "error: patch failed: tests/test_a.py:1"
    ),
    "timed_out": lambda log: log[: log.index("PASSED")] + ">>>>> Tests Timed Out after 1800 seconds\n",
    "end_marker_replaced_by_a_printed_one": lambda log: log.replace(END, ">>>>> End Test Output"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_grade_is_unresolved_when_the_log_is_mutated(name: str) -> None:
    assert not grade_log(ROW, MUTATIONS[name](HONEST_LOG)).resolved


FORGERIES: dict[str, Callable[[str], str]] = {
    "printed_end_before_the_failure": lambda log: log.replace(
        "PASSED tests/test_a.py::test_old", f"{FORGED_RESULTS}>>>>> End Test Output\nPASSED tests/test_a.py::test_old"
    ),
    "traced_end_before_the_failure": lambda log: log.replace(
        "PASSED tests/test_a.py::test_old", f"{FORGED_RESULTS}{END}\nPASSED tests/test_a.py::test_old"
    ),
    "forged_results_after_the_failure": lambda log: log.replace("=========", f"{FORGED_RESULTS}{END}\n====", 1),
    "second_start_and_end": lambda log: log + f"{START}\n{FORGED_RESULTS}{END}\n",
    "whole_forged_block_first": lambda log: f"{START}\n{FORGED_RESULTS}{END}\n{log}",
    "forged_end_on_a_truncated_log": lambda log: (
        log[: log.index("FAILED")] + f"{FORGED_RESULTS}>>>>> End Test Output\n"
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_grade_is_unresolved_when_a_failing_log_holds_forged_markers(name: str) -> None:
    grade = grade_log(ROW, FORGERIES[name](FAILING_LOG))
    assert not grade.resolved
    assert grade.markers is MarkerState.FORGED


def test_tests_status_counts_every_expected_test_as_failed_when_there_are_no_results() -> None:
    grade = grade_log(ROW, HONEST_LOG[: HONEST_LOG.index(START)])
    assert grade.tests_status["FAIL_TO_PASS"]["failure"] == ["tests/test_a.py::test_new"]
    assert grade.tests_status["PASS_TO_PASS"]["failure"] == ["tests/test_a.py::test_old"]


DJANGO_ROW = SweBenchRow.from_mapping({**RAW_ROW, "log_parser": "parse_log_django"})
QUADRATIC = "a ... Testing against Django installed in x\n" * 40_000


def framed(output: str) -> str:
    return f"{START}\n{output}{END}\n"


async def test_log_that_takes_for_ever_to_parse_is_unread_and_the_event_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grading, "PARSE_TIMEOUT_S", 1.0)
    reading = asyncio.ensure_future(graded(DJANGO_ROW, framed(QUADRATIC)))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    grade, _ = await reading
    assert turns > 1000
    assert not grade.resolved and grade.markers is MarkerState.UNREAD
    assert grade.unread == "the log could not be parsed within 1 s"
    assert grade.tests_status["FAIL_TO_PASS"]["failure"] == ["tests/test_a.py::test_new"]


def test_log_is_graded_although_no_temporary_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-such-folder"))
    assert grade_log(ROW, HONEST_LOG).resolved


async def test_log_is_unread_when_the_official_parser_raises_on_it_or_it_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "IndexError" in (await graded(DJANGO_ROW, framed("FAIL:\n")))[0].unread
    monkeypatch.setattr(grading, "MAX_GRADED_CHARS", 100)
    assert "no more than 100" in (await graded(ROW, HONEST_LOG))[0].unread


async def test_grade_is_the_same_in_a_process_of_its_own() -> None:
    for log in (HONEST_LOG, FAILING_LOG, *(change(HONEST_LOG) for change in MUTATIONS.values())):
        assert await graded(ROW, log) == (grade_log(ROW, log), False)
    short = SweBenchRow.from_mapping({**RAW_ROW, "FAIL_TO_PASS": ["test_x (m.T)"], "log_parser": "parse_log_django"})
    grade, respelled = await graded(short, framed("test_x (m.T.test_x) ... ok\n"))
    assert respelled and grade.tests_status["FAIL_TO_PASS"]["success"] == ["test_x (m.T)"]


async def test_missing_parser_is_the_graders_failure() -> None:
    unknown = SweBenchRow.from_mapping({**RAW_ROW, "log_parser": "parse_log_of_the_future"})
    with pytest.raises(VerifierError, match="no log parser 'parse_log_of_the_future'"):
        await graded(unknown, HONEST_LOG)


@pytest.mark.parametrize(
    "piece",
    [
        "test_a (a.a.a.a.a.a.a.a.a",
        "testtesttesttest",
        "test_a (a.test_a.test_a.test_b",
        "test ",
        "test_a (",
        "error: a: a: a: patch does not apply  \t",
        "error: a: \n",
        "error: a: patch does not apply \n \n \n",
        "+ : '>>>>> ",
    ],
)
def test_own_patterns_read_a_long_log_in_linear_time(piece: str) -> None:
    """Quadratic patterns would take hours for this much; the test's own time limit ends them."""
    for log in (piece * (2 * 1024 * 1024 // len(piece)), piece + " " * 1_000_000 + "x" + piece):
        spelled_as_expected(log, ["test_a (a.a)", "test_b (m.T.test_b)"])
        marker_state(EVAL_SCRIPT, log + framed(log))


def test_regrade_reports_a_log_that_cannot_be_parsed_as_unresolved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "PARSE_TIMEOUT_S", 1.0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**RAW_ROW, "log_parser": "parse_log_django"}) + "\n")
    directory = tmp_path / "logs" / "owner__name-1" / "0"
    directory.mkdir(parents=True)
    (directory / "test_output.txt").write_text(framed(QUADRATIC))
    assert main(["--rows", str(rows), "--logs", str(tmp_path / "logs")]) == 0
    assert "unresolved  owner__name-1/0  (the log could not be parsed within 1 s)" in capsys.readouterr().out


def test_row_is_refused_with_the_fields_named_when_it_is_a_classic_row() -> None:
    classic = {key: value for key, value in RAW_ROW.items() if key not in ("eval_script", "log_parser", "eval_type")}
    with pytest.raises(RowError, match=r"owner__name-1.*eval_script, log_parser, eval_type.*classic"):
        SweBenchRow.from_mapping(classic)


@pytest.mark.parametrize(
    ("field", "wrong"), [("eval_type", "some"), ("repo", 7), ("FAIL_TO_PASS", "no list"), ("instance_id", None)]
)
def test_wrong_field_of_a_row_is_told_with_its_file_and_line(field: str, wrong: object) -> None:
    with pytest.raises(RowError) as refused:
        SweBenchRow.from_mapping({**RAW_ROW, field: wrong}, path="rows.jsonl", line=3)
    assert refused.value.details == {"path": "rows.jsonl", "line": 3}


def test_regrade_prints_one_object_per_log_and_then_the_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(RAW_ROW) + "\n")
    for n, log in enumerate((HONEST_LOG, FAILING_LOG)):
        directory = tmp_path / "logs" / "owner__name-1" / str(n)
        directory.mkdir(parents=True)
        (directory / "test_output.txt").write_text(log)
    assert main(["--rows", str(rows), "--logs", str(tmp_path / "logs"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["instance_id"], line["n"], line["resolved"]) for line in lines[:-1]] == [
        ("owner__name-1", 0, True),
        ("owner__name-1", 1, False),
    ]
    assert lines[-1]["counts"] == {"logs": 2, "resolved": 1, "unresolved": 1, "markers_genuine": 2}


def test_regrade_of_another_pythons_ids_agrees_with_the_verdict_and_tells_the_harnesss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = {"FAIL_TO_PASS": ["test_new (m.T)"], "PASS_TO_PASS": [], "log_parser": "parse_log_django"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**RAW_ROW, **tests}) + "\n")
    directory = tmp_path / "logs" / "owner__name-1" / "0"
    directory.mkdir(parents=True)
    (directory / "test_output.txt").write_text(framed("test_new (m.T.test_new) ... ok\n"))
    assert main(["--rows", str(rows), "--logs", str(tmp_path / "logs"), "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (line["resolved"], line["official_resolved"]) == (True, False)
    assert line["tests_status"]["FAIL_TO_PASS"]["success"] == ["test_new (m.T)"]


def test_regrade_names_the_missing_row_when_a_log_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(RAW_ROW) + "\n")
    directory = tmp_path / "logs" / "other__name-2" / "0"
    directory.mkdir(parents=True)
    (directory / "test_output.txt").write_text(HONEST_LOG)
    assert main(["--rows", str(rows), "--logs", str(tmp_path / "logs")]) == 2
    assert "no row for instance 'other__name-2'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- published logs, where available

DATA = os.environ.get("SWE_BENCH_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="set SWE_BENCH_DATA to a directory with log_rows.jsonl and logs/")


@needs_data
def test_stored_verdicts_are_reproduced_and_their_mutations_never_resolve() -> None:
    data = Path(str(DATA))
    rows = load_rows([data / "log_rows.jsonl"])
    logs = sorted((data / "logs").glob("*/*/test_output.txt"))
    assert logs
    for path in logs:
        row, log = rows[path.parts[-3]], path.read_text(errors="replace")
        stored = json.loads((path.parent / "report.json").read_text())
        grade = grade_log(row, log)
        assert grade.resolved == stored["resolved"], path
        assert grade.tests_status == stored["tests_status"], path
        forged = log.replace(START, f"{START}\nforged\n{END}")
        for mutated in (log[: log.index(END)], ">>>>> Patch Apply Failed\n" + log, forged):
            assert not grade_log(row, mutated).resolved, path
