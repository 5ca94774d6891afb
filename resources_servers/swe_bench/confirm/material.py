"""The material of a row's controls: its test files, renderings of all of them, and boxes to run the renderings."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import itertools
import math
import random
import re
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nemo_gym.sandbox.base import ExecOutcome
from resources_servers.swe_bench.confirm.assertions import Mode, Probe, Side
from resources_servers.swe_bench.confirm.javascript.rendering import render_javascript
from resources_servers.swe_bench.confirm.javascript.syntax import (
    JAVASCRIPT_WORDS,
    SELECTS_BY_TITLE,
    Code,
    choose,
    words_of_code,
)
from resources_servers.swe_bench.confirm.labels import Kind, Labels, Variation, random_name, words_of
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered, render
from resources_servers.swe_bench.confirm.runs import (
    Pristine,
    Recorded,
    Rendering,
    read_pristine,
    read_records,
    run_renderings,
)
from resources_servers.swe_bench.confirm.values import Value
from resources_servers.swe_bench.eval_box import EvalSite, Steps
from resources_servers.swe_bench.row import SweBenchRow, TestId
from resources_servers.swe_bench.signs import SCRIPT_SUFFIXES as JAVASCRIPT
from resources_servers.swe_bench.signs import decides_how_tests_run, paths_of, split_patch

SAMPLED_TESTS = 12
"""The maximum number of PASS_TO_PASS functions that are confirmed too."""
_WORD = re.compile(r"[^\W\d_]+")
_RELATIVE_IMPORT = re.compile(r"^from \.", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)")
_DOCUMENTS = (".md", ".rst", ".txt", ".po", ".mo", ".svg", ".png")
_LOCK_FILES = ("package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.yaml")

Call = list[tuple[str, list[Value]]]
Calls = dict[str, list[Call]]
"""Test → its invocations. Each is a list of ``(key, values)``."""
RENDERED = (".py", *JAVASCRIPT)
"""The suffixes of the test files that can be rendered."""


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
        """Return the records by test and invocation, under the keys of the pristine file."""
        key_by_token = self.tokens
        calls_by_test: Calls = {}
        current: Call | None = None
        for site, values in read_records(records):
            key = key_by_token.get(site, site)
            if key.partition("|")[2].startswith("test:"):
                current = []
                calls_by_test.setdefault(key, []).append(current)
            elif current is not None:
                current.append((key, values))
        return calls_by_test


@dataclass(frozen=True)
class Package:
    """A Python package of the product."""

    path: str
    name: str

    @classmethod
    def of(cls, paths: Sequence[str], pristine: Pristine) -> Package | None:
        """Return the package of the first of these modules that is in a package."""
        with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(pristine.product)) as tar:
            members = set(tar.getnames())
            for path in map(PurePosixPath, paths):
                folders = list(itertools.takewhile(lambda one: f"{one}/__init__.py" in members, path.parents))
                if path.suffix == ".py" and folders:
                    return cls(str(folders[0]), ".".join(one.name for one in reversed(folders)))
        return None


@dataclass
class Material:
    """The row's test files and everything that renderings of them need.

    Args:
        site: where the row's prepared image runs.
        rng: the source of random choices, such as the sample of tests to be kept.
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
    ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """JavaScript test that the patch has to fix → its ids. In other languages ids contain the names of their tests."""
    sides: dict[str, Side] = field(default_factory=dict)
    """Key → the side with the expected value."""
    vocabulary: set[str] = field(default_factory=set)
    package: Package | None = None
    """The package of the first module that gold changes."""
    words_until: float = math.inf
    """The event loop's time after which tests keep their own words if no other words have been found."""

    def __post_init__(self) -> None:
        self.gold = self.row.gold
        self.fixed = [TestId.parse(text) for text in self.row.fail_to_pass]
        self._kept = [TestId.parse(text) for text in self.row.pass_to_pass]
        steps = Steps.of(self.row.eval_script)
        self._test_command = steps.test_command if steps else ""

    async def read(self) -> None:
        """Read the test files and the product's words in a pristine box.

        Raises:
            SandboxError, VerifierError: the box failed.
        """
        patched = sorted(paths_of(self.row.test_diff))
        named = sorted({test.path for test in self.fixed if test.path.endswith(RENDERED)} - set(patched))
        gold_paths = paths_of(self.gold)

        def is_product(path: str) -> bool:
            return path in gold_paths or not (path in patched or decides_how_tests_run(path))

        pristine = await read_pristine(self.site, self.row, [*patched, *named], is_product)
        self.package = Package.of(sorted(path for path in gold_paths if not decides_how_tests_run(path)), pristine)
        # This takes seconds for a large product, so use a thread: other rows are prepared at the same time.
        self.vocabulary = await asyncio.to_thread(_vocabulary, pristine.product) | {
            word.lower() for word in _WORD.findall("\n".join(_added(self.row.patch)))
        }
        for path, content in pristine.sources.items():
            if content is None:
                continue
            if not path.endswith(RENDERED):
                if not path.endswith(".snap"):  # snapshot files hold expected values
                    self.support[path] = content
                continue
            try:
                text = content.decode("utf-8")
                fixed, kept = self._tests_in(path, text)
                sample = self.rng.sample(kept, min(len(kept), SAMPLED_TESTS))
                chosen = Chosen(fixed.names | frozenset(sample), fixed.docstrings)
                if render_file(text, chosen, Order("discover", random.Random(0), "/nowhere", path)) is None:
                    raise ValueError("holds no expected test")
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
                self.notes.append(f"{path}: {error}")
                self.support[path] = content
                continue
            self.sources[path] = text
            self.chosen[path] = chosen

    def _tests_in(self, path: str, text: str) -> tuple[Chosen, list[str]]:
        """Return the tests that the patch has to fix, and the names of those that must keep passing."""
        if not path.endswith(JAVASCRIPT):
            fixed = Chosen.of(path, self.fixed)
            return fixed, sorted(Chosen.of(path, self._kept).names - fixed.names)
        self.vocabulary |= JAVASCRIPT_WORDS
        code = Code.parse(text, path)
        chosen_ids = choose(code, self.row.fail_to_pass, _added_lines(self.row.test_patch, path))
        self.ids |= {f"{path}|{test}": ids for test, ids in chosen_ids.items()}
        kept = choose(code, self.row.pass_to_pass)
        return Chosen(frozenset(chosen_ids), frozenset()), sorted(set(kept) - set(chosen_ids))

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
        """Return one rendering of all files, or ``None`` if there is nothing to render.

        Args:
            pinned: tokens that are not relabelled; ``None`` relabels nothing.
            kinds: test → what is varied in it, in place of relabelling. Other tests are left out.
            plain: render only this file, to run without a test runner.
            inside: run it as a module of the package that gold changes, so that calls look like the package's own.
                Else it runs as a program, or in a copy of its own package if it imports from there.
        """
        rng = random.Random(f"{seed}{plain}{inside}")
        records = f"/var/tmp/{random_name(rng)}"
        files: dict[str, Rendered] = {}
        for path, source in self.sources.items():
            if plain and path != plain:
                continue
            chosen = self.chosen[path]
            labels: Labels | Variation | None = None
            if kinds is not None:
                file_kinds = {key.partition("|")[2]: kinds[key] for key in kinds if key.startswith(f"{path}|")}
                if not file_kinds or path.endswith(JAVASCRIPT):
                    continue
                chosen = Chosen.named(file_kinds)
                labels = Variation(random.Random(seed), ast.parse(source), file_kinds, self.vocabulary)
            elif pinned is not None:
                discovered = render_file(source, chosen, Order("discover", random.Random(0), records, path))
                assert discovered is not None
                labels = Labels(random.Random(seed), discovered.words, self.vocabulary, pinned)
            order = Order(
                mode,
                rng,
                records,
                path,
                labels,
                {key.partition("|")[2]: side for key, side in self.sides.items() if key.startswith(f"{path}|")},
                plain=bool(plain),
                keeps_titles=bool(SELECTS_BY_TITLE.search(self._test_command)),
            )
            rendered = render_file(source, chosen, order)
            if rendered is not None:
                files[path] = rendered
        if not files:
            return None
        if not plain:
            # Overwrite the test files that this rendering leaves out, so that another rendering's do not run again.
            texts = dict.fromkeys(self.sources, "")
            for path, rendered in files.items():
                texts |= {path: rendered.source, **rendered.beside}
            return RenderedSet(Rendering(texts, records), files)
        file = files[plain]
        name = f"{random_name(rng)}{PurePosixPath(plain).suffix}"
        plain_path, module, beside = name, "", ""
        if plain.endswith(JAVASCRIPT):
            plain_path = str(PurePosixPath(plain).with_name(name))
        elif inside and self.package:
            plain_path, module = f"{self.package.path}/{name}", f"{self.package.name}.{PurePosixPath(name).stem}"
        elif "/" in plain and _RELATIVE_IMPORT.search(file.source):
            parts = PurePosixPath(plain).parts
            folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
            beside = next((one for one in folders if decides_how_tests_run(f"{one}/{name}")), folders[-1])
            copy = PurePosixPath(beside).with_name(random_name(rng))
            plain_path = str(copy / PurePosixPath(plain).relative_to(beside).with_name(name))
            module = ".".join(PurePosixPath(plain_path).with_suffix("").parts)
        texts = {plain_path: file.source, **file.beside}
        return RenderedSet(Rendering(texts, records, plain_path, module, beside=beside), files)

    async def run(self, patch: bytes, renderings: Sequence[Rendering]) -> Recorded:
        """Run renderings with ``patch``. Add a note if the run did not end by itself.

        Raises:
            SandboxError, VerifierError: the box failed.
        """
        recorded = await run_renderings(self.site, self.row, patch, renderings, support=self.support)
        if recorded.outcome is not ExecOutcome.EXITED:
            self.notes.append(f"a run ended by '{recorded.outcome}'")
        return recorded

    async def calls(self, patch: bytes, sets: Sequence[RenderedSet]) -> list[Calls]:
        """Run rendered sets with ``patch``, and return the calls that each recorded. Raises as `run`."""
        recorded = await self.run(patch, [one.rendering for one in sets])
        return [one.calls(records) for one, records in zip(sets, recorded.records, strict=True)]

    def is_fixed(self, test: str) -> bool:
        """Whether the patch has to fix a test."""
        path, _, name = test.partition("|test:")
        if path.endswith(JAVASCRIPT):
            return test in self.ids
        function = name.rpartition(".")[2]
        docstrings = self.chosen[path].docstrings
        return any(
            one.may_be_in(path) and (one.function == function or (one.docstring and one.docstring in docstrings))
            for one in self.fixed
        )

    def ids_of(self, test: str) -> tuple[str, ...]:
        """Return the ids of a test that the patch has to fix."""
        path, _, name = test.partition("|test:")
        function = name.rpartition(".")[2]
        return self.ids.get(test) or tuple(
            text
            for text, one in zip(self.row.fail_to_pass, self.fixed, strict=True)
            if one.may_be_in(path) and one.function == function
        )


