"""Making the controls of a row at preparation: gold and base run the renderings, and only what tells them apart stays.

Everything is drawn from a seed that is never stored. Three kinds of rendering are used: *discovery* ones record both
sides of every assertion and are run with gold alone, to learn what is expected; *blinded* ones and *plain* ones are
what enters the box of an attempt.
"""

from __future__ import annotations

import io
import random
import re
import secrets
import tarfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nemo_gym.sandbox.base import ExecOutcome
from resources_servers.swe_bench.confirm.assertions import Probe, Side
from resources_servers.swe_bench.confirm.comparing import failed, read_records
from resources_servers.swe_bench.confirm.controls import ControlledRendering, ControlledTest, RowControls, Strength
from resources_servers.swe_bench.confirm.labels import Labels, words_of
from resources_servers.swe_bench.confirm.rendering import Chosen, Order, Rendered, render
from resources_servers.swe_bench.confirm.runs import Recorded, Rendering, Steps, read_pristine, run_renderings
from resources_servers.swe_bench.confirm.values import Check, Value, carries, equal, same_form
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.patches import paths_of
from resources_servers.swe_bench.row import SweBenchRow
from resources_servers.swe_bench.tamper.risk import decides_how_tests_run
from resources_servers.swe_bench.tamper.test_ids import TestId

GOLD_RUNS = 3
BASE_RUNS = 3
BLINDED = 2
"""Renderings that run under the row's own test command."""
OWN_NUMBERS = 1
"""The rendering whose numbers are the row's own; its words are not."""
SAMPLED_TESTS = 12
"""PASS_TO_PASS functions that are confirmed too, at the most."""
_MAX_ROUNDS = 6
_WORD = re.compile(r"[^\W\d_]+")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_DOCUMENTS = (".md", ".rst", ".txt", ".po", ".mo", ".svg", ".png")

Call = list[tuple[str, list[Value]]]
Calls = dict[str, list[Call]]
"""Test → its invocations, each a list of ``(key, values)``."""


