"""Finds other words and inputs for a row's tests with which gold still passes them and base still fails them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from resources_servers.swe_bench.confirm.material import Call, Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.rendering import Rendered
from resources_servers.swe_bench.confirm.telling import holds, steady
from resources_servers.swe_bench.confirm.values import equal, same_form
from resources_servers.swe_bench.confirm.varying import KINDS, Kind

OWN_NUMBERS = 1
"""The index of the rendering that keeps the row's own numbers, but not its words."""
_MAX_ROUNDS = 6
_DRAWS = 3
"""The number of variations to draw; the best one is used."""
Words = tuple[int, set[str] | None, Calls]
"""The seed of a rendering's words, the tokens that gold cannot do without (``None``: all), and gold's answers in those
words."""
Varied = tuple[int, dict[str, frozenset[Kind]], Calls]
"""The seed of a variation, the kinds varied in each test, and gold's answers."""
_LONE_KINDS: frozenset[Kind] = frozenset(("words", "more words", "fractions"))
"""The kinds to vary in a test that fails with all of its kinds at once."""


async def find_words(
    material: Material, own: RenderedSet, public: Calls, before: Calls, seeds: Sequence[int]
) -> list[Words]:
    """Return for each rendering the seed of its words, the tokens that gold cannot do without, and gold's answers in
    those words."""
    words = {f"{path}|{test}": w for path, file in own.files.items() for test, w in file.words_by_test.items()}
    fixed = {test for test in public if material.is_fixed(test)}
    # Other words are not to blame for tests in which gold and base do not differ even in the tests' own words.
    indistinct = {test for test in fixed if not _differs(own, public[test], before.get(test, []))}
    pinned: list[set[str] | None] = [first_pins(number, own.files.values()) for number in range(len(seeds))]
    new_seeds = list(seeds)
    gold_calls: list[Calls] = [{} for _ in seeds]
    pending = set(range(len(seeds)))
    tries: Counter[tuple[int, str]] = Counter()
    for attempt in range(_MAX_ROUNDS):
        if attempt == _MAX_ROUNDS - 1 or asyncio.get_running_loop().time() > material.words_until:
            for number in pending:
                pinned[number] = None
        sets = {number: material.render("discover", new_seeds[number], pinned[number]) for number in sorted(pending)}
        ready = [one for one in sets.values() if one is not None]
        gold, base = await material.calls(material.gold, ready), await material.calls(b"", ready)
        for number, calls, unfixed in zip(sets, gold, base, strict=True):
            gold_calls[number] = calls
            # A test to be fixed that other words break gets its own words back. Other broken tests are left out later.
            broken = _broken(own, public, calls) & fixed
            broken |= {
                test for test in fixed - indistinct if not _differs(own, calls.get(test, []), unfixed.get(test, []))
            }
            pins = pinned[number]
            if not broken or pins is None:
                pending.discard(number)
                continue
            # Try other words first, then the test's own numbers, then all of its own words.
            new_seeds[number] = material.rng.getrandbits(64)
            for test in broken:
                times = tries[number, test] = tries[number, test] + 1
                pins |= {word for word in words.get(test, ()) if times > 2 or (times > 1 and word.isdigit())}
        if not pending:
            break
    return list(zip(new_seeds, pinned, gold_calls, strict=True))


