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
from resources_servers.swe_bench.confirm.runs import Steps
from resources_servers.swe_bench.confirm.telling import keep_what_tells
from resources_servers.swe_bench.confirm.wording import find_words
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.row import SweBenchRow

BLINDED = 2
"""Renderings that run under the row's own test command; one more runs without a test runner."""


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
        if Steps.of(self.row.eval_script) is None:
            material.notes.append("the evaluation script does not apply one test patch from a here-document")
        else:
            await material.read()
            if material.sources:
                renderings, strengths = await self._renderings()
            else:
                material.notes.append("no file of the test patch holds tests that can be blinded, as expected files")
        return RowControls(
            instance_id=self.row.instance_id,
            image_content=self.image_content,
            renderings=tuple(renderings),
            support=material.support if renderings else {},
            tests=self._tests(strengths),
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
        seeds = [self._rng.getrandbits(64) for _ in range(BLINDED + 1)]
        found = await find_words(material, own, public, before, seeds)
        sets: list[tuple[RenderedSet, Calls]] = []
        for number, (seed, pinned, calls) in enumerate(found):
            blinded = material.render("blind", seed, pinned, plain=number == BLINDED)
            if blinded is not None:
                sets.append((blinded, calls))
        controlled = [
            ControlledRendering(one.rendering, checks_of(one, calls, own.probes, material.sides))
            for one, calls in sets
        ]
        return await keep_what_tells(material, controlled, sets, public)

    def _tests(self, strengths: Mapping[str, Strength]) -> dict[str, ControlledTest]:
        found: dict[str, ControlledTest] = {}
        for test, strength in strengths.items():
            found[test] = ControlledTest(self._material.ids_of(test), True, strength)
        named = {text for test in found.values() for text in test.ids}
        for text in self.row.fail_to_pass:
            if text not in named:
                found[f"|{text}"] = ControlledTest((text,), True, "none")
        return found
