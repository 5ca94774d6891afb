"""Compares recorded values with the tests' expectations, outside the box."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from resources_servers.swe_bench.confirm.assertions import Side

Value = list[Any]
"""One recorded value: a kind, then its contents."""

Record = tuple[str, list[Value]]
"""A site and the values recorded there."""

_UNKNOWN = object()
_ON_PLAIN_VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "in": lambda a, b: a in b,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "startswith": lambda a, b: a.startswith(b),
    "endswith": lambda a, b: a.endswith(b),
}
_PLAIN_KINDS = {"none": 0, "cut": 0, "int": 1, "float": 1, "complex": 2, "str": 1, "bytes": 1, "number": 1, "text": 2}
MAX_PATTERN_TEXT = 100_000
_TINY = 1e-9
"""The tolerance for floating-point errors of computing in another order."""


@dataclass(frozen=True)
class Check:
    """The condition for one record.

    Attributes:
        site: the site's name in the rendering.
        op: as in `Probe`; ``begin`` starts a test.
        kept: the side that the rendering records.
        expected: gold's value of the side that is left out.
        answer: gold's value of the recorded side.
        said: whether objects without a plain value are compared by their text (``str``).
    """

    site: str
    op: str
    kept: Side = "left"
    expected: Value | None = None
    answer: Value | None = None
    extra: float | None = None
    pattern: Value | None = None
    said: bool = False

    def holds(self, recorded: list[Value]) -> bool:
        """Whether the recorded values satisfy the check. A value that cannot be compared does not."""
        try:
            return self._holds(recorded)
        except (ArithmeticError, RecursionError, TypeError, ValueError):
            # The code under test may write records itself, with invalid numbers or decimals that cannot be compared.
            return False

    def _holds(self, recorded: list[Value]) -> bool:
        if self.op == "begin":
            return not recorded
        if not recorded:
            return False
        actual = recorded[0]
        if self.op in ("truth", "false"):
            return len(recorded) == 2 and recorded[1] == ["truth", self.op == "truth"] and self._like_answer(actual)
        if self.op.startswith("raises"):
            return self._raised(actual)
        if self.op == "like":
            return self._like_answer(actual)
        if self.expected is None:
            return True
        if self.op not in ("==", "is") and self.answer is not None:
            plain = _as_plain_as(self.answer, actual)
            if plain is None:
                return False
            actual = plain
        return _compare(self.op, actual, self.expected, self.kept, self.extra, said=self.said)

    def _like_answer(self, actual: Value) -> bool:
        if self.op == "like" and self.answer is not None:
            # This compares with gold's answer, not the test's expectation, so another order of summing is allowed.
            if equal(actual, self.answer, said=self.said):
                return True
            plain = _plain(actual) is not _UNKNOWN and _plain(self.answer) is not _UNKNOWN
            return plain and _close(actual, self.answer, _TINY, _TINY)
        return True

    def _raised(self, actual: Value) -> bool:
        if actual[0] != "error":
            return False
        if self.expected is not None and not _is_instance(["type", actual[1], [], actual[3]], self.expected):
            return False
        if self.pattern is None or self.pattern[0] != "str":
            return True
        if actual[2] is None:
            # The error's message could not be read, so it does not match the pattern.
            return False
        if self.op == "raises in":
            return self.pattern[1] in actual[2]
        return _search(self.pattern[1], actual[2])


def equal(one: Value, other: Value, *, said: bool = False) -> bool:
    """Whether two recorded values are equal by the rules of Python's plain values. Without ``said``, two objects
    without a plain value are always equal."""
    if "object" in (one[0], other[0]) and "as" in (one[0], other[0]):
        # The code's own class may derive from a plain type in one solution and not in another.
        return not said or one[2] == other[2]
    one, other = _bare(one), _bare(other)
    a, b = one[0], other[0]
    numbers = ("int", "float", "bool", "number", "complex")
    if a in ("object", "error", "cut") or b in ("object", "error", "cut"):
        return _equal_objects(one, other, said=said)
    if a in numbers and b in numbers:
        return _equal_numbers(one, other)
    if a == "array" or b == "array":
        return equal(one[1] if a == "array" else one, other[1] if b == "array" else other, said=said)
    if a != b:
        return False
    if a in ("list", "tuple", "range", "slice"):
        return len(one[1]) == len(other[1]) and all(
            equal(x, y, said=said) for x, y in zip(one[1], other[1], strict=True)
        )
    if a == "set":
        return _same_members(one[1], other[1], functools.partial(equal, said=said))
    if a == "dict":
        return _same_members(one[1], other[1], lambda x, y: equal(x[0], y[0]) and equal(x[1], y[1]))
    if a == "type":
        return bool(one[1][:1] == other[1][:1])
    return bool(one[1:] == other[1:])


def same_form(one: Value, other: Value) -> bool:
    """Whether two values differ in numbers only, and whole numbers stay whole. A test that expects a whole number does
    not define how a fraction is treated."""
    one, other = _bare(one), _bare(other)
    numbers = ("int", "float")
    if one[0] in numbers and other[0] in numbers:
        return _is_whole(one) is _is_whole(other)
    if one[0] != other[0]:
        return False
    if one[0] in ("list", "tuple"):
        return len(one[1]) == len(other[1]) and all(same_form(x, y) for x, y in zip(one[1], other[1], strict=True))
    return one[0] not in ("dict", "object", "error", "cut", "str", "bytes") or equal(one, other)


def _bare(value: Value) -> Value:
    """Return the plain value of an object whose class derives from a plain type; any other value unchanged."""
    return value[1] if value[0] == "as" else value


def _is_whole(value: Value) -> bool:
    return value[0] == "int" or float.fromhex(value[1]).is_integer()


def _equal_objects(one: Value, other: Value, *, said: bool) -> bool:
    """Compare values of which at least one is an object. Two objects are compared by their texts if ``said``, else
    they are equal. An object and a plain text or number are equal if the object's text is that of the other."""
    if "cut" in (one[0], other[0]):
        # A value that is too large to record equals only another one.
        return bool(one[0] == other[0])
    if one[0] in ("object", "error") and other[0] in ("object", "error"):
        return not said or one[2] == other[2]
    object_value, plain = (one, other) if one[0] in ("object", "error") else (other, one)
    return plain[0] in ("str", "number", "int", "text") and object_value[2] == str(plain[-1])