async def find_variation(material: Material, own: RenderedSet, public: Calls, before: Calls) -> Varied | None:
    """Return the seed of a variation of the tests that the patch has to fix, the kinds varied in each, and gold's
    answers. Return ``None`` if gold does not pass any variation of their inputs."""
    tests = [
        test
        for test in public
        if material.is_fixed(test) and _varies(test) and _differs(own, public[test], before.get(test, []))
    ]
    if not tests:
        return None
    seed = material.rng.getrandbits(64)
    single_kind_sets = [material.render("discover", seed, None, kinds=dict.fromkeys(tests, (kind,))) for kind in KINDS]
    gold = await material.calls(material.gold, [one for one in single_kind_sets if one is not None])
    passed_kinds: dict[str, set[Kind]] = {test: set() for test in tests}
    for kind, calls in zip(KINDS, gold, strict=True):
        for test in set(tests) - _broken(own, public, calls):
            passed_kinds[test].add(kind)
    kinds = {test: frozenset(found) for test, found in passed_kinds.items() if found}
    seeds = [material.rng.getrandbits(64) for _ in range(_DRAWS)]
    outcomes = await _try_variations(material, own, public, kinds, seeds)
    seed, (missed, calls) = min(outcomes.items(), key=lambda one: len(one[1][0]))
    for narrower in (_LONE_KINDS, frozenset[Kind]()):
        if not missed:
            break
        kinds = {test: found & narrower if test in missed else found for test, found in kinds.items()}
        kinds = {test: found for test, found in kinds.items() if found}
        missed, calls = (await _try_variations(material, own, public, kinds, [seed]))[seed]
    return (seed, kinds, calls) if kinds and not missed else None


async def _try_variations(
    material: Material, own: RenderedSet, public: Calls, kinds: Mapping[str, frozenset[Kind]], seeds: Sequence[int]
) -> dict[int, tuple[set[str], Calls]]:
    """Return for each variation the tests that it breaks or in which base answers like gold, and gold's answers."""
    if not kinds:
        return dict.fromkeys(seeds, (set(), {}))
    sets = [material.render("discover", seed, None, kinds=kinds) for seed in seeds]
    ready = [one for one in sets if one is not None]
    gold, base = await material.calls(material.gold, ready), await material.calls(b"", ready)
    outcomes: dict[int, tuple[set[str], Calls]] = {}
    for seed, calls, unfixed in zip(seeds, gold, base, strict=True):
        alike = {test for test in kinds if not _differs(own, calls.get(test, []), unfixed.get(test, []))}
        outcomes[seed] = (_broken(own, public, calls) & set(kinds) | alike, calls)
    return outcomes


def _varies(test: str) -> bool:
    """Whether variations support the language of the test."""
    return test.partition("|")[0].endswith(".py")


def first_pins(number: int, files: Iterable[Rendered]) -> set[str]:
    """Return the tokens that a rendering keeps from the start. One rendering keeps all numbers: a limit with another
    value often has no effect, and then the test no longer checks the effect."""
    return {word for file in files for word in file.words if word.isdigit()} if number == OWN_NUMBERS else set()


def _differs(own: RenderedSet, gold: list[Call], base: list[Call]) -> bool:
    """Whether base's answers in a test differ from gold's."""
    if [[key for key, _ in call] for call in gold] != [[key for key, _ in call] for call in base]:
        return True
    probes = own.probes
    pairs = [pair for call, other in zip(gold, base, strict=True) for pair in zip(call, other, strict=True)]
    return any(
        holds(probes[key], values) != holds(probes[key], others)
        or not equal(values[0], others[0], said=steady(values[0], others[0]))
        for (key, values), (_, others) in pairs
    )


def _broken(own: RenderedSet, public: Calls, calls: Calls) -> set[str]:
    """Return the tests that gold no longer passes in other words, as far as the records show."""
    probes = own.probes
    broken: set[str] = set()
    for test, invocations in public.items():
        new_calls = calls.get(test, [])
        if [[key for key, _ in call] for call in invocations] != [[key for key, _ in call] for call in new_calls]:
            broken.add(test)
            continue
        for call, other in zip(invocations, new_calls, strict=True):
            for (key, values), (_, other_values) in zip(call, other, strict=True):
                probe = probes[key]
                if not holds(probe, values) or holds(probe, other_values):
                    continue
                # The value is computed from other numbers. Gold's answer defines it if it has the same form.
                recomputed = probe.op in ("==", "close", "almost", "like") and all(
                    same_form(one, other) for one, other in zip(values, other_values, strict=False)
                )
                if not recomputed or not same_form(other_values[0], other_values[1]):
                    broken.add(test)
    return broken
