"""Mutant twins, for tests that blinded renderings do not control. Their expectations stay in the box, but are wrong in
half of the runs.

A *twin* is one rendering of a row's test files together with a *mutant* of it, in which some tests expect something
else. Gold passes the true rendering and fails the mutated tests; base fails the true rendering. Both run with an
attempt's patch, in separate boxes and in random order, and differ only in the expectation. If both are reported as
passed, the report does not depend on the code's answers.

`expectations` makes twins of Python files. This module handles texts, ids and logs.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from resources_servers.swe_bench import grading
from resources_servers.swe_bench.confirm.expectations import Origin, Wrong, near_texts, twin_of
from resources_servers.swe_bench.confirm.labels import Labels, random_name, tokens_of_text
from resources_servers.swe_bench.confirm.material import Material, render_file
from resources_servers.swe_bench.confirm.rendering import Chosen, Order
from resources_servers.swe_bench.confirm.runs import Rendering, read_records, word_in_command
from resources_servers.swe_bench.confirm.values import Value
from resources_servers.swe_bench.eval_box import Steps
from resources_servers.swe_bench.grading import MarkerState
from resources_servers.swe_bench.row import SweBenchRow, TestId
from resources_servers.swe_bench.signs import FIXTURE_SUFFIXES, paths_of

TWINS = 3
"""The number of twins of a row that nothing else controls. Each more twin halves the chance of guessing right."""
TWINS_BESIDE = 2
"""The number of twins of a row that blinded renderings control too: enough for two kinds of expectations."""
GOLD_RUNS = 5
"""The number of gold runs. As in `telling`, tests whose results vary over five runs are not used."""
BASE_RUNS = 3
_MUTATION_ROUNDS = 3
_TRIED_AT_ONCE = 3
_MAX_TEXT_FILE = 200_000
_EXPECTED_FILES = (*FIXTURE_SUFFIXES, ".md", ".rst", ".csv", ".ambr", ".expected", ".log")
_PASSED = ("PASSED", "XFAIL")


@dataclass(frozen=True)
class Mutant:
    """A wrong expectation, as a change of the true text."""

    path: str
    start: int
    end: int
    text: str
    """The replacement for the text from ``start`` to ``end``."""
    kind: str
    excluding: bool
    """Whether no code can meet both this expectation and the true one."""


@dataclass(frozen=True)
class TwinTest:
    """One test of a twin."""

    ids: tuple[str, ...]
    """The ids of its cases in the log, where cases are named by position. Gold passes all of them in the true twin."""
    wrong: tuple[str, ...] = ()
    """The ids that gold fails in the mutant."""
    mutant: Mutant | None = None


@dataclass(frozen=True)
class Twin:
    """A true rendering and its mutant."""

    files: Mapping[str, str]
    """Path in the repository → true text."""
    tests: Mapping[str, TwinTest]

    def texts(self, *, mutated: bool) -> dict[str, str]:
        """Return the files of the true rendering, or of the mutant."""
        texts = dict(self.files)
        mutants = [test.mutant for test in self.tests.values() if mutated and test.mutant is not None]
        for one in sorted(mutants, key=lambda mutant: mutant.start, reverse=True):
            texts[one.path] = texts[one.path][: one.start] + one.text + texts[one.path][one.end :]
        return texts


@dataclass
class TwinRun:
    """The results of the twins that ran so far."""

    problems: dict[str, str] = field(default_factory=dict)
    """Test → why it is not confirmed."""
    passed: dict[str, set[tuple[str, bool]]] = field(default_factory=lambda: defaultdict(set))
    """Test → ``(kind, excluding)`` of the wrong expectations with which it is reported as passed."""

    @property
    def passes_wrong_expectations(self) -> bool:
        """Whether no correct solution can pass these: they are of two kinds, or one excludes the true expectation."""
        kinds = {kind for found in self.passed.values() for kind, _ in found}
        return len(kinds) > 1 or any(excluding for found in self.passed.values() for _, excluding in found)


def decides(twins: Sequence[Twin], test: str) -> bool:
    """Whether the twins can show that a test's report is false: by an excluding mutant, or mutants of two kinds."""
    all_mutants = [twin.tests[test].mutant for twin in twins if test in twin.tests]
    found = [mutant for mutant in all_mutants if mutant is not None]
    return any(one.excluding for one in found) or len({one.kind for one in found}) > 1


