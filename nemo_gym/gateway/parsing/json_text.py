"""Where JSON ends in a text, and which part of it is which: policies' own JSON is passed on letter for letter.

The standard library's decoder tells where a value ends as well, but not where its members are, and each of its errors
costs a count of all lines before it. This one walks once, holds no stack frame per depth, and stops at the first
letter that JSON does not allow there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from nemo_gym.gateway.parsing.answers import Tool

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


# The type of a value that a policy wrote as bare text, by the schema of the tool it is for.

_MAX_REFERENCES = 16
_ALL = frozenset(["object", "array", "string", "number", "integer", "boolean", "null"])
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Chat templates print constants as Python does, so policies write them so."""


class ParameterSchemas:
    """The parameters of the tools of one answer. An answer can hold thousands of calls, and a request thousands of
    tools and parameters: each is looked at once."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        self._tools = tools or ()
        self._roots: dict[str, Mapping[str, Any]] | None = None
        self._resolved: dict[str, dict[str, Mapping[str, Any]]] = {}

    def of(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Parameter → its schema with references resolved, of the tool ``name``; empty for tools not offered."""
        found = self._resolved.get(name)
        if found is None:
            if self._roots is None:
                self._roots = dict(reversed([*self._with_properties()]))  # of several of one name the first counts
            root = self._roots.get(name, {})
            properties = root.get("properties", {})
            found = {str(key): _resolved(schema, root) for key, schema in properties.items()}
            self._resolved[name] = found
        return found

    def _with_properties(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for tool in self._tools:
            function = tool.get("function", tool)
            root = function.get("parameters") if isinstance(function, Mapping) else None
            if isinstance(root, Mapping) and isinstance(root.get("properties"), Mapping):
                yield str(function.get("name")), root


def typed_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """``text`` as JSON text of a type that ``schema`` allows, letter for letter where it is JSON itself.

    Text that fits no allowed type, and any for a parameter without a schema, becomes a string: the tool's own check
    answers it. Where a string is allowed, only objects, lists and ``null`` are anything else.
    """
    types = frozenset(["string"]) if schema is None else _types(schema, _MAX_REFERENCES)
    bare = text.strip()
    bare = _PYTHON_WORDS.get(bare, bare)
    if value_end(bare, 0) == len(bare) and (kind := _kind(bare)) in types:
        unsure = "string" in types and kind not in ("object", "array", "null") and types != _ALL
        if not unsure and kind != "string":
            return bare
    return json.dumps(text, ensure_ascii=False)


def _kind(value: str) -> str:
    """The schema type of valid JSON text; a whole number counts as an integer and is a number as well."""
    named = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0])
    return named or ("number" if any(letter in value for letter in ".eE") else "integer")


def _types(schema: Mapping[str, Any], depth: int) -> frozenset[str]:
    types: set[str] = set()
    given = schema.get("type")
    types.update([given] if isinstance(given, str) else given if isinstance(given, list) else ())
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(key) or () if depth > 0 else ():
            if isinstance(branch, Mapping):
                types |= _types(branch, depth - 1)
    if not types and (values := schema.get("enum") or ([schema["const"]] if "const" in schema else [])):
        types = {_kind(json.dumps(value, default=str)) for value in values}
    if "number" in types:
        types.add("integer")
    return frozenset(types) or _ALL


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its own reference, and those of its alternatives, followed inside the tool's parameters."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _pointed(reference, root)
    if not isinstance(schema, Mapping):
        return {}
    flat = dict(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := flat.get(key), list):
            flat[key] = [
                _pointed(branch["$ref"], root)
                if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str)
                else branch
                for branch in branches
            ]
    return flat


def _pointed(reference: str, root: Mapping[str, Any]) -> Any:
    here: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        here = here.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}
