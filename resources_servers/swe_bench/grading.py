"""Grades evaluation logs: computes the official report, and checks whether the log's markers can be trusted.

The official harness grades the text between the first start marker and the first end marker. The shell prints both
by tracing (``+ : '>>>>> …'``), so graded code that prints the marker's text itself can end the graded region anywhere.
In honest logs each marker occurs exactly once and in the shell's form; any other log is not graded as resolved. The
same holds for a log in which the test patch was not applied, because the tests that ran were not the row's.

The official parsers' regular expressions take quadratic time on crafted logs, and some parsers raise on text that a
test may print, so logs are read in processes that are killed when they take too long. A log that cannot be read within
these bounds does not resolve the instance: the patch is responsible for what the tests print.

The official grader is loaded without half a gigabyte of needless imports: ``swebench.harness.__init__`` imports
docker, datasets and modal, which its grading modules do not need. So this module creates the package object with its
path, and ``__init__`` never runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import sys
import types
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from nemo_gym.contract.errors import VerifierError
from nemo_gym.environment.worker_pool import Answer, Ending, WorkerPool
from resources_servers.swe_bench.row import SweBenchRow, spelled_as_expected


@functools.cache
def grading() -> types.ModuleType:
    """Return the module ``swebench.harness.grading``.

    Raises:
        VerifierError: the package is not installed, or its release does not have this module.
    """
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise VerifierError(
            "the package 'swebench' is not installed; install resources_servers/swe_bench's requirements"
        )
    if "swebench.harness" not in sys.modules:
        package = types.ModuleType("swebench.harness")
        package.__path__ = [str(Path(location) / "harness") for location in spec.submodule_search_locations]
        sys.modules["swebench.harness"] = package
    try:
        return importlib.import_module("swebench.harness.grading")
    except ImportError as error:
        raise VerifierError(f"the installed 'swebench' cannot grade ({error}); install swebench>=5.0.2") from error


PARSE_TIMEOUT_S = 30.0
"""The time limit for reading one log, in seconds."""
MAX_GRADED_CHARS = 16 * 1024 * 1024
"""Longer logs are not read. The slowest official parser needs half of the time limit for a log of this length."""
MAX_READERS = 8
"""The number of logs read concurrently. Each has its own process, started when it is needed."""
_TEST_PATCH_REFUSED = re.compile(
    r"^error: (?:patch failed: |.*: (?:patch does not apply|already exists in (?:working directory|index)"
    r"|No such file or directory|does not exist in index)\s*$|corrupt patch)",
    re.MULTILINE,
)
_TRACED_MARKER = re.compile(r"^set -\w*x|^set -o xtrace", re.MULTILINE)


class MarkerState(StrEnum):
    """Whether the markers of a log can be trusted, or why not."""

    GENUINE = "genuine"
    MISSING = "missing"
    """A marker is missing: the run did not reach its end, or not even its start."""
    FORGED = "forged"
    """A marker is repeated, was not printed by the shell, or is in the wrong order."""
    NO_TEST_PATCH = "no_test_patch"
    """Git refused the test patch before the start marker."""
    UNREAD = "unread"
    """The log could not be read within the bounds; see `LogGrade.unread`."""


@dataclass(frozen=True)
class LogGrade:
    """The verdict on one log."""

    resolved: bool
    """The official verdict, or false if the markers cannot be trusted."""
    official_resolved: bool
    """Exactly what the official harness computes from this text."""
    markers: MarkerState
    report: dict[str, Any] = field(default_factory=dict)
    """The official report of the instance (``patch_successfully_applied``, ``tests_status``, …)."""

    status_map: dict[str, str] = field(default_factory=dict)
    """Test → ``PASSED``, ``FAILED``, ``SKIPPED``, ``ERROR`` or ``XFAIL``, as the official parser reads the log."""
    tests_status: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """``FAIL_TO_PASS``, ``PASS_TO_PASS``, … → ``success`` and ``failure`` lists. For a log without results, every
    expected test is a failure."""
    unread: str = ""
    """Why the log could not be read. If it is not empty, nothing in the log counts."""


async def graded(row: SweBenchRow, log: str) -> tuple[LogGrade, bool]:
    """Grade the log of our own evaluation run, within bounds. Return the grade, and whether test ids had to be
    respelled because another Python version ran them.

    Raises:
        VerifierError: the installed harness cannot parse this row's logs, or no process can be started.
    """
    if too_long := _too_long(log):
        return _unread(row, too_long), False
    for _ in range(2):  # a dead process may have been killed because another process used up the memory
        answer = await _readers.ask(_question(row, log, stored=False), timeout_s=PARSE_TIMEOUT_S)
        if answer.ending is not Ending.DIED:
            break
    return _grade_of(row, answer)


def grade_stored_log(row: SweBenchRow, log: str) -> LogGrade:
    """Grade a stored log within bounds, for callers without an event loop. Test ids are respelled as by `graded`,
    except for ``official_resolved``."""
    if too_long := _too_long(log):
        return _unread(row, too_long)
    answer = _readers.ask_now(_question(row, log, stored=True), timeout_s=PARSE_TIMEOUT_S)
    return _grade_of(row, answer)[0]


def log_text(output: bytes) -> str:
    """Return the output of a run as a log, with the line ends that the official harness reads."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def close_readers() -> None:
    """Stop the reader processes. The next log starts new ones."""
    _readers.close()


