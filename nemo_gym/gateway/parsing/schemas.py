"""The type of a value that a policy wrote as bare text, by the schema of the tool it is for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_gym.gateway.parsing.answers import Tool
from nemo_gym.gateway.parsing.json_text import value_end

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
