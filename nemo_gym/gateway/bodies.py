"""Request bodies parsed at the cost of what is new in them.

A harness sends its whole history with every request, and what it sent before it mostly sends again byte for byte. A
session's latest bodies are kept as they came. Of a new one that begins with the same bytes, up to the end of some
element of its history, only what follows is parsed; the elements before are the same Python objects as last time, so
that whoever compares histories sees at once how far they are the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.gateway.tokens.history import Prefix

_HISTORIES = ("messages", "input")
_VIEWS = 4
"""Bodies remembered: the main conversation's and those of sub-agents that run at the same time."""
_REWRITTEN = 4
"""Elements. A harness may change the end of its history without starting another conversation."""
_KEPT_BYTES = 256 << 10
"""All remembered bodies together, where the latest is not larger by itself."""
_SCANNED_MARKS = 20_000
"""Strings, brackets and commas looked at in one body, a few milliseconds. One that brings more is not remembered."""
_SCANNED_BYTES = 4 << 20
"""Of them, for the sake of strings that are long or full of escapes."""
_REMEMBERED_BYTES = 8 << 20
"""Of a body that no remembered one begins like. Parsing one with large images takes less than finding its way round in
it."""
_CANDIDATES = 4
_BLANKS = b" \t\n\r"
# The last group is empty where a string does not end. Without it the search would go on within the string, and again.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[\[\]{},]', re.DOTALL)
_STARTS = {key: re.compile(rb'"%b"[ \t\n\r]*+:[ \t\n\r]*+\[' % key.encode()) for key in _HISTORIES}
_BRACKET = ord("]")
_QUOTE, _OPEN, _CLOSE = ord('"'), frozenset(b"[{"), frozenset(b"]}")


@dataclass(slots=True)
class _View:
    raw: bytes
    key: str
    before: dict[str, Any]
    """The object's keys up to the history's own, whose value is not in it."""
    elements: Prefix[Any]
    ends: Prefix[int]
    """Of the first elements, in bytes of ``raw``: where the comma or the bracket behind each is. Those of the others
    are looked for where a request is not the longer history that it mostly is."""
    close: int
    """Where the history's bracket is: the end of the last element."""
    rest: bytes
    """What follows the bracket."""
    after: dict[str, Any]

    def shared(self, raw: bytes) -> int:
        """How many first elements end where ``raw`` has had the same bytes so far."""
        with memoryview(self.raw) as mine:
            if raw.startswith(mine[: self.close]):
                return len(self.elements)
            if not self._find_ends():
                return 0
            ends = self.ends
            low, high, same = 0, len(ends) - 1, 0
            while low < high:
                middle = (low + high) // 2
                if raw.startswith(mine[same : ends[middle]], same):
                    low, same = middle + 1, ends[middle]
                else:
                    high = middle
        return low

    def end_of(self, shared: int) -> int:
        """Where element ``shared``, counted from 1, ends."""
        return self.close if shared == len(self.elements) else self.ends[shared - 1]

    def _find_ends(self) -> bool:
        """Whether every element's end is known."""
        missing = len(self.elements) - len(self.ends)
        if not missing:
            return True
        scanned = _scanned(self.raw, self.ends[-1] + 1)
        if scanned is None or len(scanned) != missing + 1:
            return False
        self.ends = self.ends.grown(len(self.ends), scanned[:-1])
        return True


class BodyMemo:
    """The memory of one session. What it hands out is shared between requests, but for the object itself and the list
    of its history; nobody may change it."""

    def __init__(self) -> None:
        self._views: list[_View] = []

    def loads(self, raw: bytes) -> Any:
        """What ``orjson.loads`` returns, or raises."""
        known, shared = self._nearest(raw)
        view = _grown(known, shared, raw) if known is not None else None
        if view is None:
            value = orjson.loads(raw)
            if (view := _first(raw, value)) is not None:
                self._remember(view, None)
            return value
        assert known is not None
        self._remember(view, known if shared >= len(known.elements) - _REWRITTEN else None)
        return {**view.before, view.key: view.elements[:], **view.after}

    def _nearest(self, raw: bytes) -> tuple[_View, int] | tuple[None, int]:
        nearest: _View | None = None
        most = 0
        for view in self._views:
            shared = view.shared(raw)
            if shared > most:
                nearest, most = view, shared
                if shared == len(view.elements):
                    break
        return (nearest, most) if nearest is not None else (None, 0)

    def _remember(self, view: _View, instead_of: _View | None) -> None:
        views = [view, *(other for other in self._views if other is not instead_of)][:_VIEWS]
        size = len(view.raw)
        while len(views) > 1 and sum(len(other.raw) for other in views) > max(size, _KEPT_BYTES):
            views.pop()
        self._views = views


