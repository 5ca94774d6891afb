"""Grade stored evaluation logs again, offline.

``python -m resources_servers.swe_bench.regrade --rows ROWS.jsonl [--rows MORE.jsonl] --logs DIR [--json]``
grades every ``DIR/<instance_id>/<n>/test_output.txt``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import NemoGymError, RowError
from resources_servers.swe_bench.grading import LogGrade, grade_stored_log, log_text
from resources_servers.swe_bench.row import SweBenchRow, dataset_row, read_rows

LOG_NAME = "test_output.txt"


def load_rows(paths: Sequence[Path]) -> dict[str, SweBenchRow]:
    """Return rows by instance id. If several files have an instance, the first file wins."""
    rows: dict[str, SweBenchRow] = {}
    for path in paths:
        for number, raw in read_rows(path):
            row = SweBenchRow.from_mapping(dataset_row(raw), path=str(path), line=number)
            rows.setdefault(row.instance_id, row)
    return rows


def regrade(rows: dict[str, SweBenchRow], logs: Path) -> Iterator[tuple[str, int | str, LogGrade]]:
    """Yield ``(instance id, n, grade)`` for every stored log, in the order of their paths.

    Raises:
        RowError: there are no logs, or a log belongs to an instance without a row.
    """
    paths = sorted(logs.glob(f"*/*/{LOG_NAME}"), key=lambda path: (path.parts[-3], _number(path.parts[-2])))
    if not paths:
        raise RowError(f"no logs found: expected {logs}/<instance_id>/<n>/{LOG_NAME}", path=str(logs))
    for path in paths:
        instance_id, attempt = path.parts[-3], path.parts[-2]
        if instance_id not in rows:
            raise RowError(
                f"{path}: no row for instance '{instance_id}'; add the file that has it with another --rows",
                path=str(path),
            )
        n = int(attempt) if attempt.isdigit() else attempt
        yield instance_id, n, grade_stored_log(rows[instance_id], log_text(path.read_bytes()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="regrade", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, action="append", required=True, help="SWE-bench rows (JSONL); repeatable")
    parser.add_argument("--logs", type=Path, required=True, help=f"directory of <instance_id>/<n>/{LOG_NAME}")
    parser.add_argument("--json", action="store_true", help="one JSON object per log, then one with the counts")
    options = parser.parse_args(arguments)
    counts = {"logs": 0, "resolved": 0, "unresolved": 0}
    try:
        for instance_id, n, grade in regrade(load_rows(options.rows), options.logs):
            counts["logs"] += 1
            counts["resolved" if grade.resolved else "unresolved"] += 1
            counts[f"markers_{grade.markers}"] = counts.get(f"markers_{grade.markers}", 0) + 1
            _print(_as_json(instance_id, n, grade) if options.json else _as_text(instance_id, n, grade))
    except NemoGymError as error:
        sys.stderr.write(f"regrade: {error}\n")
        return 2
    text = f"{counts['logs']} logs: {counts['resolved']} resolved, {counts['unresolved']} not"
    _print(json.dumps({"counts": counts}) if options.json else text)
    return 0


def _as_json(instance_id: str, n: int | str, grade: LogGrade) -> str:
    line: dict[str, Any] = {
        "instance_id": instance_id,
        "n": n,
        "resolved": grade.resolved,
        "tests_status": grade.tests_status,
        "official_resolved": grade.official_resolved,
        "markers": str(grade.markers),
        **({"unread": grade.unread} if grade.unread else {}),
        "patch_successfully_applied": bool(grade.report.get("patch_successfully_applied")),
    }
    return json.dumps(line)


def _as_text(instance_id: str, n: int | str, grade: LogGrade) -> str:
    note = "" if grade.markers == "genuine" else f"  ({grade.unread or f'markers {grade.markers}'})"
    return f"{'resolved  ' if grade.resolved else 'unresolved'}  {instance_id}/{n}{note}"


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdigit() else sys.maxsize, text)


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