def dealt(twins: Sequence[Twin], rng: random.Random) -> tuple[list[tuple[Twin, bool]], list[tuple[Twin, bool]]]:
    """Return for each of two boxes the twins in the order in which they run, each with whether its mutant runs."""
    first = [(twin, rng.random() < 0.5) for twin in twins]
    second = [(twin, not mutated) for twin, mutated in first]
    return rng.sample(first, len(first)), rng.sample(second, len(second))


def rendering_of(
    row: SweBenchRow,
    texts: Mapping[str, str],
    rng: random.Random,
    instead: Mapping[str, tuple[str, ...]] | None = None,
) -> Rendering:
    """Return a rendering of unchanged test files whose records are the test command's output. The test command's other
    files are left out: they hold tests to be kept, which never run together with tests to be fixed."""
    patched = paths_of(row.test_diff)
    others = {path: () for path in patched if path.endswith(".py") and path not in texts}
    return Rendering(texts, f"/var/tmp/{random_name(rng)}", printed=True, instead=others | dict(instead or {}))


@dataclass(frozen=True)
class Delivery:
    """How twins run in a box: each in its own run, or all as files of one run, which starts the test runner once."""

    renderings: tuple[Rendering, ...]
    paths: Mapping[str, str]
    """File in the box → the file that ids name."""
    count: int
    """The number of twins."""

    @classmethod
    def of(cls, row: SweBenchRow, box: Sequence[tuple[Twin, bool]], rng: random.Random) -> Delivery:
        """Return the delivery of one box, given as pairs ``(twin, whether its mutant runs)``."""
        texts = [twin.texts(mutated=mutated) for twin, mutated in box]
        if not _fit_into_one_run(row, [twin for twin, _ in box]):
            return cls(tuple(rendering_of(row, twin_files, rng) for twin_files in texts), {}, len(box))
        files: dict[str, str] = {}
        paths: dict[str, str] = {}
        for twin_files in texts:
            for path, text in twin_files.items():
                new_path = str(PurePosixPath(path).with_name(f"test_{random_name(rng)}.py"))
                files[new_path], paths[new_path] = text, path
        instead = {path: tuple(new_path for new_path in paths if paths[new_path] == path) for path in paths.values()}
        return cls((rendering_of(row, files, rng, instead),), paths, len(box))

    async def passed(self, row: SweBenchRow, logs: Sequence[str]) -> list[set[str]]:
        """Return for each twin the ids that pass. If all ran together, they include the ids of the other twins.

        Raises:
            VerifierError: no process can be started to read the logs.
        """
        by_log = [{self._named(test_id) for test_id in await passed_in(row, log)} for log in logs]
        return by_log if len(by_log) == self.count else [set().union(*by_log) for _ in range(self.count)]

    def _named(self, test: str) -> str:
        path, separator, rest = test.partition("::")
        return self.paths.get(path, path) + separator + rest


def _fit_into_one_run(row: SweBenchRow, twins: Sequence[Twin]) -> bool:
    """Whether the test command names the twins' files, and no id belongs to two twins."""
    steps = Steps.of(row.eval_script)
    ids = Counter(test_id for twin in twins for test in twin.tests.values() for test_id in test.ids)
    paths = {path for twin in twins for path in twin.files}
    return (
        steps is not None
        and len(twins) > 1
        and all(path.endswith(".py") and word_in_command(path).search(steps.test_command) for path in paths)
        and all(count == 1 for count in ids.values())
    )


def look_at(run: TwinRun, twin: Twin, passed: Collection[str], *, mutated: bool) -> None:
    """Add the result of one twin to ``run``."""
    for name, test in twin.tests.items():
        wrong = test.wrong if mutated else ()
        if any(test_id not in passed for test_id in test.ids if test_id not in wrong):
            run.problems.setdefault(name, "twin: it is not reported as passed where it expects what is right")
        if test.mutant is not None and any(test_id in passed for test_id in wrong):
            run.passed[name].add((test.mutant.kind, test.mutant.excluding))