def render_file(source: str, chosen: Chosen, order: Order) -> Rendered | None:
    """Render a test file in its language. Return ``None`` if nothing in it can be rendered. Raises as `render` and
    `render_javascript` do."""
    return (render_javascript if order.path.endswith(JAVASCRIPT) else render)(source, chosen, order)


def _vocabulary(product: bytes) -> set[str]:
    words: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(product)) as tar:
            for member in tar:
                suffix = PurePosixPath(member.name).suffix.lower()
                lock = PurePosixPath(member.name).name in _LOCK_FILES
                if not member.isfile() or member.size > 2_000_000 or suffix in _DOCUMENTS or lock:
                    continue
                file = tar.extractfile(member)
                text = file.read().decode("utf-8", "replace") if file else ""
                if suffix == ".py":
                    words |= words_of(text)
                elif suffix in JAVASCRIPT:
                    words |= words_of_code(text, f"a{suffix}")
                elif "\0" not in text:
                    words.update(word.lower() for word in _WORD.findall(text))
    except tarfile.TarError:
        return words
    return words


def _added_lines(patch: str, path: str) -> set[int]:
    """Return the line numbers, in the new file, of the lines that a patch adds."""
    line_numbers: set[int] = set()
    for section in split_patch(patch.encode("utf-8", "surrogateescape")):
        if path not in section.paths:
            continue
        number = 0
        for line in section.text.decode("utf-8", "replace").split("\n"):
            if match := _HUNK.match(line):
                number = int(match[1])
            elif number and line.startswith("+"):
                line_numbers.add(number)
                number += 1
            elif number and line.startswith(" "):
                number += 1
    return line_numbers


def _added(patch: str) -> list[str]:
    return [line[1:] for line in patch.split("\n") if line.startswith("+") and not line.startswith("+++ ")]