def _as_plain_as(answer: Value, actual: Value) -> Value | None:
    """Return ``actual`` in a form that can be compared if gold's answer can be, or ``None`` if there is no such form.
    An object in place of a text is represented by its own text."""
    if _plain(answer) is _UNKNOWN or _plain(actual) is not _UNKNOWN:
        return actual
    says_text = actual[0] in ("object", "error") and actual[2] is not None and answer[0] in ("str", "text")
    return ["str", actual[2]] if says_text else None


def _equal_numbers(one: Value, other: Value) -> bool:
    x, y = _number(one), _number(other)
    if isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y):
        return True
    return bool(x == y)


def _number(value: Value) -> Any:
    kind = value[0]
    if kind == "bool":
        return bool(value[1])
    if kind == "int":
        return int(value[1])
    if kind == "float":
        return float.fromhex(value[1])
    if kind == "complex":
        return complex(float.fromhex(value[1]), float.fromhex(value[2]))
    try:
        return Fraction(value[1])
    except (ValueError, ZeroDivisionError):
        return str(value[1])


def _same_members(one: list[Any], other: list[Any], alike: Callable[[Any, Any], bool]) -> bool:
    if len(one) != len(other):
        return False
    left = list(other)
    for member in one:
        found = next((number for number, it in enumerate(left) if alike(member, it)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _compare(op: str, actual: Value, expected: Value, kept: Side, extra: float | None, *, said: bool) -> bool:
    if op in ("==", "is"):
        return equal(actual, expected, said=said)
    actual, expected = _bare(actual), _bare(expected)
    left, right = (actual, expected) if kept == "left" else (expected, actual)
    if op in ("!=", "is not"):
        return _plain(actual) is _UNKNOWN or _plain(expected) is _UNKNOWN or not equal(actual, expected)
    if op == "has":
        return _has(left, right)
    if op == "count":
        kinds = ("list", "tuple", "set")
        if left[0] not in kinds or right[0] not in kinds:
            return True
        return _same_members(left[1], right[1], functools.partial(equal, said=said))
    if op == "isinstance":
        return _is_instance(actual, expected)
    if op == "not isinstance":
        return not _is_instance(actual, expected)
    if op == "almost":
        return _close(left, right, _TINY, extra if extra is not None else 5e-8)
    if op == "close":
        return _close(left, right, extra if extra is not None else 1e-6, _TINY)
    if op in ("matches", "not matches"):
        if actual[0] not in ("str", "bytes") or expected[0] != "str":
            return True
        return _search(expected[1], actual[1]) == (op == "matches")
    return _on_plain_values(op, left, right)


def _has(whole: Value, part: Value) -> bool:
    """Whether ``whole`` contains everything in ``part``: every key of a mapping, every member of a list."""
    whole, part = _bare(whole), _bare(part)
    if part[0] == "dict" and whole[0] == "dict":
        return all(any(equal(key, one) and _has(item, value) for one, item in whole[1]) for key, value in part[1])
    if part[0] == "list" and whole[0] == "list":
        return len(part[1]) == len(whole[1]) and all(map(_has, whole[1], part[1]))
    return equal(whole, part)


def _on_plain_values(op: str, left: Value, right: Value) -> bool:
    a, b = _plain(left), _plain(right)
    if a is _UNKNOWN or b is _UNKNOWN:
        return True
    try:
        return bool(_ON_PLAIN_VALUES[op.removeprefix("not ")](a, b)) is not op.startswith("not ")
    except (TypeError, AttributeError):
        return False


def _plain(value: Value) -> Any:
    """Return the Python value of a recorded value, or ``_UNKNOWN`` if a part of it has none."""
    value = _bare(value)
    kind = value[0]
    if kind == "none":
        return None
    if kind in ("int", "float", "bool", "number", "complex"):
        return _number(value)
    if kind in ("str", "text"):
        return value[-1]
    if kind == "bytes":
        return bytes.fromhex(value[1])
    if kind == "array":
        return _plain(value[1])
    if kind in ("list", "tuple", "set"):
        members = [_plain(one) for one in value[1]]
        if any(part is _UNKNOWN for part in members):
            return _UNKNOWN
        return tuple(members) if kind == "tuple" else members
    if kind == "dict":
        pairs = [(_plain(key), _plain(item)) for key, item in value[1]]
        if any(key is _UNKNOWN for key, _ in pairs):
            return _UNKNOWN
        try:
            return dict(pairs)
        except TypeError:
            return [key for key, _ in pairs]
    return _UNKNOWN


def _close(one: Value, other: Value, relative: float, absolute: float) -> bool:
    if one[0] == "array" or other[0] == "array":
        one, other = (value[1] if value[0] == "array" else value for value in (one, other))
        return _close(one, other, relative, absolute)
    a, b = _plain(one), _plain(other)
    if a is _UNKNOWN or b is _UNKNOWN:
        return True
    return _all_close(a, b, relative, absolute)


def _all_close(a: Any, b: Any, relative: float, absolute: float) -> bool:
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_all_close(x, y, relative, absolute) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_all_close(a[key], b[key], relative, absolute) for key in a)
    try:
        x, y = float(a), float(b)
    except (TypeError, ValueError):
        return bool(a == b)
    return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=relative, abs_tol=absolute)


