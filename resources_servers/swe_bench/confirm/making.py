"""Makes the controls of a row at preparation: gold and base run the renderings, and only those that tell them apart
are kept.

All random choices come from a seed that is never stored. There are three kinds of renderings. *Discovery* renderings
record both sides of every assertion and run with gold and base, to learn what is expected. *Blinded* and *plain*
renderings run in the box of an attempt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from resources_servers.swe_bench.confirm.controls import ControlledRendering, ControlledTest, RowControls, Strength
from resources_servers.swe_bench.confirm.labels import KINDS, Kind
from resources_servers.swe_bench.confirm.material import Call, Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.rendering import Chosen, Rendered
from resources_servers.swe_bench.confirm.telling import (
    BASE_RUNS,
    GOLD_RUNS,
    Rated,
    Telling,
    checks_of,
    decide_sides,
    holds,
    may_be_strong,
    steady,
    without_surplus,
)
from resources_servers.swe_bench.confirm.twins import TWINS, TWINS_BESIDE, Twin, TwinMaker
from resources_servers.swe_bench.confirm.values import equal, same_form
from resources_servers.swe_bench.eval_box import EvalSite, Steps
from resources_servers.swe_bench.row import SweBenchRow

T = TypeVar("T")

BUDGET_S = 300.0
"""The time budget in seconds. As it runs out, the search for words stops first, then no varied rendering and no second
draw of words are made, then no twins. Gold and base still run the rest as often as usual, so a slow row takes longer.
"""
WORDS, HALF, ALL = 0.25, 0.5, 1.0
"""Shares of the budget. Running the found renderings repeatedly takes about as long as finding them."""
BLINDED = 2
"""The number of blinded renderings that run with the row's test command. One more runs without a test runner."""
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


