"""Keeping of a row's renderings what tells a solution from none, run after run, and how well it tells."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from resources_servers.swe_bench.confirm.comparing import failed, read_records
from resources_servers.swe_bench.confirm.controls import ControlledRendering, Strength
from resources_servers.swe_bench.confirm.material import Call, Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.values import Check, Value, carries, equal

GOLD_RUNS = 4
"""Beside the one that the checks are made from: what varies over five runs decides nothing."""
BASE_RUNS = 3
_ASKING = frozenset(("==", "in", "not in", "like", "count", "close", "almost", "startswith", "endswith", "matches"))
_FEW: tuple[Value, ...] = (["none"], ["bool", True], ["bool", False])
SURE = 2
"""Renderings under the test command that must confirm a test before it is well controlled."""


async def keep_what_tells(
    material: Material,
    controlled: Sequence[ControlledRendering],
    sets: Sequence[tuple[RenderedSet, Calls]],
    public: Calls,
) -> tuple[list[ControlledRendering], dict[str, Strength]]:
    """Drop tests that gold does not pass every time, and renderings in which base passes what it should not."""
    renderings = [one.rendering for one in controlled]
    fixed = {test for test in public if material.is_fixed(test)}
    unsteady: list[set[str]] = [set() for _ in controlled]
    unfailing: list[set[str]] = [set() for _ in controlled]
    seen_base: list[list[Calls]] = [[] for _ in controlled]
    for patch, times in ((material.gold, GOLD_RUNS), (b"", BASE_RUNS)):
        run = await material.run(patch, renderings * times)
        for place in range(len(controlled) * times):
            number = place % len(controlled)
            records = run.records[place] if run.records else ""
            missed = set(failed(controlled[number].tests, read_records(records)))
            if patch:
                unsteady[number] |= missed
            else:
                seen_base[number].append(sets[number][0].calls(records))
                unfailing[number] |= fixed - missed
    kept: list[ControlledRendering] = []
    levels: dict[str, list[Strength]] = {}
    for number, one in enumerate(controlled):
        drop = unsteady[number] | unfailing[number]
        tests = {test: calls for test, calls in one.tests.items() if test not in drop and any(calls)}
        if not tests or not (fixed & set(tests) or one.rendering.plain):
            material.notes.append(f"rendering {number} decides nothing")
            continue
        kept.append(ControlledRendering(one.rendering, tests))
        if not one.rendering.plain:
            for test in fixed & set(tests):
                strong = _carries_more_than_the_public(
                    tests[test], public[test], seen_base[number], test, sets[number][0]
                )
                levels.setdefault(test, []).append("strong" if strong else "weak")
    strengths: dict[str, Strength] = {}
    for test in fixed:
        found = levels.get(test, [])
        # All renderings have to be confirmed, so what one asks for beyond the public test is asked for.
        strong = len(found) >= SURE and "strong" in found
        strengths[test] = "none" if not found else "strong" if strong else "weak"
    return one_plain(kept, fixed), strengths


def may_be_strong(own: RenderedSet, public: Sequence[Call]) -> bool:
    """Whether a test asks for a value that other inputs can change: no truth value, no type, no error."""
    return any(
        own.probes[key].op in _ASKING and carries(values[0]) and values[0] not in _FEW
        for call in public
        for key, values in call
    )


def one_plain(kept: Sequence[ControlledRendering], fixed: Collection[str]) -> list[ControlledRendering]:
    """Of the plain renderings of a file only the one that confirms most of what is to be fixed, within the package if
    it can."""
    best: dict[str, ControlledRendering] = {}
    for one in kept:
        if one.rendering.plain:
            path = next(iter(one.tests)).partition("|")[0]
            best[path] = max(best.get(path, one), one, key=lambda it: _worth(it, fixed))
    return [one for one in kept if not one.rendering.plain or any(one is it for it in best.values())]


def _worth(plain: ControlledRendering, fixed: Collection[str]) -> tuple[int, bool, int]:
    return len(plain.tests.keys() & fixed), bool(plain.rendering.module), len(plain.tests)


def _carries_more_than_the_public(
    calls: tuple[tuple[Check, ...], ...], public: list[Call], base: Sequence[Calls], test: str, one: RenderedSet
) -> bool:
    """Whether a probe that base fails asks for a value that knowing the public test does not give away."""
    names = one.tokens
    for number, (checks, told) in enumerate(zip(calls, public, strict=False)):
        for place, (check, (key, values)) in enumerate(zip(checks[1:], told, strict=False)):
            wanted = check.answer if check.op == "like" else check.expected
            if names.get(check.site) != key or (not carries(wanted) and not check.said):
                continue
            known = values[:2]
            if any(wanted is not None and equal(wanted, value, said=True) for value in known):
                continue
            if all(_fails_at(seen.get(test, []), number, place, check) for seen in base):
                return True
    return False


def _fails_at(calls: list[Call], number: int, place: int, check: Check) -> bool:
    if number >= len(calls) or place >= len(calls[number]):
        return True
    return not check.holds(calls[number][place][1])