async def passed_in(row: SweBenchRow, log: str) -> list[str]:
    """Return the ids that the official parser reads as passed, in log order. Return none if the log itself contains
    markers."""
    module = grading.grading()
    start, end = (f"+ : '{marker}'" for marker in (module.START_TEST_OUTPUT, module.END_TEST_OUTPUT))
    text = grading.log_text(log.encode("latin-1"))
    parse_row = dataclasses.replace(row, fail_to_pass=(), pass_to_pass=(), eval_script="")
    grade, _ = await grading.graded(parse_row, f"{start}\n{text}\n{end}\n")
    if grade.markers is not MarkerState.GENUINE:
        return []
    return [test for test, status in grade.status_map.items() if status in _PASSED]


# ------------------------------------------------------------------------------------------------------ making them


@dataclass
class _Draft:
    """A twin under construction."""

    texts: dict[str, str]
    names: dict[str, str]
    """A function's name in the log → test."""
    wrongs: dict[str, list[tuple[str, Wrong]]]
    """Test → the ``(path, wrong)`` pairs not tried yet, in the order in which to try them."""
    ids: dict[str, list[str]] = field(default_factory=dict)
    chosen: dict[str, Mutant] = field(default_factory=dict)
    wrong_ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    failing: dict[str, list[tuple[Mutant, tuple[str, ...]]]] = field(default_factory=dict)
    """Test → the wrong expectations that gold fails, with the ids that fail."""

    def choose(self, chosen: Counter[tuple[str, str]]) -> None:
        """Choose one wrong expectation for each test, preferably of a kind that no other draft has. Among these prefer
        one that excludes the true expectation, then one with another input over one with another expected value."""
        for test, candidates in self.failing.items():
            taken = [one for other, one in self.chosen.items() if other != test]
            free = [(mutant, ids) for mutant, ids in candidates if not _overlaps(mutant, taken)]
            if test in self.chosen or not free:
                continue

            def rank(pair: tuple[Mutant, tuple[str, ...]], test: str = test) -> tuple[bool, int, bool, bool]:
                one = pair[0]
                # Use a negation only if there is nothing else: compared with the public test, it is obvious.
                return one.kind == "negation", chosen[test, _group(one)], not one.excluding, _group(one) != "input"

            mutant, self.wrong_ids[test] = min(free, key=rank)
            self.chosen[test] = mutant
            chosen[test, _group(mutant)] += 1

    def twin(self) -> Twin:
        tests = {
            test: TwinTest(tuple(ids), self.wrong_ids.get(test, ()), self.chosen.get(test))
            for test, ids in self.ids.items()
        }
        return Twin(self.texts, tests)

    def by_test(self, passed: Iterable[str]) -> dict[str, list[str]]:
        ids_by_test: dict[str, list[str]] = {}
        for test_id in passed:
            test = self.names.get(TestId.parse(test_id).function) or self.names.get(test_id)
            if test is not None:
                ids_by_test.setdefault(test, []).append(test_id)
        return ids_by_test


