"""Variation: gives tests inputs that are in no public test, such as words of other lengths and other numbers.

Relabelling keeps the shape of a test's inputs, and a patch can be written for these shapes. A variation changes the
shapes as well. The test's own expectation, varied in the same way, still defines the right answer. If the answer is a
number that depends on the inputs, gold's answer defines it.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, cast, get_args

from resources_servers.swe_bench.confirm.labels import (
    MAX_DIGITS,
    PYTHON_WORDS,
    TOKEN,
    naming_constants,
    other_words,
    text_of,
)
from resources_servers.swe_bench.confirm.slicing import functions_of, key_of_test

Kind = Literal["words", "known words", "more words", "numbers", "zero and one", "fractions", "spaces"]
"""What is varied: words that the product does not know, words that it knows, the number of words, integers above 1,
0 and 1, floats that are multiples of 1/1024, and runs of spaces within a line."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_SPACES = re.compile(r"(?<=[^\s]) +(?=[^\s])")
_BEFORE = re.compile(r"(\w+|\W)\Z")
_AFTER = re.compile(r"\w+|\W")
_FACTORS = (0.75, 1.25, 1.5, 1.75)
_FINENESS = 1024
_MORE = 0.5
"""The share of the gaps between words that get an additional word."""


class Variation:
    """One consistent change of a file's data, drawn from ``rng``.

    Args:
        kinds: test (``test:`` and its qualified name) → what may be varied in it. Data shared by tests varies only in
            the kinds that all of them allow.
        vocabulary: words (lower case) that the product knows.
    """

    def __init__(
        self,
        rng: random.Random,
        tree: ast.AST,
        kinds: Mapping[str, Collection[Kind]],
        vocabulary: Collection[str],
    ) -> None:
        self.kinds = kinds
        texts = [
            text_of(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ]
        tokens = sorted({token.lower() for text in texts for token in TOKEN.findall(text)})
        words = [token for token in tokens if not token.isdigit() and token not in PYTHON_WORDS]
        replacements = other_words(rng, words, {*tokens, *vocabulary}, lambda word: _other_length(rng, word))
        self._words = {word: replacement for word, replacement in replacements.items() if word not in vocabulary}
        self._known = {word: replacement for word, replacement in replacements.items() if word in vocabulary}
        self._numbers = _other_numbers(rng, tree, (int(token) for token in tokens if _is_number(token)))
        self._factor = rng.choice(_FACTORS)
        self._salt = rng.getrandbits(64)

    def apply(self, tree: ast.AST) -> None:
        """Vary the data of ``tree``."""
        skipped = naming_constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript):
                places = (one for one in ast.walk(node.slice) if isinstance(one, ast.Constant))
                skipped.update(id(one) for one in places if isinstance(one.value, int))
            elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                skipped.update(id(one) for one in ast.walk(node.format_spec))
        tests = {
            id(function): frozenset(self.kinds[key])
            for classes, function, _ in (functions_of(tree) if isinstance(tree, ast.Module) else ())
            if (key := key_of_test(classes, function)) in self.kinds
        }
        shared = frozenset(KINDS).intersection(*tests.values())
        self._visit(tree, shared, tests, skipped)

    def _visit(
        self, node: ast.AST, kinds: frozenset[Kind], tests: Mapping[int, frozenset[Kind]], skipped: Collection[int]
    ) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Constant) and id(child) not in skipped:
                child.value = cast(Any, self._value(child.value, kinds))
            self._visit(child, tests.get(id(child), kinds), tests, skipped)

    def _value(self, value: object, kinds: frozenset[Kind]) -> object:
        if isinstance(value, str):
            return self._text(value, kinds)
        if isinstance(value, bytes):
            return self._text(value.decode("latin-1"), kinds).encode("latin-1", "replace")
        if type(value) is int and ("numbers" if value > 1 else "zero and one") in kinds:
            return self._numbers.get(value, value)
        if type(value) is float and "fractions" in kinds and value and (value * _FINENESS).is_integer():
            return value * self._factor
        return value

    def _text(self, text: str, kinds: frozenset[Kind]) -> str:
        parts: list[str] = []
        end = 0
        for run in _SPACES.finditer(text):
            parts += [self._tokens(text[end : run.start()], kinds), self._run(text, run, kinds)]
            end = run.end()
        return "".join([*parts, self._tokens(text[end:], kinds)])

    def _run(self, text: str, run: re.Match[str], kinds: frozenset[Kind]) -> str:
        """Return the replacement of a run of spaces. It is the same wherever the same text surrounds the run."""
        before, after = _BEFORE.search(text[: run.start()]), _AFTER.match(text[run.end() :])
        assert before is not None and after is not None
        rng = random.Random(f"{self._salt}|{before[0].lower()}|{len(run[0])}|{after[0].lower()}")
        length = rng.choice([length for length in (1, 2, 3, 4) if length != len(run[0])])
        spaces = " " * length if "spaces" in kinds else run[0]
        more = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
        return spaces + more + spaces if "more words" in kinds and rng.random() < _MORE else spaces

    def _tokens(self, text: str, kinds: frozenset[Kind]) -> str:
        return TOKEN.sub(lambda match: self._token(match[0], kinds), text)

    def _token(self, token: str, kinds: frozenset[Kind]) -> str:
        if _is_number(token):
            return str(self._numbers[int(token)]) if "numbers" in kinds else token
        word = token.lower()
        replacement = self._words.get(word) if "words" in kinds else None
        if replacement is None and "known words" in kinds:
            replacement = self._known.get(word)
        if replacement is None or len(token) != len(word):
            return token
        if token.isupper() and len(token) > 1:
            return replacement.upper()
        return replacement[:1].upper() + replacement[1:] if token[0].isupper() else replacement


def _other_length(rng: random.Random, word: str) -> int:
    lengths: list[int] = [length for length in (len(word) - 1, *range(len(word) + 1, len(word) + 4)) if length > 1]
    return rng.choice(lengths)


def _other_numbers(rng: random.Random, tree: ast.AST, numbers_in_text: Iterable[int]) -> dict[int, int]:
    """Return another number for each number. Their order is kept, because most computations depend on it."""
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}
    replacements: dict[int, int] = {}
    offset = 0
    for number in sorted(literals | set(numbers_in_text)):
        offset += rng.randint(0 if replacements else 1, 2)
        replacements[number] = number + offset
    return replacements


def _is_number(token: str) -> bool:
    return token.isdigit() and token.isascii() and 1 < len(token) <= MAX_DIGITS and token[0] != "0"