def grade_log(row: SweBenchRow, log: str) -> LogGrade:
    """Grade one evaluation log of ``row`` as the official harness does, in this process and without a time limit.

    Raises:
        VerifierError: the installed harness cannot parse this row's logs.
    """
    module = grading()
    if row.log_parser not in module.PARSER_REGISTRY:
        raise VerifierError(
            f"the installed 'swebench' has no log parser '{row.log_parser}', which {row.instance_id} needs"
        )
    spec = importlib.import_module("swebench.types").TestSpec(
        instance_id=row.instance_id,
        image="",
        eval_script_list=[],
        repo=row.repo,
        version=row.version,
        FAIL_TO_PASS=list(row.fail_to_pass),
        PASS_TO_PASS=list(row.pass_to_pass),
        log_parser=row.log_parser,
        eval_type=row.eval_type,
    )
    prediction = {"instance_id": row.instance_id, "model_patch": "", "model_name_or_path": "graded"}
    # The harness reads a file. This one is in memory: a full disk is not held against the log, and nothing stays when
    # the process is killed while it reads.
    with os.fdopen(os.memfd_create("test_output.txt"), "wb") as file:
        file.write(log.encode("utf-8", "replace"))
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        report = module.get_eval_report(
            test_spec=spec, prediction=prediction, test_log_path=path, include_tests_status=True
        )[row.instance_id]
        status_map, _ = module.get_logs_eval(spec, path)
    official = bool(report["resolved"])
    markers = marker_state(row.eval_script, log)
    return LogGrade(
        resolved=official and markers is MarkerState.GENUINE,
        official_resolved=official,
        markers=markers,
        report=report,
        status_map=status_map,
        tests_status=report.get("tests_status") or _all_failed(row),
    )


def marker_state(eval_script: str, log: str) -> MarkerState:
    """Check that the log has each marker once, in order, and in the form in which ``eval_script`` prints it."""
    module = grading()
    start, end = module.START_TEST_OUTPUT, module.END_TEST_OUTPUT
    if start not in log or end not in log:
        return MarkerState.MISSING
    if log.count(start) != 1 or log.count(end) != 1 or log.index(start) > log.index(end):
        return MarkerState.FORGED
    if _TRACED_MARKER.search(eval_script) and not all(f"+ : '{marker}'" in log for marker in (start, end)):
        return MarkerState.FORGED
    if _TEST_PATCH_REFUSED.search(log, 0, log.index(start)):
        return MarkerState.NO_TEST_PATCH
    return MarkerState.GENUINE


def read_log(row: dict[str, Any], log: str, *, stored: bool) -> dict[str, Any]:
    """Run in a reader process: return the result of `grade_log`, with test ids respelled, as plain data for JSON.
    ``official_resolved`` of a ``stored`` log is computed from its unchanged text."""
    task = msgspec.convert(row, SweBenchRow)
    text, respelled = spelled_as_expected(log, (*task.fail_to_pass, *task.pass_to_pass))
    grade = grade_log(task, text)
    if stored and respelled:
        grade = dataclasses.replace(grade, official_resolved=grade_log(task, log).official_resolved)
    return {"grade": dataclasses.asdict(grade), "respelled": respelled}


def _question(row: SweBenchRow, log: str, *, stored: bool) -> dict[str, Any]:
    blanks = {"problem_statement": "", "patch": "", "test_patch": ""}
    return {"row": {**dataclasses.asdict(row), **blanks}, "log": log, "stored": stored}


def _grade_of(row: SweBenchRow, answer: Answer) -> tuple[LogGrade, bool]:
    if answer.ending is Ending.ANSWERED:
        return msgspec.convert(answer.value["grade"], LogGrade), answer.value["respelled"]
    reason = {
        Ending.TIMED_OUT: f"the log could not be parsed within {PARSE_TIMEOUT_S:g} s",
        Ending.FAILED: f"the log's parser failed: {answer.said}",
        Ending.DIED: "the log's parser was killed or crashed, twice",
    }[answer.ending]
    return _unread(row, reason), False


def _too_long(log: str) -> str:
    if len(log) <= MAX_GRADED_CHARS:
        return ""
    return f"the log has {len(log)} characters; no more than {MAX_GRADED_CHARS} are parsed"


def _unread(row: SweBenchRow, reason: str) -> LogGrade:
    return LogGrade(
        resolved=False,
        official_resolved=False,
        markers=MarkerState.UNREAD,
        tests_status=_all_failed(row),
        unread=reason,
    )


_SAMPLE = {
    "row": {
        **dict.fromkeys(("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"), "sample"),
        "fail_to_pass": ["test_a (m.T)"],
        "pass_to_pass": [],
        "eval_script": "",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    },
    "log": "",
    "stored": False,
}
_readers = WorkerPool(
    f"{__name__}:read_log",
    workers=MAX_READERS,
    warm_up=_SAMPLE,
    missing="install resources_servers/swe_bench's requirements",
)


def _all_failed(row: SweBenchRow) -> dict[str, dict[str, list[str]]]:
    return {
        "FAIL_TO_PASS": {"success": [], "failure": list(row.fail_to_pass)},
        "PASS_TO_PASS": {"success": [], "failure": list(row.pass_to_pass)},
        "FAIL_TO_FAIL": {"success": [], "failure": []},
        "PASS_TO_FAIL": {"success": [], "failure": []},
    }
