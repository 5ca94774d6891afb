"""Determines what a solution must answer: the expected side of each assertion, and checks made from gold's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from resources_servers.swe_bench.confirm.assertions import Probe, Side
from resources_servers.swe_bench.confirm.material import Calls, RenderedSet
from resources_servers.swe_bench.confirm.values import Check, Value, carries, equal

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")


def decide_sides(own: RenderedSet, gold: Calls, base: Calls) -> dict[str, Side]:
    """Return the expected side of every two-sided probe: the side that the source shows as expected, else the side on
    which base and gold agree."""
    sides: dict[str, Side] = {}
    changes: dict[str, set[str]] = {}
    for test, calls in gold.items():
        for call, base_call in zip(calls, base.get(test, []), strict=False):
            for (key, values), (other_key, other_values) in zip(call, base_call, strict=False):
                if key != other_key or len(values) < 2 or len(other_values) < 2:
                    break
                for side, gold_value, base_value in zip(("left", "right"), values, other_values, strict=False):
                    if not equal(gold_value, base_value, said=True):
                        changes.setdefault(key, set()).add(side)
    for file in own.files.values():
        for key, probe in file.probes.items():
            changed = changes.get(key, set())
            if probe.expected is not None:
                sides[key] = probe.expected
            elif changed == {"right"}:
                sides[key] = "left"
            else:
                sides[key] = "right"
    return sides


def checks_of(
    one: RenderedSet, calls: Calls, probes: Mapping[str, Probe], sides: Mapping[str, Side]
) -> dict[str, tuple[tuple[Check, ...], ...]]:
    """Return the checks of a blinded rendering, made from gold's values of both sides in the same words."""
    sites = {key: token for token, key in one.tokens.items()}
    here = {key.partition("|")[0] for key in one.tokens.values()}
    checks: dict[str, tuple[tuple[Check, ...], ...]] = {}
    for test, invocations in calls.items():
        keys = {key for call_records in invocations for key, _ in call_records}
        if test.partition("|")[0] not in here or not sites.keys() >= {test, *keys}:
            continue  # a blinded rendering leaves out what a context of an expected error calls in its arguments
        checks[test] = tuple(
            (
                Check(sites[test], "begin"),
                *(_check(sites[key], probes[key], sides.get(key), values) for key, values in call_records),
            )
            for call_records in invocations
        )
    return checks


def _check(site: str, probe: Probe, expected_side: Side | None, values: list[Value]) -> Check:
    if probe.op in ("truth", "false"):
        return Check(site, probe.op, answer=values[0])
    if probe.op.startswith("raises"):
        kind = values[1] if len(values) > 1 else None
        return Check(site, probe.op, expected=kind, pattern=values[2] if len(values) > 2 else None)
    dropped = expected_side or probe.expected or "right"
    left, right = values[0], values[1]
    kept, expected = (left, right) if dropped == "right" else (right, left)
    compare_text = _says_the_same(left, right)
    side: Side = "left" if dropped == "right" else "right"
    check = Check(site, probe.op, side, expected, kept, probe.extra, said=compare_text)
    if probe.op != "like" and check.holds([kept]):
        return check
    if probe.op in ("==", "like", "count", "has") and (equal(kept, expected, said=True) or carries(kept)):
        return Check(site, "like", side, None, kept, said=compare_text)
    return Check(site, "present", side)


def holds(probe: Probe, values: list[Value]) -> bool:
    """Whether the assertion is true by a discovery rendering's record of both sides."""
    if probe.op in ("truth", "false"):
        return len(values) > 1 and values[1] == ["truth", probe.op == "truth"]
    if probe.op.startswith("raises"):
        pattern = values[2] if len(values) > 2 else None
        return Check("", probe.op, expected=values[1] if len(values) > 1 else None, pattern=pattern).holds(values[:1])
    if len(values) < 2:
        return False
    if probe.op == "like":
        return equal(values[0], values[1], said=True)
    return Check("", probe.op, "left", values[1], extra=probe.extra, said=_says_the_same(*values[:2])).holds(
        values[:1]
    )


def _says_the_same(left: Value, right: Value) -> bool:
    """Whether two values are equal with objects compared by their text, and nothing in them changes between runs."""
    return equal(left, right, said=True) and steady(left, right)


def steady(*values: Value) -> bool:
    """Whether the values contain no memory address, which would change from run to run."""
    return not _ADDRESS.search(str(values))
