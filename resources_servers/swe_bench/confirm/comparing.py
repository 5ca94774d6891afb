"""What a rendering recorded against what it must record, in a process that is killed when it takes too long.

Both the file of records and the values in it are the work of code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nemo_gym.environment.worker_pool import Ending, WorkerPool
from resources_servers.swe_bench.confirm.values import Check, Record, is_value

COMPARE_TIMEOUT_S = 30.0
MAX_COMPARERS = 8
"""Attempts compared at once; each has a process of its own, made when it is needed."""

Tests = Mapping[str, Sequence[Sequence[Check]]]
"""Test → its invocations, each the checks of its records in order; the first one begins the test."""


async def compare(tests: Sequence[Tests], records: Sequence[str]) -> list[dict[str, str]]:
    """For each rendering the tests whose records are not what they must be → why.

    Raises:
        VerifierError: no process can be started.
    """
    plain = [
        {name: [[asdict(check) for check in checks] for checks in calls] for name, calls in one.items()}
        for one in tests
    ]
    answer = await _comparers.ask({"tests": plain, "records": list(records)}, timeout_s=COMPARE_TIMEOUT_S)
    if answer.ending is Ending.ANSWERED:
        return [dict(one) for one in answer.value]
    why = {
        Ending.TIMED_OUT: f"its records could not be compared within {COMPARE_TIMEOUT_S:g} s",
        Ending.FAILED: "its records cannot be compared",
        Ending.DIED: "comparing its records took too much memory",
    }[answer.ending]
    return [dict.fromkeys(one, why) for one in tests]


def close_comparers() -> None:
    """End the processes that wait for records; the next comparison starts new ones."""
    _comparers.close()


def compare_here(tests: Sequence[Mapping[str, Any]], records: Sequence[str]) -> list[dict[str, str]]:
    """What a comparing process answers to `compare`."""
    return [
        failed(
            {name: [[Check(**check) for check in checks] for checks in calls] for name, calls in one.items()},
            read_records(text),
        )
        for one, text in zip(tests, records, strict=True)
    ]


def read_records(text: str) -> list[Record]:
    """The records of one file. What the code under test wrote there itself is no record."""
    found: list[Record] = []
    for line in text.split("\n"):
        try:
            site, values = json.loads(line)
            if isinstance(site, str) and isinstance(values, list) and all(map(is_value, values)):
                found.append((site, values))
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def failed(tests: Tests, records: Sequence[Record]) -> dict[str, str]:
    """Tests whose records are not what they must be → why."""
    begins = {calls[0][0].site: test for test, calls in tests.items() if calls and calls[0]}
    known = {check.site for calls in tests.values() for checks in calls for check in checks}
    seen: dict[str, list[list[Record]]] = {test: [] for test in tests}
    current: list[Record] | None = None
    for site, values in records:
        if site in begins:
            current = []
            seen[begins[site]].append(current)
        if current is not None and site in known:
            current.append((site, values))
    return {test: why for test, calls in tests.items() if (why := _difference(calls, seen[test])) is not None}


def _difference(expected: Sequence[Sequence[Check]], seen: Sequence[Sequence[Record]]) -> str | None:
    if len(expected) != len(seen):
        return f"ran {len(seen)} times, not {len(expected)}"
    for checks, records in zip(expected, seen, strict=True):
        if len(checks) != len(records):
            return f"left {len(records)} records, not {len(checks)}"
        if [check.site for check in checks] != [site for site, _ in records]:
            return "left its records in another order"
        for number, (check, (_, values)) in enumerate(zip(checks, records, strict=True)):
            if not check.holds(values):
                return f"record {number} of {len(checks)} is another value"
    return None


_SAMPLE: dict[str, Any] = {"tests": [{}], "records": [""]}
_comparers = WorkerPool(
    f"{__name__}:compare_here",
    workers=MAX_COMPARERS,
    warm_up=_SAMPLE,
    missing="install resources_servers/swe_bench's requirements",
)
