"""Making the controls of a row at preparation: gold and base run the renderings, and only what tells them apart stays.

Everything is drawn from a seed that is never stored. Three kinds of rendering are used: *discovery* ones record both
sides of every assertion and are run with gold and base, to learn what is expected; *blinded* ones and *plain* ones are
what enters the box of an attempt.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from resources_servers.swe_bench.confirm.controls import ControlledRendering, ControlledTest, RowControls, Strength
from resources_servers.swe_bench.confirm.expecting import checks_of, decide_sides
from resources_servers.swe_bench.confirm.material import Calls, Material, RenderedSet
from resources_servers.swe_bench.confirm.rendering import Chosen
from resources_servers.swe_bench.confirm.runs import Steps
from resources_servers.swe_bench.confirm.telling import keep_what_tells, may_be_strong
from resources_servers.swe_bench.confirm.twins import TWINS, TWINS_BESIDE, Twin, TwinMaker
from resources_servers.swe_bench.confirm.wording import find_variation, find_words
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.row import SweBenchRow

BLINDED = 2
"""Renderings in other words under the row's own test command. The tests of one more run without a test runner."""


@dataclass
class Maker:
    """Makes the controls of one row.

    Args:
        site: where the row's prepared image runs.
        image_content: digest of that image.
        seed: what everything is drawn from; secret.
    """

    site: EvalSite
    row: SweBenchRow
    image_content: str
    seed: int = field(default_factory=lambda: secrets.randbits(256))

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._material = Material(self.site, self.row, self._rng)

    async def make(self) -> RowControls:
        """The row's controls. A row whose tests cannot be rendered gets controls of strength ``none``.

        Raises:
            SandboxError, VerifierError: a box failed.
        """
        started = time.monotonic()
        material = self._material
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
            twins = await self._twins(strengths, TWINS_BESIDE if renderings else TWINS)
        return RowControls(
            instance_id=self.row.instance_id,
            image_content=self.image_content,
            renderings=tuple(renderings),
            support=material.support if renderings or twins else {},
            tests=self._tests(strengths),
            twins=twins,
            notes=tuple(material.notes),
            seconds=round(time.monotonic() - started, 2),
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
        drawn, strengths = await self._drawn(own, public, before)
        if any(level == "weak" and may_be_strong(own, public[test]) for test, level in strengths.items()):
            # Other words may ask for more. What they are is a matter of luck.
            again = await self._drawn(own, public, before)
            drawn, strengths = max((drawn, strengths), again, key=lambda one: list(one[1].values()).count("strong"))
        return drawn, strengths

    async def _drawn(
        self, own: RenderedSet, public: Calls, before: Calls
    ) -> tuple[list[ControlledRendering], dict[str, Strength]]:
        material = self._material
        seeds = [self._rng.getrandbits(64) for _ in range(BLINDED + 1)]
        found = await find_words(material, own, public, before, seeds)
        sets: list[tuple[RenderedSet, Calls]] = []
        for seed, pinned, calls in found[:BLINDED]:
            blinded = material.render("blind", seed, pinned)
            assert blinded is not None
            sets.append((blinded, calls))
        seed, pinned, calls = found[BLINDED]
        for path in sorted({test.partition("|")[0] for test in public if material.is_fixed(test)}):
            for inside in (False, True) if material.package else (False,):
                plain = material.render("blind", seed, pinned, plain=path, inside=inside)
                if plain is not None:
                    sets.append((plain, calls))
        variation = await find_variation(material, own, public, before)
        if variation is not None:
            seed, kinds, calls = variation
            varied = material.render("blind", seed, None, kinds=kinds)
            assert varied is not None
            # Shared names may have drawn more tests along than were asked for.
            sets.append((varied, {test: found for test, found in calls.items() if test in kinds}))
        controlled = [
            ControlledRendering(one.rendering, checks_of(one, calls, own.probes, material.sides))
            for one, calls in sets
        ]
        return await keep_what_tells(material, controlled, sets, public)

    async def _twins(self, strengths: dict[str, Strength], count: int) -> tuple[Twin, ...]:
        """Twins for the tests that the renderings do not control well; what only twins control becomes ``weak``."""
        chosen: dict[str, Chosen] = {}
        for path in self._material.sources:
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
