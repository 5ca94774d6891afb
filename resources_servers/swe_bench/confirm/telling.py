"""Keeps those of a row's renderings that reliably distinguish gold from base, and rates how strong they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from resources_servers.swe_bench.confirm.controls import ControlledRendering, Strength
from resources_servers.swe_bench.confirm.material import Call, Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.runs import failed, read_records
from resources_servers.swe_bench.confirm.values import Check, Value, carries, equal

GOLD_RUNS = 4
"""The number of gold runs beside the one that the checks are made from. Tests that vary over the five are dropped."""
BASE_RUNS = 3
_ASKING = frozenset(("==", "in", "not in", "like", "count", "close", "almost", "startswith", "endswith", "matches"))
_FEW: tuple[Value, ...] = (["none"], ["bool", True], ["bool", False])
SURE = 2
"""The number of renderings run by the test command that must confirm a test for strength ``strong``."""


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
    return len(plain.tests.keys() & fixed), bool(plain.rendering.module), len(plain.tests)


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