@dataclass
class _Set:
    """One rendering of all of a row's test files."""

    rendering: Rendering
    files: dict[str, Rendered]

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
    notes: list[str] = field(default_factory=list)
    _sources: dict[str, str] = field(default_factory=dict)
    _support: dict[str, bytes] = field(default_factory=dict)
    _chosen: dict[str, Chosen] = field(default_factory=dict)
    _sides: dict[str, Side] = field(default_factory=dict)
    _vocabulary: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._gold = self.row.patch.encode("utf-8", "surrogateescape")
        self._fixed = [TestId.parse(text) for text in self.row.fail_to_pass]
        self._kept = [TestId.parse(text) for text in self.row.pass_to_pass]

    async def make(self) -> RowControls:
        """The row's controls. A row whose tests cannot be rendered gets controls of strength ``none``.

        Raises:
            SandboxError, VerifierError: a box failed.
        """
        started = time.monotonic()
        renderings: list[ControlledRendering] = []
        strengths: dict[str, Strength] = {}
        if Steps.of(self.row.eval_script) is None:
            self.notes.append("the evaluation script does not apply one test patch from a here-document")
        else:
            await self._read()
            if self._sources:
                renderings, strengths = await self._renderings()
        return RowControls(
            instance_id=self.row.instance_id,
            image_content=self.image_content,
            renderings=tuple(renderings),
            support=self._support if renderings else {},
            tests=self._tests(strengths),
            notes=tuple(self.notes),
            seconds=round(time.monotonic() - started, 2),
        )

    # ------------------------------------------------------------------------------------------------ what there is

    async def _read(self) -> None:
        patched = sorted(paths_of(self.row.test_patch.encode("utf-8", "surrogateescape")))
        named = sorted({test.path for test in self._fixed if test.path.endswith(".py")} - set(patched))
        gold_paths = paths_of(self._gold)

        def is_product(path: str) -> bool:
            return path in gold_paths or not decides_how_tests_run(path)

        pristine = await read_pristine(self.site, self.row, [*patched, *named], is_product)
        self._vocabulary = _vocabulary(pristine.product) | {
            word.lower() for word in _WORD.findall("\n".join(_added(self.row.patch)))
        }
        for path, content in pristine.sources.items():
            if content is None:
                continue
            fixed = Chosen.of(path, self._fixed)
            if not path.endswith(".py"):
                self._support[path] = content
                continue
            kept = sorted(Chosen.of(path, self._kept).names - fixed.names)
            sample = self._rng.sample(kept, min(len(kept), SAMPLED_TESTS))
            chosen = Chosen(fixed.names | frozenset(sample), fixed.docstrings)
            try:
                text = content.decode("utf-8")
                if render(text, chosen, Order("discover", random.Random(0), "/nowhere")) is None:
                    raise ValueError("holds no expected test")
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
                self.notes.append(f"{path}: {error}")
                self._support[path] = content
                continue
            self._sources[path] = text
            self._chosen[path] = chosen

    def _render(self, mode: str, seed: int, pinned: Collection[str] | None, *, plain: bool = False) -> _Set | None:
        """One rendering of all files; with ``pinned`` tokens relabelled, with ``None`` in their own words."""
        rng = random.Random(seed)
        records = f"/var/tmp/{_name(rng)}"
        files: dict[str, Rendered] = {}
        texts: dict[str, str] = {}
        plain_path = ""
        for path, source in self._sources.items():
            order = Order("discover", random.Random(0), records, path)
            words = render(source, self._chosen[path], order)
            assert words is not None
            labels = None if pinned is None else Labels(random.Random(seed), words.words, self._vocabulary, pinned)
            order = Order(
                "discover" if mode == "discover" else "blind",
                rng,
                records,
                path,
                labels,
                {key.partition("|")[2]: side for key, side in self._sides.items() if key.startswith(f"{path}|")},
                plain=plain,
            )
            done = render(source, self._chosen[path], order)
            if done is None:
                continue
            files[path] = done
            texts[path] = done.source
        if not files:
            return None
        if plain:
            if len(files) > 1:
                first = next(iter(files))
                files, texts = {first: files[first]}, {first: texts[first]}
            plain_path = f"{_name(rng)}.py"
            texts = {plain_path: next(iter(texts.values()))}
        return _Set(Rendering(texts, records, plain_path), files)

    # --------------------------------------------------------------------------------------------------- the making

    async def _renderings(self) -> tuple[list[ControlledRendering], dict[str, Strength]]:
        own = self._render("discover", self._rng.getrandbits(64), None)
        assert own is not None
        gold = await self._run(self._gold, [own])
        base = await self._run(b"", [own])
        if not gold.records or not gold.records[0]:
            self.notes.append(f"gold left no records: {gold.log[-300:]}")
            return [], {}
        public, before = own.calls(gold.records[0]), own.calls(base.records[0] if base.records else "")
        self._sides = _decide_sides(own, public, before)
        seeds = [self._rng.getrandbits(64) for _ in range(BLINDED + 1)]
        told = await self._relabel(own, public, before, seeds)
        sets: list[tuple[_Set, Calls]] = []
        for number, (seed, pinned, calls) in enumerate(told):
            blinded = self._render("blind", seed, pinned, plain=number == BLINDED)
            if blinded is not None:
                sets.append((blinded, calls))
        probes = {key: probe for file in own.files.values() for key, probe in file.probes.items()}
        controlled = [ControlledRendering(one.rendering, self._checks(one, calls, probes)) for one, calls in sets]
        return await self._keep_what_tells(controlled, sets, public, before)

    async def _relabel(
        self, own: _Set, public: Calls, before: Calls, seeds: Sequence[int]
    ) -> list[tuple[int, set[str] | None, Calls]]:
        """For each rendering the seed of its words, the tokens that gold cannot do without, and what gold answers in
        those words."""
        words = {f"{path}|{test}": w for path, file in own.files.items() for test, w in file.words_by_test.items()}
        fixed = {test for test in public if self._is_fixed(test)}
        # What gold does not visibly tell from base even in the test's own words is no fault of other words.
        unseen = {test for test in fixed if not _differs(own, public[test], before.get(test, []))}
        pinned: list[set[str] | None] = [_first_pins(number, own.files.values()) for number in range(len(seeds))]
        drawn = list(seeds)
        found: list[Calls] = [{} for _ in seeds]
        waiting = set(range(len(seeds)))
        tried: Counter[tuple[int, str]] = Counter()
        for attempt in range(_MAX_ROUNDS):
            if attempt == _MAX_ROUNDS - 1:
                for number in waiting:
                    pinned[number] = None
            sets = {number: self._render("discover", drawn[number], pinned[number]) for number in sorted(waiting)}
            ready = [one for one in sets.values() if one is not None]
            gold, base = await self._run(self._gold, ready), await self._run(b"", ready)
            for place, (number, one) in enumerate(sets.items()):
                assert one is not None
                calls = found[number] = one.calls(gold.records[place] if gold.records else "")
                unfixed = one.calls(base.records[place] if base.records else "")
                # Kept tests that other words break are left out of this rendering; those to be fixed keep their words.
                broken = _broken(own, public, calls) & fixed
                broken |= {
                    test for test in fixed - unseen if not _differs(own, calls.get(test, []), unfixed.get(test, []))
                }
                pins = pinned[number]
                if not broken or pins is None:
                    waiting.discard(number)
                    continue
                # Other words are tried first, then the tests' own numbers, then all of their own words.
                drawn[number] = self._rng.getrandbits(64)
                for test in broken:
                    times = tried[number, test] = tried[number, test] + 1
                    pins |= {word for word in words.get(test, ()) if times > 2 or (times > 1 and word.isdigit())}
            if not waiting:
                break
        return list(zip(drawn, pinned, found, strict=True))

    def _checks(
        self, one: _Set, calls: Calls, probes: Mapping[str, Probe]
    ) -> dict[str, tuple[tuple[Check, ...], ...]]:
        """What a blinded rendering must record, from what gold answered to both sides in the same words."""
        sites = {key: token for token, key in one.tokens.items()}
        here = {key.partition("|")[0] for key in one.tokens.values()}
        found: dict[str, tuple[tuple[Check, ...], ...]] = {}
        for test, invocations in calls.items():
            if test.partition("|")[0] not in here or test not in sites:
                continue
            found[test] = tuple(
                (
                    Check(sites[test], "begin"),
                    *(self._check(sites[key], probes[key], key, values) for key, values in one_call),
                )
                for one_call in invocations
            )
        return found

    def _check(self, site: str, probe: Probe, key: str, values: list[Value]) -> Check:
        if probe.op in ("truth", "false"):
            return Check(site, probe.op, answer=values[0])
        if probe.op.startswith("raises"):
            kind = values[1] if len(values) > 1 else None
            return Check(site, probe.op, expected=kind, pattern=values[2] if len(values) > 2 else None)
        dropped = self._sides.get(key, probe.expected or "right")
        left, right = values[0], values[1]
        kept, expected = (left, right) if dropped == "right" else (right, left)
        said = _says_the_same(left, right)
        side: Side = "left" if dropped == "right" else "right"
        check = Check(site, probe.op, side, expected, kept, probe.extra, said=said)
        if probe.op != "like" and check.holds([kept]):
            return check
        if probe.op in ("==", "like", "count") and (equal(kept, expected, said=True) or carries(kept)):
            return Check(site, "like", side, None, kept, said=said)
        return Check(site, "present", side)

    async def _keep_what_tells(
        self,
        controlled: Sequence[ControlledRendering],
        sets: Sequence[tuple[_Set, Calls]],
        public: Calls,
        before: Calls,
    ) -> tuple[list[ControlledRendering], dict[str, Strength]]:
        """Drop tests that gold does not pass every time, and renderings in which base passes what it should not."""
        renderings = [one.rendering for one in controlled]
        fixed = {test for test in public if self._is_fixed(test)}
        unsteady: list[set[str]] = [set() for _ in controlled]
        unfailing: list[set[str]] = [set() for _ in controlled]
        seen_base: list[list[Calls]] = [[] for _ in controlled]
        for patch, times in ((self._gold, GOLD_RUNS), (b"", BASE_RUNS)):
            run = await self._run(patch, renderings * times)
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
                self.notes.append(f"rendering {number} decides nothing")
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
            strong = len(found) == BLINDED and "strong" in found
            strengths[test] = "none" if not found else "strong" if strong else "weak"
        return kept, strengths

    # --------------------------------------------------------------------------------------------------- small parts

    async def _run(self, patch: bytes, renderings: Sequence[Rendering | _Set]) -> Recorded:
        plain = [one.rendering if isinstance(one, _Set) else one for one in renderings]
        recorded = await run_renderings(self.site, self.row, patch, plain, support=self._support)
        if recorded.outcome is not ExecOutcome.EXITED:
            self.notes.append(f"a run ended by '{recorded.outcome}'")
        return recorded

    def _is_fixed(self, test: str) -> bool:
        path, _, name = test.partition("|test:")
        function = name.rpartition(".")[2]
        docstrings = self._chosen[path].docstrings
        return any(
            one.may_be_in(path) and (one.function == function or (one.docstring and one.docstring in docstrings))
            for one in self._fixed
        )

    def _tests(self, strengths: Mapping[str, Strength]) -> dict[str, ControlledTest]:
        found: dict[str, ControlledTest] = {}
        for test, strength in strengths.items():
            path, _, name = test.partition("|test:")
            function = name.rpartition(".")[2]
            ids = tuple(
                text
                for text, one in zip(self.row.fail_to_pass, self._fixed, strict=True)
                if one.may_be_in(path) and one.function == function
            )
            found[test] = ControlledTest(ids, True, strength)
        named = {text for test in found.values() for text in test.ids}
        for text in self.row.fail_to_pass:
            if text not in named:
                found[f"|{text}"] = ControlledTest((text,), True, "none")
        return found


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