@dataclass
class Maker:
    """Makes the controls of one row.

    Args:
        site: where the row's prepared image runs.
        image_content: digest of that image.
        seed: the seed of all random choices; secret.
        budget_s: see `BUDGET_S`. It also limits each run in a box.
    """

    site: EvalSite
    row: SweBenchRow
    image_content: str
    seed: int = field(default_factory=lambda: secrets.randbits(256))
    budget_s: float = BUDGET_S

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        site = dataclasses.replace(self.site, timeout_s=min(self.site.timeout_s, self.budget_s))
        self._material = Material(site, self.row, self._rng)
        self._started = 0.0
        self._left_out: list[str] = []

    async def make(self) -> RowControls:
        """Make and return the row's controls. A row whose tests cannot be rendered gets controls of strength ``none``.

        Raises:
            SandboxError, VerifierError: a box failed.
        """
        clock = asyncio.get_running_loop().time
        material = self._material
        self._started = clock()
        material.words_until = self._started + WORDS * self.budget_s
        renderings: list[ControlledRendering] = []
        strengths: dict[str, Strength] = {}
        twins: tuple[Twin, ...] = ()
        if Steps.of(self.row.eval_script) is None:
            material.notes.append("the evaluation script does not apply one test patch from a here-document")
        else:
            await material.read()
            if material.sources:
                renderings, strengths = await self._renderings()
            else:
                material.notes.append("no file of the test patch holds tests that can be blinded, as expected files")
            count = TWINS_BESIDE if renderings else TWINS
            twins = await self._within(ALL, "twins", self._twins(strengths, count)) or ()
            if twins and "strong" not in strengths.values():
                renderings = without_surplus(renderings, strengths)
        return RowControls(
            instance_id=self.row.instance_id,
            image_content=self.image_content,
            renderings=tuple(renderings),
            support=material.support if renderings or twins else {},
            tests=self._tests(strengths),
            twins=twins,
            notes=tuple(material.notes),
            left_out=tuple(self._left_out),
            seconds=round(clock() - self._started, 2),
        )

    async def _renderings(self) -> tuple[list[ControlledRendering], dict[str, Strength]]:
        material = self._material
        own = material.render("discover", self._rng.getrandbits(64), None)
        assert own is not None
        gold = await material.run(material.gold, [own.rendering])
        (base_calls,) = await material.calls(b"", [own])
        if not gold.records[0]:
            material.notes.append(f"gold left no records: {gold.log[-300:]}")
            return [], {}
        public = own.calls(gold.records[0])
        material.sides = decide_sides(own, public, base_calls)
        words = await find_words(material, own, public, base_calls, self._seeds())
        varied = await self._within(HALF, "a varied rendering", find_variation(material, own, public, base_calls))
        rated = await self._telling(own, public, words, varied)
        if any(level == "weak" and may_be_strong(own, public[test]) for test, level in rated.strengths().items()):
            # The words are drawn at random, and other words may give stronger controls.
            redrawn = await self._within(HALF, "a second draw of words", self._redraw(own, public, base_calls, varied))
            rated = max(filter(None, (rated, redrawn)), key=lambda one: [*one.strengths().values()].count("strong"))
        await rated.run(GOLD_RUNS - 1, BASE_RUNS - 1)
        return [one.controlled for one in rated.kept], rated.strengths()

    def _seeds(self) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(BLINDED + 1)]

    async def _redraw(self, own: RenderedSet, public: Calls, base_calls: Calls, varied: Varied | None) -> Telling:
        words = await find_words(self._material, own, public, base_calls, self._seeds())
        return await self._telling(own, public, words, varied)

    async def _telling(
        self, own: RenderedSet, public: Calls, words: Sequence[Words], varied: Varied | None
    ) -> Telling:
        """Make the renderings in these words, and evaluate them with one run of gold and one of base."""
        material = self._material
        sets: list[tuple[RenderedSet, Calls]] = []
        seed, pinned, calls = words[BLINDED]
        for path in sorted({test.partition("|")[0] for test in public if material.is_fixed(test)}):
            for inside in (False, True) if material.package else (False,):
                plain = material.render("blind", seed, pinned, plain=path, inside=inside)
                if plain is not None:
                    sets.append((plain, calls))
        for seed, pinned, calls in words[:BLINDED]:
            blinded = material.render("blind", seed, pinned)
            assert blinded is not None
            sets.append((blinded, calls))
        if varied is not None:
            seed, kinds, calls = varied
            rendered_set = material.render("blind", seed, None, kinds=kinds)
            assert rendered_set is not None
            # Tests are chosen by name, so the rendering may hold more tests of the same name than requested.
            sets.append((rendered_set, {test: found for test, found in calls.items() if test in kinds}))
        rated = Telling(
            material,
            [
                Rated(one, ControlledRendering(one.rendering, checks_of(one, calls, own.probes, material.sides)))
                for one, calls in sets
            ],
            public,
        )
        await rated.run(1, 1)
        return rated

    async def _within(self, share: float, label: str, making: Awaitable[T]) -> T | None:
        """Return the result of ``making``, or ``None`` if that share of the budget is used up first."""
        limit = asyncio.timeout_at(self._started + share * self.budget_s)
        try:
            async with limit:
                return await making
        except TimeoutError:
            if not limit.expired():
                raise
            self._left_out.append(label)
            return None

    async def _twins(self, strengths: dict[str, Strength], count: int) -> tuple[Twin, ...]:
        """Make twins for the tests that the renderings do not control well. Tests with twins alone become ``weak``."""
        chosen: dict[str, Chosen] = {}
        for path in self._material.sources:
            if not path.endswith(".py"):
                continue
            one = Chosen.of(path, self._material.fixed)
            strong = {test for test, strength in strengths.items() if strength == "strong"}
            names = {name for name in one.names if not any(test.endswith((f":{name}", f".{name}")) for test in strong)}
            if names or (one.docstrings and not strong):
                chosen[path] = Chosen(frozenset(names), one.docstrings)
        if self._material.sources and not chosen:
            return ()
        twins = await TwinMaker(self._material, chosen, self._rng, count).make()
        for test in {test for twin in twins for test in twin.tests}:
            if strengths.get(test, "none") == "none":
                strengths[test] = "weak"
        return twins

    def _tests(self, strengths: Mapping[str, Strength]) -> dict[str, ControlledTest]:
        controlled_tests: dict[str, ControlledTest] = {}
        for test, strength in strengths.items():
            _, _, name = test.partition("|test:")
            # The file holds no functions, so the test is named by its id.
            ids = self._material.ids_of(test) if name else (test.partition("|")[2],)
            controlled_tests[test] = ControlledTest(ids, True, strength)
        named_ids = {text for test in controlled_tests.values() for text in test.ids}
        for text in self.row.fail_to_pass:
            if text not in named_ids:
                controlled_tests[f"|{text}"] = ControlledTest((text,), True, "none")
        return controlled_tests


# Other words and inputs for a row's tests, with which gold still passes them and base still fails them


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
