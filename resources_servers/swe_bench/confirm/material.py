"""What a row's controls are made from: its test files, renderings of all of them, and boxes to run those in."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import random
import re
import tarfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nemo_gym.sandbox.base import ExecOutcome
from resources_servers.swe_bench.confirm.assertions import Mode, Probe, Side
from resources_servers.swe_bench.confirm.comparing import read_records
from resources_servers.swe_bench.confirm.labels import Labels, words_of
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered, render
from resources_servers.swe_bench.confirm.runs import Pristine, Recorded, Rendering, read_pristine, run_renderings
from resources_servers.swe_bench.confirm.values import Value
from resources_servers.swe_bench.confirm.varying import Kind, Variation
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.patches import paths_of
from resources_servers.swe_bench.row import SweBenchRow
from resources_servers.swe_bench.tamper.risk import decides_how_tests_run
from resources_servers.swe_bench.tamper.test_ids import TestId

SAMPLED_TESTS = 12
"""PASS_TO_PASS functions that are confirmed too, at the most."""
_WORD = re.compile(r"[^\W\d_]+")
_DOCUMENTS = (".md", ".rst", ".txt", ".po", ".mo", ".svg", ".png")

Call = list[tuple[str, list[Value]]]
Calls = dict[str, list[Call]]
"""Test → its invocations, each a list of ``(key, values)``."""
Renderer = Callable[[str, Chosen, Order], Rendered | None]
RENDERERS: Mapping[str, Renderer] = {".py": render}
"""Suffix of a test file → what renders it."""


@dataclass
class RenderedSet:
    """One rendering of all of a row's test files."""

    rendering: Rendering
    files: dict[str, Rendered]

    @property
    def probes(self) -> dict[str, Probe]:
        return {key: probe for file in self.files.values() for key, probe in file.probes.items()}

    @property
    def tokens(self) -> dict[str, str]:
        return {token: key for file in self.files.values() for token, key in file.tokens.items()}

    def calls(self, records: str) -> Calls:
        """Records by test and invocation, under the keys of the pristine file."""
        names = self.tokens
        found: Calls = {}
        current: Call | None = None
        for site, values in read_records(records):
            key = names.get(site, site)
            if key.partition("|")[2].startswith("test:"):
                current = []
                found.setdefault(key, []).append(current)
            elif current is not None:
                current.append((key, values))
        return found


@dataclass(frozen=True)
class Package:
    """A Python package of the product."""

    path: str
    name: str

    @classmethod
    def of(cls, paths: Sequence[str], pristine: Pristine) -> Package | None:
        """The package of the first of these modules that lies in one."""
        with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(pristine.product)) as tar:
            there = set(tar.getnames())
            for path in map(PurePosixPath, paths):
                inside = list(itertools.takewhile(lambda one: f"{one}/__init__.py" in there, path.parents))
                if path.suffix == ".py" and inside:
                    return cls(str(inside[0]), ".".join(one.name for one in reversed(inside)))
        return None