def _is_instance(actual: Value, expected: Value) -> bool:
    if expected[0] in ("tuple", "list"):
        return any(_is_instance(actual, one) for one in expected[1])
    if expected[0] != "type" or actual[0] != "type":
        return True
    if expected[2]:
        # The test file has names for the expected class. Compare these, because another class may have the same name.
        return not set(expected[2]).isdisjoint(actual[3])
    return expected[1][0] in actual[1]


def _search(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text[:MAX_PATTERN_TEXT]) is not None
    except re.error:
        return True


def carries(value: Value | None) -> bool:
    """Whether a value can be compared at all."""
    if value is None or value[0] in ("object", "error", "cut"):
        return False
    value = _bare(value)
    if value[0] in ("list", "tuple", "set"):
        return not value[1] or any(carries(one) for one in value[1])
    return True


def is_value(value: object) -> bool:
    """Whether a value has the form in which the recorder writes values."""
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        return False
    kind, rest = value[0], value[1:]
    if kind in ("list", "tuple", "set", "range", "slice"):
        return len(rest) == 1 and isinstance(rest[0], list) and all(map(is_value, rest[0]))
    if kind == "dict":
        return (
            len(rest) == 1
            and isinstance(rest[0], list)
            and all(isinstance(pair, list) and len(pair) == 2 and all(map(is_value, pair)) for pair in rest[0])
        )
    if kind == "array":
        return len(rest) == 1 and is_value(rest[0])
    if kind == "as":
        return (
            len(rest) == 2
            and is_value(rest[0])
            and rest[0][0] != "as"
            and (rest[1] is None or isinstance(rest[1], str))
        )
    if kind in ("object", "error"):
        named = kind == "object" or (len(rest) == 3 and _is_names(rest.pop()))
        return named and len(rest) == 2 and _is_names(rest[0]) and (rest[1] is None or isinstance(rest[1], str))
    if kind == "type":
        return len(rest) == 3 and all(map(_is_names, rest)) and bool(rest[0])
    if kind in ("bool", "truth"):
        return len(rest) == 1 and isinstance(rest[0], bool | str)
    return all(isinstance(one, str) for one in rest) and len(rest) == _PLAIN_KINDS.get(kind, -1)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
