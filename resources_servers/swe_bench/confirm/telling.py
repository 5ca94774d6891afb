"""What gold's answers say about the tests: the expected side of each assertion, and the checks of a rendering. Keeps
those renderings that reliably distinguish gold from base, and rates how strong they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from resources_servers.swe_bench.confirm.assertions import Probe, Side
from resources_servers.swe_bench.confirm.controls import ControlledRendering, Strength
from resources_servers.swe_bench.confirm.material import Call, Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.runs import failed, read_records
from resources_servers.swe_bench.confirm.values import Check, Value, carries, equal

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
GOLD_RUNS = 4
"""The number of gold runs beside the one that the checks are made from. Tests that vary over the five are dropped."""
BASE_RUNS = 3
_ASKING = frozenset(("==", "in", "not in", "like", "count", "close", "almost", "startswith", "endswith", "matches"))
_FEW: tuple[Value, ...] = (["none"], ["bool", True], ["bool", False])
SURE = 2
"""The number of renderings run by the test command that must confirm a test for strength ``strong``."""


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


@dataclass
class Rated:
    """A rendering with the checks of the tests that it still confirms, and base's answers to it so far."""

    rendered: RenderedSet
    controlled: ControlledRendering
    base: list[Calls] = field(default_factory=list)


class Telling:
    """Renderings, and the results of gold and base with them so far.

    Args:
        renderings: each with the checks made from gold's answers in its words.
        public: gold's answers in the row's own words.
    """

    def __init__(self, material: Material, renderings: Sequence[Rated], public: Calls) -> None:
        self._material, self._public = material, public
        self.kept = list(renderings)
        self._fixed = {test for test in public if material.is_fixed(test)}

    async def run(self, gold: int, base: int) -> None:
        """Run all renderings that often. Drop tests that gold does not always pass, tests to be fixed that base
        passes, renderings that decide nothing then, and all but the best plain rendering of each file."""
        if not self.kept:
            return
        drop: list[set[str]] = [set() for _ in self.kept]
        for patch, times in ((self._material.gold, gold), (b"", base)):
            run = await self._material.run(patch, [one.controlled.rendering for one in self.kept] * times)
            for place, records in enumerate(run.records):
                number = place % len(self.kept)
                one = self.kept[number]
                failed_tests = set(failed(one.controlled.tests, read_records(records)))
                if patch:
                    drop[number] |= failed_tests
                else:
                    one.base.append(one.rendered.calls(records))
                    drop[number] |= self._fixed - failed_tests
        for number, one in enumerate(self.kept):
            rendering, checks = one.controlled.rendering, one.controlled.tests
            tests = {test: calls for test, calls in checks.items() if test not in drop[number] and any(calls)}
            if not tests or not (self._fixed & set(tests) or rendering.plain):
                self._material.notes.append(f"rendering {number} decides nothing")
                tests = {}
            one.controlled = ControlledRendering(rendering, tests)
        best = one_plain([one.controlled for one in self.kept if one.controlled.tests], self._fixed)
        self.kept = [one for one in self.kept if any(one.controlled is it for it in best)]

    def strengths(self) -> dict[str, Strength]:
        """Return how well each test to be fixed is controlled."""
        levels: dict[str, list[Strength]] = {}
        for one in self.kept:
            tests = one.controlled.tests if not one.controlled.rendering.plain else {}
            for test in self._fixed & set(tests):
                more = _carries_more_than_the_public(tests[test], self._public[test], one.base, test, one.rendered)
                levels.setdefault(test, []).append("strong" if more else "weak")
        strengths: dict[str, Strength] = {}
        for test in self._fixed:
            test_levels = levels.get(test, [])
            # All renderings must confirm an attempt, so it is enough if one asks for more than the public test.
            strong = len(test_levels) >= SURE and "strong" in test_levels
            strengths[test] = "none" if not test_levels else "strong" if strong else "weak"
        return strengths


def may_be_strong(own: RenderedSet, public: Sequence[Call]) -> bool:
    """Whether a test asks for a value that other inputs can change, and not only for a truth value, type or error."""
    return any(
        own.probes[key].op in _ASKING and carries(values[0]) and values[0] not in _FEW
        for call in public
        for key, values in call
    )


def one_plain(kept: Sequence[ControlledRendering], fixed: Collection[str]) -> list[ControlledRendering]:
    """Keep only the best plain rendering of each file: the one that confirms most of the tests to be fixed, and if
    several do, one that runs inside the package."""
    best: dict[str, ControlledRendering] = {}
    for one in kept:
        if one.rendering.plain:
            path = next(iter(one.tests)).partition("|")[0]
            best[path] = max(best.get(path, one), one, key=lambda it: _worth(it, fixed))
    return [one for one in kept if not one.rendering.plain or any(one is it for it in best.values())]


def without_surplus(kept: Sequence[ControlledRendering], fixed: Collection[str]) -> list[ControlledRendering]:
    """Drop the first of three or more renderings run by the test command if the others hold its tests as well. A test
    that asks for the same in other words and has twins does not need a third rendering."""
    under_command = [controlled for controlled in kept if not controlled.rendering.plain]
    if len(under_command) > SURE:
        first, second, *more = (controlled.tests.keys() for controlled in under_command)
        if first <= second and all(first & set(fixed) <= tests for tests in more):
            return [controlled for controlled in kept if controlled is not under_command[0]]
    return list(kept)


def _worth(plain: ControlledRendering, fixed: Collection[str]) -> tuple[int, bool, int]:
    inside = bool(plain.rendering.module) and not plain.rendering.beside
    return len(plain.tests.keys() & fixed), inside, len(plain.tests)


def _carries_more_than_the_public(
    calls: tuple[tuple[Check, ...], ...], public: list[Call], base: Sequence[Calls], test: str, rendered: RenderedSet
) -> bool:
    """Whether a probe that base fails asks for a value that cannot be copied from the public test."""
    names = rendered.tokens
    for number, (checks, public_records) in enumerate(zip(calls, public, strict=False)):
        for place, (check, (key, values)) in enumerate(zip(checks[1:], public_records, strict=False)):
            expected_value = check.answer if check.op == "like" else check.expected
            if names.get(check.site) != key or (not carries(expected_value) and not check.said):
                continue
            public_values = values[:2]
            if any(expected_value is not None and equal(expected_value, value, said=True) for value in public_values):
                continue
            if all(_fails_at(base_calls.get(test, []), number, place, check) for base_calls in base):
                return True
    return False


def _fails_at(calls: list[Call], number: int, place: int, check: Check) -> bool:
    if number >= len(calls) or place >= len(calls[number]):
        return True
    return not check.holds(calls[number][place][1])
