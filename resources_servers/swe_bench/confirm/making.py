"""Making the controls of a row at preparation: gold and base run the renderings, and only what tells them apart stays.

Everything is drawn from a seed that is never stored. Three kinds of rendering are used: *discovery* ones record both
sides of every assertion and are run with gold and base, to learn what is expected; *blinded* ones and *plain* ones are
what enters the box of an attempt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeVar

from resources_servers.swe_bench.confirm.controls import ControlledRendering, ControlledTest, RowControls, Strength
from resources_servers.swe_bench.confirm.expecting import checks_of, decide_sides
from resources_servers.swe_bench.confirm.material import Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.rendering import Chosen
from resources_servers.swe_bench.confirm.runs import Steps
from resources_servers.swe_bench.confirm.telling import BASE_RUNS, GOLD_RUNS, Telling, may_be_strong, without_surplus
from resources_servers.swe_bench.confirm.twins import TWIN_RENDERERS, TWINS, TWINS_BESIDE, Twin, TwinMaker
from resources_servers.swe_bench.confirm.wording import Varied, Words, find_variation, find_words
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.row import SweBenchRow

T = TypeVar("T")

BUDGET_S = 300.0
"""Seconds after which no more is made: first the words are no longer sought, then no varied rendering and no second
draw of words, then no twins. Gold and base still run what is left as often as ever, so a slow row takes longer."""
WORDS, HALF, ALL = 0.25, 0.5, 1.0
"""Of the budget. Running what was found again and again takes about as long as finding it."""
BLINDED = 2
"""Renderings in other words under the row's own test command. The tests of one more run without a test runner."""


@dataclass
class Maker:
    """Makes the controls of one row.

    Args:
        site: where the row's prepared image runs.
        image_content: digest of that image.
        seed: what everything is drawn from; secret.
        budget_s: see `BUDGET_S`. No single box runs longer.
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
        """The row's controls. A row whose tests cannot be rendered gets controls of strength ``none``.

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
        gold = await material.run(material.gold, [own])
        base = await material.run(b"", [own])
        if not gold.records or not gold.records[0]:
            material.notes.append(f"gold left no records: {gold.log[-300:]}")
            return [], {}
        public, before = own.calls(gold.records[0]), own.calls(base.records[0] if base.records else "")
        material.sides = decide_sides(own, public, before)
        words = await find_words(material, own, public, before, self._seeds())
        varied = await self._within(HALF, "a varied rendering", find_variation(material, own, public, before))
        told = await self._telling(own, public, words, varied)
        if any(level == "weak" and may_be_strong(own, public[test]) for test, level in told.strengths().items()):
            # Other words may ask for more. What they are is a matter of luck.
            again = await self._within(HALF, "a second draw of words", self._told_again(own, public, before, varied))
            told = max(filter(None, (told, again)), key=lambda one: [*one.strengths().values()].count("strong"))
        await told.run(GOLD_RUNS - 1, BASE_RUNS - 1)
        return told.kept, told.strengths()

    def _seeds(self) -> list[int]:
        return [self._rng.getrandbits(64) for _ in range(BLINDED + 1)]

    async def _told_again(self, own: RenderedSet, public: Calls, before: Calls, varied: Varied | None) -> Telling:
        words = await find_words(self._material, own, public, before, self._seeds())
        return await self._telling(own, public, words, varied)

    async def _telling(
        self, own: RenderedSet, public: Calls, words: Sequence[Words], varied: Varied | None
    ) -> Telling:
        """The renderings in these words, and what one run of gold and of base tells of them."""
        material = self._material
        sets: list[tuple[RenderedSet, Calls]] = []
        for seed, pinned, calls in words[:BLINDED]:
            blinded = material.render("blind", seed, pinned)
            assert blinded is not None
            sets.append((blinded, calls))
        seed, pinned, calls = words[BLINDED]
        for path in sorted({test.partition("|")[0] for test in public if material.is_fixed(test)}):
            for inside in (False, True) if material.package else (False,):
                plain = material.render("blind", seed, pinned, plain=path, inside=inside)
                if plain is not None:
                    sets.append((plain, calls))
        if varied is not None:
            seed, kinds, calls = varied
            one = material.render("blind", seed, None, kinds=kinds)
            assert one is not None
            # Shared names may have drawn more tests along than were asked for.
            sets.append((one, {test: found for test, found in calls.items() if test in kinds}))
        controlled = [
            ControlledRendering(one.rendering, checks_of(one, calls, own.probes, material.sides))
            for one, calls in sets
        ]
        told = Telling(material, sets, controlled, public)
        await told.run(1, 1)
        return told

    async def _within(self, share: float, what: str, making: Awaitable[T]) -> T | None:
        """What ``making`` makes; ``None`` when that share of the budget is used up before."""
        limit = asyncio.timeout_at(self._started + share * self.budget_s)
        try:
            async with limit:
                return await making
        except TimeoutError:
            if not limit.expired():
                raise
            self._left_out.append(what)
            return None

    async def _twins(self, strengths: dict[str, Strength], count: int) -> tuple[Twin, ...]:
        """Twins for the tests that the renderings do not control well; what only twins control becomes ``weak``."""
        chosen: dict[str, Chosen] = {}
        for path in self._material.sources:
            if PurePosixPath(path).suffix not in TWIN_RENDERERS:
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
        found: dict[str, ControlledTest] = {}
        for test, strength in strengths.items():
            _, _, name = test.partition("|test:")
            # A file that holds no functions: the test is called as its id is.
            ids = self._material.ids_of(test) if name else (test.partition("|")[2],)
            found[test] = ControlledTest(ids, True, strength)
        named = {text for test in found.values() for text in test.ids}
        for text in self.row.fail_to_pass:
            if text not in named:
                found[f"|{text}"] = ControlledTest((text,), True, "none")
        return found