@dataclass
class Material:
    """The row's test files and everything that renderings of them need.

    Args:
        site: where the row's prepared image runs.
        rng: what the sample of kept tests is drawn from.
    """

    site: EvalSite
    row: SweBenchRow
    rng: random.Random
    notes: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Path → text of the test files that can be rendered."""
    support: dict[str, bytes] = field(default_factory=dict)
    """Path → content of the other files of the test patch."""
    chosen: dict[str, Chosen] = field(default_factory=dict)
    sides: dict[str, Side] = field(default_factory=dict)
    """Key → the side that the tests expect."""
    vocabulary: set[str] = field(default_factory=set)
    package: Package | None = None
    """Of the first module that gold changes."""

    def __post_init__(self) -> None:
        self.gold = self.row.patch.encode("utf-8", "surrogateescape")
        self.fixed = [TestId.parse(text) for text in self.row.fail_to_pass]
        self._kept = [TestId.parse(text) for text in self.row.pass_to_pass]

    async def read(self) -> None:
        """Read the test files and the product's words in a pristine box.

        Raises:
            SandboxError, VerifierError: the box failed.
        """
        patched = sorted(paths_of(self.row.test_patch.encode("utf-8", "surrogateescape")))
        named = sorted({test.path for test in self.fixed if _renderer(test.path)} - set(patched))
        gold_paths = paths_of(self.gold)

        def is_product(path: str) -> bool:
            return path in gold_paths or not decides_how_tests_run(path)

        pristine = await read_pristine(self.site, self.row, [*patched, *named], is_product)
        self.package = Package.of(sorted(path for path in gold_paths if not decides_how_tests_run(path)), pristine)
        self.vocabulary = _vocabulary(pristine.product) | {
            word.lower() for word in _WORD.findall("\n".join(_added(self.row.patch)))
        }
        for path, content in pristine.sources.items():
            if content is None:
                continue
            fixed = Chosen.of(path, self.fixed)
            renderer = _renderer(path)
            if renderer is None:
                self.support[path] = content
                continue
            kept = sorted(Chosen.of(path, self._kept).names - fixed.names)
            sample = self.rng.sample(kept, min(len(kept), SAMPLED_TESTS))
            chosen = Chosen(fixed.names | frozenset(sample), fixed.docstrings)
            try:
                text = content.decode("utf-8")
                if renderer(text, chosen, Order("discover", random.Random(0), "/nowhere")) is None:
                    raise ValueError("holds no expected test")
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
                self.notes.append(f"{path}: {error}")
                self.support[path] = content
                continue
            self.sources[path] = text
            self.chosen[path] = chosen

    def render(
        self,
        mode: Mode,
        seed: int,
        pinned: Collection[str] | None,
        *,
        kinds: Mapping[str, Collection[Kind]] | None = None,
        plain: str = "",
        inside: bool = False,
    ) -> RenderedSet | None:
        """One rendering of all files.

        Args:
            pinned: tokens that are not relabelled; ``None`` relabels nothing.
            kinds: test → what is varied in it instead. Other tests are left out.
            plain: this file alone, without a test runner.
            inside: as a module of the package that gold changes, for callers within and without look alike then.
        """
        rng = random.Random(f"{seed}{plain}{inside}")
        records = f"/var/tmp/{_name(rng)}"
        files: dict[str, Rendered] = {}
        for path, source in self.sources.items():
            if plain and path != plain:
                continue
            renderer = _renderer(path)
            assert renderer is not None
            chosen = self.chosen[path]
            labels: Labels | Variation | None = None
            if kinds is not None:
                here = {key.partition("|")[2]: kinds[key] for key in kinds if key.startswith(f"{path}|")}
                if not here:
                    continue
                chosen = Chosen.named(here)
                labels = Variation(random.Random(seed), ast.parse(source), here, self.vocabulary)
            elif pinned is not None:
                words = renderer(source, chosen, Order("discover", random.Random(0), records, path))
                assert words is not None
                labels = Labels(random.Random(seed), words.words, self.vocabulary, pinned)
            sides = {key.partition("|")[2]: side for key, side in self.sides.items() if key.startswith(f"{path}|")}
            done = renderer(source, chosen, Order(mode, rng, records, path, labels, sides, plain=bool(plain)))
            if done is not None:
                files[path] = done
        if not files:
            return None
        # What another rendering left in the place of a file must not run once more.
        texts = {path: files[path].source if path in files else "" for path in self.sources}
        plain_path = module = ""
        if plain:
            name = _name(rng)
            plain_path = f"{self.package.path}/{name}.py" if inside and self.package else f"{name}.py"
            texts = {plain_path: texts[plain]}
            module = f"{self.package.name}.{name}" if inside and self.package else ""
        return RenderedSet(Rendering(texts, records, plain_path, module), files)

    async def run(self, patch: bytes, renderings: Sequence[Rendering | RenderedSet]) -> Recorded:
        """Run renderings with ``patch``; notes a run that did not end by itself.

        Raises:
            SandboxError, VerifierError: the box failed.
        """
        plain = [one.rendering if isinstance(one, RenderedSet) else one for one in renderings]
        recorded = await run_renderings(self.site, self.row, patch, plain, support=self.support)
        if recorded.outcome is not ExecOutcome.EXITED:
            self.notes.append(f"a run ended by '{recorded.outcome}'")
        return recorded

    def is_fixed(self, test: str) -> bool:
        """Whether the patch has to fix a test."""
        path, _, name = test.partition("|test:")
        function = name.rpartition(".")[2]
        docstrings = self.chosen[path].docstrings
        return any(
            one.may_be_in(path) and (one.function == function or (one.docstring and one.docstring in docstrings))
            for one in self.fixed
        )


def _renderer(path: str) -> Renderer | None:
    return RENDERERS.get(PurePosixPath(path).suffix)


def _vocabulary(product: bytes) -> set[str]:
    found: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(product)) as tar:
            for member in tar:
                suffix = PurePosixPath(member.name).suffix.lower()
                if not member.isfile() or member.size > 2_000_000 or suffix in _DOCUMENTS:
                    continue
                file = tar.extractfile(member)
                text = file.read().decode("utf-8", "replace") if file else ""
                if suffix == ".py":
                    found |= words_of(text)
                elif "\0" not in text:
                    found.update(word.lower() for word in _WORD.findall(text))
    except tarfile.TarError:
        return found
    return found


def _added(patch: str) -> list[str]:
    return [line[1:] for line in patch.split("\n") if line.startswith("+") and not line.startswith("+++ ")]


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(10))
