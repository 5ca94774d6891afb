"""Keeps those of a row's renderings that reliably distinguish gold from base, and rates how strong they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


class Telling:
    """Renderings, and the results of gold and base with them so far.

    Args:
        sets: each rendering, and gold's answers in its words.
        controlled: the same renderings with the checks made from these answers.
        public: gold's answers in the row's own words.
    """

    def __init__(
        self,
        material: Material,
        sets: Sequence[tuple[RenderedSet, Calls]],
        controlled: Sequence[ControlledRendering],
        public: Calls,
    ) -> None:
        self._material, self._public = material, public
        self._sets = list(sets)
        self.kept = list(controlled)
        self._fixed = {test for test in public if material.is_fixed(test)}
        self._seen_base: list[list[Calls]] = [[] for _ in controlled]

    async def run(self, gold: int, base: int) -> None:
        """Run all renderings that often. Drop tests that gold does not always pass, tests to be fixed that base
        passes, renderings that decide nothing then, and all but the best plain rendering of each file."""
        count = len(self.kept)
        if not count:
            return
        drop: list[set[str]] = [set() for _ in self.kept]
        for patch, times in ((self._material.gold, gold), (b"", base)):
            run = await self._material.run(patch, [one.rendering for one in self.kept] * times)
            for place in range(count * times):
                number = place % count
                records = run.records[place] if run.records else ""
                failed_tests = set(failed(self.kept[number].tests, read_records(records)))
                if patch:
                    drop[number] |= failed_tests
                else:
                    self._seen_base[number].append(self._sets[number][0].calls(records))
                    drop[number] |= self._fixed - failed_tests
        for number, one in enumerate(self.kept):
            tests = {test: calls for test, calls in one.tests.items() if test not in drop[number] and any(calls)}
            if not tests or not (self._fixed & set(tests) or one.rendering.plain):
                self._material.notes.append(f"rendering {number} decides nothing")
                tests = {}
            self.kept[number] = ControlledRendering(one.rendering, tests)
        best = one_plain([one for one in self.kept if one.tests], self._fixed)
        places = [number for number, one in enumerate(self.kept) if any(one is it for it in best)]
        self.kept = [self.kept[number] for number in places]
        self._sets = [self._sets[number] for number in places]
        self._seen_base = [self._seen_base[number] for number in places]

    def strengths(self) -> dict[str, Strength]:
        """Return how well each test to be fixed is controlled."""
        levels: dict[str, list[Strength]] = {}
        for controlled, (rendered, _), base in zip(self.kept, self._sets, self._seen_base, strict=True):
            for test in self._fixed & set(controlled.tests) if not controlled.rendering.plain else ():
                more = _carries_more_than_the_public(controlled.tests[test], self._public[test], base, test, rendered)
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