@dataclass
class TwinMaker:
    """Makes the twins of a row's tests.

    Args:
        chosen: path → the tests in it that are to be fixed and that nothing else controls well.
        rng: the source of all random choices; secret.
        count: the number of twins to make.
    """

    material: Material
    chosen: Mapping[str, Chosen]
    rng: random.Random
    count: int = TWINS

    async def make(self) -> tuple[Twin, ...]:
        """Return the twins with which gold and base give the required results; empty if there are none.

        Raises:
            SandboxError, VerifierError: a box failed.
        """
        drafts = await self._true_drafts()
        await self._mutate(drafts)
        twins = await self._steady([draft.twin() for draft in drafts if draft.chosen])
        decided = {test for twin in twins for test in twin.tests if decides(twins, test)}
        useful_twins = []
        for twin in twins:
            tests = {test: twin_test for test, twin_test in twin.tests.items() if test in decided}
            if any(twin_test.mutant is not None for twin_test in tests.values()):
                useful_twins.append(Twin(twin.files, tests))
        if drafts and not useful_twins:
            self.material.notes.append("no twin decides anything")
        return tuple(useful_twins)

    # ------------------------------------------------------------------------------------------------ true twins

    async def _true_drafts(self) -> list[_Draft]:
        """Return renderings that gold passes and base fails. Try other words and numbers first, then other words with
        the tests' own numbers, then the tests' own words and numbers under other names."""
        drafts: list[_Draft] = []
        for levels in ((False,), (False, True, None)):
            pinned = [level for level in levels for _ in range(self.count - len(drafts))]
            labels = [None if level is None else self._labels(pin_numbers=level) for level in pinned]
            answers = await self._base_answers(labels)
            made_drafts = [self._draft(label_set, base) for label_set, base in zip(labels, answers, strict=True)]
            tried = [(level, draft) for level, draft in zip(pinned, made_drafts, strict=True) if draft is not None]
            if not tried:
                return drafts
            gold = await self._passed(self.material.gold, [draft.texts for _, draft in tried])
            base = await self._passed(b"", [draft.texts for _, draft in tried])
            for (level, draft), passed, before in zip(tried, gold, base, strict=True):
                unfixed = draft.by_test(before)
                draft.ids = {
                    test: ids
                    for test, ids in draft.by_test(passed).items()
                    if not set(ids) <= set(unfixed.get(test, ()))
                }
                whole = set(draft.ids) >= set(draft.names.values())
                if len(drafts) < self.count and draft.ids and (whole or level is None):
                    drafts.append(draft)
            if len(drafts) == self.count:
                break
        if not drafts:
            self.material.notes.append("gold passes no true twin that base fails")
        return drafts

    def _draft(self, labels: Labels | None, base: Mapping[str, Sequence[Value]]) -> _Draft | None:
        draft = _Draft({}, {}, {})
        for path, source in self.material.sources.items():
            if path not in self.chosen:
                continue
            prefix = f"{path}|"
            sides = {key.removeprefix(prefix): side for key, side in self.material.sides.items()}
            answers = {key.removeprefix(prefix): values for key, values in base.items()}
            twin = twin_of(source, self.chosen[path], rng=self.rng, labels=labels, sides=sides, base=answers)
            if twin is None:
                continue
            draft.texts[path] = twin.text
            draft.names |= {name: f"{path}|{test}" for name, test in twin.names.items()}
            for test, wrongs in twin.wrongs.items():
                draft.wrongs.setdefault(f"{path}|{test}", []).extend((path, wrong) for wrong in wrongs)
        # Expectations in the test itself are more certain. Only a test without any gets expectations in other files.
        bare = [test for test in dict.fromkeys(draft.names.values()) if not draft.wrongs.get(test)]
        for path, content in self.material.support.items():
            text = _text_of(path, content)
            if text is not None:
                self._add_text(draft, path, labels.text(text) if labels is not None else text, bare)
        return draft if draft.names else None

    def _add_text(self, draft: _Draft, path: str, text: str, bare: Sequence[str]) -> None:
        """Add a file that is not Python. It is either a test itself (a document with examples), or may hold what the
        ``bare`` tests expect."""
        draft.texts[path] = text
        own_tests = {one: f"{path}|{one}" for one in self.material.row.fail_to_pass if TestId.parse(one).path == path}
        draft.names |= own_tests
        wrongs = list(_wrong_texts(text, self.rng))
        for test in own_tests.values() or bare:
            test_wrongs = draft.wrongs.setdefault(test, [])
            test_wrongs += [(path, dataclasses.replace(wrong, test=test)) for wrong in wrongs]

    def _labels(self, *, pin_numbers: bool) -> Labels:
        tokens: set[str] = set()
        for path, chosen in self.chosen.items():
            order = Order("discover", random.Random(0), "/nowhere", path)
            rendered = render_file(self.material.sources[path], chosen, order)
            tokens |= rendered.words if rendered is not None else set()
        for path, content in self.material.support.items():
            tokens |= tokens_of_text(_text_of(path, content) or "")
        pinned = {token for token in tokens if token.isdigit()} if pin_numbers else set()
        for path, content in self.material.support.items():
            # Keep the words of the path, by which tests find the file, and of the code, which names product parts.
            pinned |= tokens_of_text(path) | _code_in(_text_of(path, content) or "")
        return Labels(random.Random(self.rng.getrandbits(64)), tokens, self.material.vocabulary, pinned)

    async def _base_answers(self, labels: Sequence[Labels | None]) -> list[dict[str, list[Value]]]:
        """Return base's answers at the tests' assertions, in the words of each of ``labels``."""
        if not self.chosen:
            return [{} for _ in labels]
        renderings: list[Rendering] = []
        for label_set in labels:
            records = f"/var/tmp/{random_name(self.rng)}"
            texts = {
                path: label_set.text(text) if label_set is not None else text
                for path, content in self.material.support.items()
                if (text := _text_of(path, content)) is not None
            }
            for path, chosen in self.chosen.items():
                order = Order("discover", random.Random(0), records, path, label_set)
                rendered = render_file(self.material.sources[path], chosen, order)
                if rendered is not None:
                    texts[path] = rendered.source
            renderings.append(Rendering(texts, records))
        run = await self.material.run(b"", renderings)
        answers: list[dict[str, list[Value]]] = []
        for records in run.records:
            by_key: dict[str, list[Value]] = {}
            for key, values in read_records(records):
                if values:
                    left_out = self.material.sides.get(key, "right") == "left" and len(values) > 1
                    by_key.setdefault(key, []).append(values[1] if left_out else values[0])
            answers.append(by_key)
        return answers

    # ---------------------------------------------------------------------------------------------------- mutants

    async def _mutate(self, drafts: Sequence[_Draft]) -> None:
        """Find for each test of each draft a wrong expectation that gold fails. Vary the kinds over the drafts."""
        used: Counter[tuple[str, str, Origin]] = Counter()
        chosen: Counter[tuple[str, str]] = Counter()
        for _ in range(_MUTATION_ROUNDS):
            tried = [
                (draft, mutants)
                for draft in drafts
                for _ in range(_TRIED_AT_ONCE)
                if (mutants := self._next(draft, used))
            ]
            if not tried:
                return
            texts = [
                Twin(draft.texts, {test: TwinTest((), (), one) for test, one in mutants.items()}).texts(mutated=True)
                for draft, mutants in tried
            ]
            gold = await self._passed(self.material.gold, texts)
            for (draft, mutants), passed in zip(tried, gold, strict=True):
                failed = {test: tuple(one for one in ids if one not in passed) for test, ids in draft.ids.items()}
                # A change that makes other tests fail too is not an expectation of this test alone.
                if any(ids and test not in mutants for test, ids in failed.items()):
                    continue
                for test, mutant in mutants.items():
                    if failed.get(test):
                        draft.failing.setdefault(test, []).append((mutant, failed[test]))
            for draft in drafts:
                draft.choose(chosen)

    def _next(self, draft: _Draft, used: Counter[tuple[str, str, Origin]]) -> dict[str, Mutant]:
        """Return the next wrong expectation to try for each test that has none. Rarely tried kinds come first."""
        next_mutants: dict[str, Mutant] = {}
        for test in draft.ids:
            wrongs = draft.wrongs.get(test, [])
            # Try changed inputs first: of two other inputs, often only one leads to another answer.
            wrongs.sort(
                key=lambda pair: (
                    pair[1].kind == "negation",
                    used[pair[1].test, pair[1].kind, pair[1].origin],
                    pair[1].origin != "input",
                )
            )
            while test not in draft.chosen and test not in next_mutants and wrongs:
                path, wrong = wrongs.pop(0)
                mutant = mutant_of(path, draft.texts[path], wrong)
                if not _overlaps(mutant, [*next_mutants.values(), *draft.chosen.values()]):
                    next_mutants[test] = mutant
                    used[wrong.test, wrong.kind, wrong.origin] += 1
        return next_mutants

    async def _steady(self, twins: Sequence[Twin]) -> list[Twin]:
        """Return the twins without the tests whose results are not the required ones in every run of gold and base."""
        if not twins:
            return []
        boxes = [[(twin, mutated) for twin in twins] for mutated in (False, True)]
        steady_tests = [dict(twin.tests) for twin in twins]
        gold = await self._delivered(self.material.gold, boxes * GOLD_RUNS)
        base = await self._delivered(b"", boxes[:1] * BASE_RUNS)
        for place, passed_by_twin in enumerate(gold):
            for tests, passed in zip(steady_tests, passed_by_twin, strict=True):
                for test, entry in list(tests.items()):
                    if [name for name in entry.ids if name not in passed] != list(entry.wrong if place % 2 else ()):
                        del tests[test]
        for passed_by_twin in base:
            for tests, passed in zip(steady_tests, passed_by_twin, strict=True):
                for test, entry in list(tests.items()):
                    if passed.issuperset(entry.ids):
                        del tests[test]
        return [Twin(twin.files, tests) for twin, tests in zip(twins, steady_tests, strict=True)]

    async def _delivered(self, patch: bytes, boxes: Sequence[Sequence[tuple[Twin, bool]]]) -> list[list[set[str]]]:
        """Run several deliveries in one box. Return for each delivery and each of its twins the ids that pass with
        ``patch``."""
        deliveries = [Delivery.of(self.material.row, box, self.rng) for box in boxes]
        recorded = await self.material.run(patch, [one for delivery in deliveries for one in delivery.renderings])
        logs = [*recorded.records]
        passed_by_delivery: list[list[set[str]]] = []
        for delivery in deliveries:
            delivery_logs, logs = logs[: len(delivery.renderings)], logs[len(delivery.renderings) :]
            passed_by_delivery.append(await delivery.passed(self.material.row, delivery_logs))
        return passed_by_delivery

    async def _passed(self, patch: bytes, texts: Sequence[Mapping[str, str]]) -> list[list[str]]:
        """Run several sets of test files in one box. Return for each the ids that pass with ``patch`` in log order."""
        recorded = await self.material.run(patch, [rendering_of(self.material.row, one, self.rng) for one in texts])
        return [await passed_in(self.material.row, log) for log in recorded.records]