def _first(raw: bytes, value: Any) -> _View | None:
    """``raw``, which holds ``value``, as it is remembered; nothing for what is no object with a history."""
    if not isinstance(value, dict) or len(raw) > _REMEMBERED_BYTES:
        return None
    for key in _HISTORIES:
        if not isinstance(value.get(key), list) or not value[key]:
            continue
        for _, start in zip(range(_CANDIDATES), _STARTS[key].finditer(raw), strict=False):
            try:
                # Only where a key of the outer object begins is this an object.
                before = orjson.loads(raw[: start.start()] + b'"%b":0}' % key.encode())
            except orjson.JSONDecodeError:
                continue
            if not (isinstance(before, dict) and (scanned := _scanned(raw, start.end()))):
                return None
            ends, close = scanned[:-1], scanned[-1]
            rest = raw[close + 1 :]
            after = _after(rest)
            # A later key of the same name is the one that counts.
            if after is None or key in after or len(ends) != len(value[key]):
                return None
            return _View(raw, key, before, Prefix(value[key]), Prefix(ends), close, rest, after)
    return None


def _grown(known: _View, shared: int, raw: bytes) -> _View | None:
    """``raw``, which begins like ``known`` up to the end of its element ``shared``; nothing for what has to be parsed
    as a whole, because it is something else than it seemed, or an error that has to be worded."""
    at = known.end_of(shared)
    sign = raw[at : at + 1]
    if sign == b"]":
        new: list[Any] = []
        close = at
    elif sign == b"," and (found := _between(raw, at + 1, known.rest)) is not None:
        new, close = found
    else:
        return None
    rest = raw[close + 1 :]
    after = known.after if rest == known.rest else _after(rest)
    if after is None:
        return None
    elements = known.elements.grown(shared, new)
    ends = known.ends.grown(min(shared, len(known.ends)), ())
    return _View(raw, known.key, known.before, elements, ends, close, rest, after)


def _between(raw: bytes, start: int, rest: bytes) -> tuple[list[Any], int] | None:
    """The elements of an array from ``start`` on, and where its bracket is: before ``rest``, if that is what ``raw``
    ends with. Nothing where they are none, or something else."""
    close = len(raw) - len(rest) - 1
    if not (close > start and raw[close] == _BRACKET and raw.endswith(rest)):
        if (scanned := _scanned(raw, start)) is None:
            return None
        close = scanned[-1]
    try:
        # As deep as in the whole body: there is a limit to that. And two arrays, if a bracket within closed the first.
        arrays = orjson.loads(b"[[%b]]" % raw[start:close])
    except orjson.JSONDecodeError:
        return None
    return (arrays[0], close) if len(arrays) == 1 and arrays[0] else None


def _scanned(raw: bytes, start: int) -> list[int] | None:
    """Where each element ends of an array whose first element begins at ``start``, and where the array does: the last
    is there twice. What it finds in something that is no JSON means nothing."""
    ends: list[int] = []
    depth = 0
    for number, mark in enumerate(_MARK.finditer(raw, start, start + _SCANNED_BYTES)):
        if number == _SCANNED_MARKS:
            return None
        at = mark.start()
        sign = raw[at]
        if sign == _QUOTE:
            if not mark[1]:
                return None
        elif sign in _OPEN:
            depth += 1
        elif sign in _CLOSE:
            if not depth:
                return [*ends, at, at]
            depth -= 1
        elif not depth:
            ends.append(at)
    return None


def _after(rest: bytes) -> dict[str, Any] | None:
    """The keys of an object behind one of its values; nothing where that is not how the object ends."""
    rest = rest.strip(_BLANKS)
    if rest == b"}":
        return {}
    if not rest.startswith(b","):
        return None
    try:
        after = orjson.loads(b"{" + rest[1:])
    except orjson.JSONDecodeError:
        return None
    return after or None  # nothing behind the comma would be an error