def _first_pins(number: int, files: Iterable[Rendered]) -> set[str]:
    """Tokens that a rendering keeps from the start. One keeps all numbers: a limit that is drawn anew mostly limits
    nothing any more, and then nothing asks for what the limit does."""
    return {word for file in files for word in file.words if word.isdigit()} if number == OWN_NUMBERS else set()


def _decide_sides(own: _Set, gold: Calls, base: Calls) -> dict[str, Side]:
    """The side that is expected, for every two-sided probe: by what is written where that tells, else the one that
    base and gold agree on."""
    found: dict[str, Side] = {}
    changes: dict[str, set[str]] = {}
    for test, calls in gold.items():
        for call, other in zip(calls, base.get(test, []), strict=False):
            for (key, values), (other_key, other_values) in zip(call, other, strict=False):
                if key != other_key or len(values) < 2 or len(other_values) < 2:
                    break
                for side, one, two in zip(("left", "right"), values, other_values, strict=False):
                    if not equal(one, two, said=True):
                        changes.setdefault(key, set()).add(side)
    for file in own.files.values():
        for key, probe in file.probes.items():
            changed = changes.get(key, set())
            if probe.expected is not None:
                found[key] = probe.expected
            elif changed == {"right"}:
                found[key] = "left"
            else:
                found[key] = "right"
    return found