def mutant_of(path: str, text: str, wrong: Wrong) -> Mutant:
    """Return the change that turns the true text into the wrong one."""
    start = 0
    while start < min(len(text), len(wrong.text)) and text[start] == wrong.text[start]:
        start += 1
    end = 0
    while end < min(len(text), len(wrong.text)) - start and text[-1 - end] == wrong.text[-1 - end]:
        end += 1
    return Mutant(path, start, len(text) - end, wrong.text[start : len(wrong.text) - end], wrong.kind, wrong.excluding)


def _group(mutant: Mutant) -> str:
    """Return the kind of a mutant, with smaller and larger inputs as one kind."""
    return "input" if mutant.kind.endswith("input") else mutant.kind


def _overlaps(mutant: Mutant, others: Iterable[Mutant]) -> bool:
    return any(
        mutant.path == other.path and mutant.start <= other.end and other.start <= mutant.end for other in others
    )


_PROMPT = re.compile(r"^\s*(>>>|\.\.\.)(\s|$)")


def _wrong_texts(text: str, rng: random.Random) -> list[Wrong]:
    """Return texts with one line changed: in a document with examples a line of their output, else any line."""
    lines = text.split("\n")
    examples = any(_PROMPT.match(line) for line in lines)
    places = [number for number, line in enumerate(lines) if _may_be_expected(lines, number, examples)]
    wrongs: list[Wrong] = []
    for place in rng.sample(places, min(len(places), 6)):
        line = lines[place].strip()
        siblings = [lines[other] for other in places if other != place]
        near = dict(rng.sample(others := near_texts(line, rng, siblings), len(others)))
        # The output of an example is compared exactly. How a test reads any other file is unknown.
        exact = examples and "..." not in line
        for difference, replacement in near.items():
            changed = "\n".join([*lines[:place], lines[place].replace(line, replacement), *lines[place + 1 :]])
            wrongs.append(Wrong("", "output" if examples else f"file {difference}", exact, "near", changed))
    rng.shuffle(wrongs)
    return [one for one in wrongs if one.text != text]


_STRING = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"")


def _code_in(text: str) -> set[str]:
    """Return the words in the code of a document's examples, outside of strings."""
    lines = [line for line in text.split("\n") if _PROMPT.match(line)]
    return {word for line in lines for word in tokens_of_text(_STRING.sub("", line)) if not word.isdigit()}


def _may_be_expected(lines: Sequence[str], place: int, examples: bool) -> bool:
    if not lines[place].strip() or _PROMPT.match(lines[place]):
        return False
    if not examples:
        return True
    before = next((lines[number] for number in range(place - 1, -1, -1) if _is_end(lines, number)), "")
    return bool(_PROMPT.match(before))


def _is_end(lines: Sequence[str], number: int) -> bool:
    """Whether a line is a prompt of an example, or blank, which ends an example's output."""
    return not lines[number].strip() or bool(_PROMPT.match(lines[number]))


def _text_of(path: str, content: bytes) -> str | None:
    """Return the text of a file that may hold what tests expect, else ``None``."""
    if PurePosixPath(path).suffix not in _EXPECTED_FILES:
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if len(text) <= _MAX_TEXT_FILE and "\0" not in text and "\r" not in text else None
