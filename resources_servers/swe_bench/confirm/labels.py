"""Other data for a test: relabelling consistently replaces words and numbers in its literals with other ones.

Relabelling keeps the shape of a test's inputs, and a patch can be written for these shapes. A variation changes the
shapes as well. The test's own expectation, varied in the same way, still defines the right answer. If the answer is a
number that depends on the inputs, gold's answer defines it.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from resources_servers.swe_bench.confirm.slicing import functions_of, key_of_test

_CJK = r"\u3041-\u30ff\u4e00-\u9fff\uac00-\ud7a3"
TOKEN = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]+|\d+")  # in scripts without spaces between words, each letter is a word
_WORD = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]+")
MAX_DIGITS = 1000
"""Longer numbers stay as they are: Python refuses to read and write integers of more than 4300 digits."""
# fmt: off
_COMMON = frozenset([
    "utf", "latin", "ascii", "iso", "http", "https", "com", "org", "net", "www", "test", "self", "cls", "args",
    "kwargs", "none", "true", "false",
])
# fmt: on
# Skip private modules: they differ between releases, and tests have no data about them: 3.13 has `_apple_support`.
_MODULES = [name for name in sys.stdlib_module_names if not re.match("_(?!_)", name)]
PYTHON_WORDS = (
    frozenset(word for name in (*keyword.kwlist, *dir(builtins), *_MODULES) for word in _WORD.findall(name.lower()))
    | _COMMON
)
_NAMING_CALLS = frozenset(
    ("parametrize", "getattr", "setattr", "importorskip", "patch", "usefixtures", "skipif", "filterwarnings")
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwz"
_RANGES = ((0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x3042, 0x3093), (0x30A2, 0x30F3))
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_WIDE_LETTERS = ((0xFF21, 0xFF3A), (0xFF41, 0xFF5A))
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


def words_of(source: str) -> set[str]:
    """Return the words that a Python module's behaviour may depend on: those in its strings and its longer names."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return {word.lower() for word in _WORD.findall(source)}
    texts: set[str] = set()
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    # This takes half the time of `ast.walk` with type checks. That matters: large products have millions of nodes.
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str | bytes):
                texts.add(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
            continue
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                documented = field == "body" and isinstance(node, _DOCUMENTED) and value and _is_constant(value[0])
                pending += [one for one in value[1 if documented else 0 :] if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST):
                pending.append(value)
            elif isinstance(value, str) and field in ("id", "attr", "name", "arg"):
                names.add(value)
    words = {word.lower() for text in texts for word in _WORD.findall(text)}
    return words | {word.lower() for name in names for word in _WORD.findall(name) if len(word) > 2}


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def name_of(function: ast.expr) -> str:
    """Return the bare name of a called function or method; empty if the expression has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def naming_constants(tree: ast.AST) -> set[int]:
    """Return the ids of constants that are names: of parametrised arguments, attributes or probes."""
    constant_ids: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if name in _NAMING_CALLS:
                constant_ids.update(id(inner) for argument in node.args[:1] for inner in ast.walk(argument))
            if name.startswith("_ng_") and node.args:
                constant_ids.add(id(node.args[0]))
    return constant_ids


def literals(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string, bytes and integer constants that are data, not names (of parametrised arguments, say)."""
    skipped = naming_constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in skipped:
            continue
        if isinstance(node.value, str | bytes) or (type(node.value) is int and abs(node.value) > 1):
            yield node


def random_name(rng: random.Random) -> str:
    """Return nine random letters, a name that nothing in the box has."""
    return "".join(rng.choice(_LETTERS) for _ in range(9))


def tokens_of(tree: ast.AST) -> set[str]:
    """Return the words (lower case) and numbers in the data of ``tree``, from texts only numbers of several digits."""
    tokens: set[str] = set()
    for node in literals(tree):
        tokens |= tokens_of_text(text_of(node), single_digits=type(node.value) is int)
    return tokens


def tokens_of_text(text: str, *, single_digits: bool = False) -> set[str]:
    """Return the words (lower case) and numbers of a text."""
    tokens: set[str] = set()
    for token in TOKEN.findall(text):
        if not token.isdigit():
            tokens.add(token.lower())
        elif token.isascii() and token[0] not in "0" and token != "1" and (len(token) > 1 or single_digits):
            tokens |= {token} if len(token) <= MAX_DIGITS else set()
    return tokens


def other_words(
    rng: random.Random, words: Sequence[str], taken: Collection[str], length_of: Callable[[str], int]
) -> dict[str, str]:
    """Return another word for each of ``words`` (lower case). The order of the first letters is kept."""
    firsts = sorted({word[0] for word in words if word[0] in _LETTERS})
    starts = dict(zip(firsts, sorted(rng.sample(_LETTERS, len(firsts))), strict=True))
    used = set(taken)
    replacements: dict[str, str] = {}
    for word in words:
        for _ in range(20):
            length = length_of(word)
            pattern = (word * (length // len(word) + 1))[:length]
            candidate = starts.get(word[0], _letter(word[0], rng)) + "".join(_letter(one, rng) for one in pattern[1:])
            if candidate not in used and candidate not in PYTHON_WORDS:
                used.add(candidate)
                replacements[word] = candidate
                break
    return replacements


class Labels:
    """One consistent replacement of tokens, drawn from ``rng``.

    Args:
        tokens: the tokens in the tests' data.
        vocabulary: words (lower case) that the product knows; they are not replaced.
        pinned: tokens without which gold does not pass; they are not replaced.
    """

    def __init__(
        self, rng: random.Random, tokens: Iterable[str], vocabulary: Collection[str], pinned: Collection[str] = ()
    ) -> None:
        free = sorted(set(tokens) - set(pinned) - set(vocabulary) - PYTHON_WORDS)
        self.map: dict[str, str] = {}
        numbers = [token for token in free if token.isdigit()]
        for length in sorted({len(token) for token in numbers}):
            # Keep the order of the numbers, because most computations depend on it.
            group = sorted(token for token in numbers if len(token) == length)
            low, high = (2, 9) if length == 1 else (10 ** (length - 1), 10**length - 1)
            new_numbers = sorted(rng.sample(range(low, min(high, low + 10**6) + 1), len(group)))
            self.map.update(zip(group, map(str, new_numbers), strict=True))
        words = [token for token in free if not token.isdigit()]
        self.map.update(other_words(rng, words, {*tokens, *vocabulary}, len))

    def apply(self, tree: ast.AST) -> None:
        """Replace the tokens in the data of ``tree``."""
        for node in literals(tree):
            if isinstance(node.value, str):
                node.value = self.text(node.value)
            elif isinstance(node.value, bytes):
                node.value = self.text(node.value.decode("latin-1")).encode("latin-1", "replace")
            elif isinstance(node.value, int):
                new = self.map.get(str(abs(node.value)))
                if new is not None:
                    node.value = int(new) if node.value > 0 else -int(new)

    def text(self, text: str) -> str:
        return TOKEN.sub(lambda match: self._replaced(match[0]), text)

    def _replaced(self, token: str) -> str:
        replacement = self.map.get(token.lower())
        if replacement is None or len(replacement) != len(token) or (token.isdigit() and len(token) == 1):
            return token
        return "".join(a.upper() if b.isupper() else a for a, b in zip(replacement, token, strict=True))


def text_of(node: ast.Constant) -> str:
    """Return the data of a literal as text; of a number without its sign."""
    if isinstance(node.value, bytes):
        return node.value.decode("latin-1")
    return str(abs(node.value)) if isinstance(node.value, int) else str(node.value)


def _letter(letter: str, rng: random.Random) -> str:
    if letter in _VOWELS:
        return rng.choice(_VOWELS)
    if "a" <= letter <= "z":
        return rng.choice(_CONSONANTS)
    point = ord(letter)
    for low, high in (*_RANGES, *_WIDE_LETTERS):
        if low <= point <= high:
            return chr(rng.randint(low, high))
    return letter


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
