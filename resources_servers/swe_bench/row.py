"""A SWE-bench row, checked once: what the grader needs of it, with the dataset's spelling variants evened out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from nemo_gym.contract.errors import RowError

REQUIRED_FIELDS = (
    "instance_id",
    "repo",
    "base_commit",
    "test_patch",
    "problem_statement",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
HARNESS_FIELDS = ("eval_script", "log_parser", "eval_type")
"""Fields that rows of SWE-bench 5 carry and classic rows lack."""


@dataclass(frozen=True)
class SweBenchRow:
    """One instance of SWE-bench (Verified, Lite, full or Multilingual), as published with harness 5 and later."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    """The gold patch; private."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    eval_script: str
    log_parser: str
    eval_type: Literal["pass_and_fail", "fail_only"]
    version: str = ""
    image: str = ""
    """The official Docker image's name; empty when the row names none."""

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any], *, path: str | None = None, line: int | None = None) -> SweBenchRow:
        """Check a dataset row.

        Raises:
            RowError: a field is missing or of a wrong type; the message names the instance, the field and the fix.
        """
        where: dict[str, Any] = {"path": path, "line": line}
        name = row.get("instance_id", "without instance_id")
        missing = [field for field in REQUIRED_FIELDS if row.get(field) is None]
        if missing:
            raise RowError(f"SWE-bench row {name}: missing {', '.join(missing)}", **where)
        classic = [field for field in HARNESS_FIELDS if not row.get(field)]
        if classic:
            raise RowError(
                f"SWE-bench row {name}: missing {', '.join(classic)}; this is a classic row, take the dataset's"
                " revision for SWE-bench 5 or later, whose rows carry the evaluation script and parser",
                **where,
            )
        if row["eval_type"] not in ("pass_and_fail", "fail_only"):
            raise RowError(f"SWE-bench row {name}: eval_type is {row['eval_type']!r}, not pass_and_fail or fail_only")
        return cls(
            instance_id=_text(row, "instance_id", where),
            repo=_text(row, "repo", where),
            base_commit=_text(row, "base_commit", where),
            problem_statement=_text(row, "problem_statement", where),
            patch=row.get("patch") or "",
            test_patch=_text(row, "test_patch", where),
            fail_to_pass=_test_ids(row, "FAIL_TO_PASS", where),
            pass_to_pass=_test_ids(row, "PASS_TO_PASS", where),
            eval_script=_text(row, "eval_script", where),
            log_parser=_text(row, "log_parser", where),
            eval_type=cast(Literal["pass_and_fail", "fail_only"], row["eval_type"]),
            version=str(row.get("version") or ""),
            image=str(row.get("image") or ""),
        )


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """``(line number, row)`` of a JSONL file; blank lines are skipped.

    Raises:
        RowError: the file cannot be read, or a line is not a JSON object; names path and line.
    """
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise RowError(f"cannot read rows from {path}: {error.strerror}", path=str(path)) from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RowError(f"{path}:{number}: not JSON: {error}", path=str(path), line=number) from error
            if not isinstance(row, dict):
                raise RowError(f"{path}:{number}: a row must be a JSON object", path=str(path), line=number)
            yield number, row


def _text(row: Mapping[str, Any], field: str, where: Mapping[str, Any]) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise RowError(f"SWE-bench row {row.get('instance_id')}: {field} must be text, not {type(value).__name__}")
    return value


def _test_ids(row: Mapping[str, Any], field: str, where: Mapping[str, Any]) -> tuple[str, ...]:
    """Test ids are a list, or a list written as a JSON string, depending on the dataset."""
    value = row[field]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(
            f"SWE-bench row {row.get('instance_id')}: {field} must be a list of test ids, or one as a JSON string",
            **where,
        )
    return tuple(value)