def _differs(own: _Set, gold: list[Call], base: list[Call]) -> bool:
    """Whether base answers something else than gold in a test."""
    if [[key for key, _ in call] for call in gold] != [[key for key, _ in call] for call in base]:
        return True
    probes = {key: probe for file in own.files.values() for key, probe in file.probes.items()}
    pairs = [pair for call, other in zip(gold, base, strict=True) for pair in zip(call, other, strict=True)]
    return any(
        _holds(probes[key], values) != _holds(probes[key], others)
        or not equal(values[0], others[0], said=_steady(values[0], others[0]))
        for (key, values), (_, others) in pairs
    )


def _broken(own: _Set, public: Calls, calls: Calls) -> set[str]:
    """Tests that gold no longer passes in other words, as far as it can be seen."""
    probes = {key: probe for file in own.files.values() for key, probe in file.probes.items()}
    found: set[str] = set()
    for test, invocations in public.items():
        mine = calls.get(test, [])
        if [[key for key, _ in call] for call in invocations] != [[key for key, _ in call] for call in mine]:
            found.add(test)
            continue
        for call, other in zip(invocations, mine, strict=True):
            for (key, values), (_, other_values) in zip(call, other, strict=True):
                probe = probes[key]
                if not _holds(probe, values) or _holds(probe, other_values):
                    continue
                # Computed from other numbers: gold's own answer serves, where it is one of the same form.
                recomputed = probe.op in ("==", "close", "almost", "like") and all(
                    same_form(one, other) for one, other in zip(values, other_values, strict=False)
                )
                if not recomputed or not same_form(other_values[0], other_values[1]):
                    found.add(test)
    return found


def _holds(probe: Probe, values: list[Value]) -> bool:
    if probe.op in ("truth", "false"):
        return len(values) > 1 and values[1] == ["truth", probe.op == "truth"]
    if probe.op.startswith("raises"):
        pattern = values[2] if len(values) > 2 else None
        return Check("", probe.op, expected=values[1] if len(values) > 1 else None, pattern=pattern).holds(values[:1])
    if len(values) < 2:
        return False
    if probe.op == "like":
        return equal(values[0], values[1], said=True)
    return Check("", probe.op, "left", values[1], extra=probe.extra, said=_says_the_same(*values[:2])).holds(
        values[:1]
    )


def _says_the_same(left: Value, right: Value) -> bool:
    """Whether two values hold objects that say the same of themselves, and nothing that changes from run to run."""
    return equal(left, right, said=True) and _steady(left, right)


def _steady(*values: Value) -> bool:
    return not _ADDRESS.search(str(values))


def _carries_more_than_the_public(
    calls: tuple[tuple[Check, ...], ...], public: list[Call], base: Sequence[Calls], test: str, one: _Set
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


def _added(patch: str) -> list[str]:
    return [line[1:] for line in patch.split("\n") if line.startswith("+") and not line.startswith("+++ ")]


def _name(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(10))
