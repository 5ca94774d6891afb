"""Where JSON ends in a text, and which part of it is which: policies' own JSON is passed on letter for letter.

The standard library's decoder tells where a value ends as well, but not where its members are, and each of its errors
costs a count of all lines before it. This one walks once, holds no stack frame per depth, and stops at the first
letter that JSON does not allow there.
"""

from __future__ import annotations

import re
from json.decoder import scanstring  # type: ignore[attr-defined]

_SPACE = re.compile(r"[ \t\n\r]*+")
# Groups are not possessive: before CPython 3.11.5 such groups match what they must not. Nothing here matches in two
# ways, so that giving up a repetition never finds another match.
_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*"')
_ATOM = re.compile(r"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)(?![\w.+-])")
_FLAT = re.compile(
    rf"\{{{_SPACE.pattern}(?:{_STRING.pattern}{_SPACE.pattern}:{_SPACE.pattern}(?:{_STRING.pattern}|{_ATOM.pattern})"
    rf"{_SPACE.pattern}(?:,{_SPACE.pattern}(?=\")|(?=\}})))*\}}"
)
"""An object of strings and atoms, which most arguments are."""


def skip_space(text: str, at: int) -> int:
    """The first place from ``at`` on that holds no JSON whitespace."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def string_at(text: str, at: int) -> tuple[str, int] | None:
    """The JSON string that starts at ``at``, decoded, and its end."""
    found = _STRING.match(text, at)
    if found is None:
        return None
    decoded, _ = scanstring(text, at + 1, True)
    return decoded, found.end()


def value_end(text: str, at: int) -> int | None:
    """The end of the JSON value that starts at ``at``; nothing when none does."""
    if (flat := _FLAT.match(text, at)) is not None:
        return flat.end()
    closers: list[str] = []
    key = False  # whether the next value is a member's key
    while True:
        at = skip_space(text, at)
        letter = text[at : at + 1]
        if key:
            found = _STRING.match(text, at)
            if found is None:
                return None
            at = skip_space(text, found.end())
            if text[at : at + 1] != ":":
                return None
            at, key = at + 1, False
            continue
        if letter in ("{", "["):
            closer = "}" if letter == "{" else "]"
            at = skip_space(text, at + 1)
            if text[at : at + 1] != closer:
                closers.append(closer)
                key = closer == "}"
                continue
            at += 1
        else:
            found = (_STRING if letter == '"' else _ATOM).match(text, at)
            if found is None:
                return None
            at = found.end()
        while closers:  # a value has ended: what holds it goes on, or ends too
            after = skip_space(text, at)
            letter = text[after : after + 1]
            if letter == ",":
                at, key = after + 1, closers[-1] == "}"
                break
            if letter != closers[-1]:
                return None
            closers.pop()
            at = after + 1
        else:
            return at


def members_at(text: str, at: int) -> tuple[dict[str, tuple[int, int]], int] | None:
    """The JSON object that starts at ``at``: key → where its value starts and ends (the last one of equal keys), and
    the object's own end."""
    if text[at : at + 1] != "{":
        return None
    members: dict[str, tuple[int, int]] = {}
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        key = string_at(text, at)
        if key is None:
            return None
        at = skip_space(text, key[1])
        if text[at : at + 1] != ":":
            return None
        start = skip_space(text, at + 1)
        end = value_end(text, start)
        if end is None:
            return None
        members[key[0]] = (start, end)
        at = skip_space(text, end)
        letter = text[at : at + 1]
        if letter == "}":
            return members, at + 1
        if letter != ",":
            return None
        at = skip_space(text, at + 1)


def is_object(text: str) -> bool:
    """Whether a text is one JSON object, with nothing but whitespace around it."""
    start = skip_space(text, 0)
    end = value_end(text, start) if text[start : start + 1] == "{" else None
    return end is not None and skip_space(text, end) == len(text)
