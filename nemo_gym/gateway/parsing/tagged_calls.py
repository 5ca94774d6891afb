"""Calls whose arguments the policy writes one by one between tags, as text that the tool's schema gives a type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_gym.gateway.parsing.answers import ParsedCall, Segment, Tool
from nemo_gym.gateway.parsing.schemas import ParameterSchemas, typed_json


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: str
    start: int
    end: int
    label: str


class TaggedCalls:
    """Calls of the form ``opening (parameter value end)* closing``.

    A value ends at the first ``parameter_end`` behind which the next parameter or the call's end follows, so that
    a value may hold tags of its own (policies edit files that do). Of parameters of the same name the last counts,
    as with JSON's keys. A call that is not complete is text.
    """

    def __init__(
        self, *, opening: str, parameter: str, parameter_end: str, closing: str, value_newlines: bool = False
    ) -> None:
        """Patterns; ``opening`` and ``parameter`` have one group, the name. ``value_newlines``: one line break on
        either side of a value belongs to the format."""
        self._tags = re.compile(
            f"(?P<opening>{opening})|(?P<parameter>{parameter})|(?P<end>{parameter_end})|(?P<closing>{closing})"
        )
        self._value_newlines = value_newlines

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        tags = [self._tag(found) for found in self._tags.finditer(text)]
        follows = [_only_space(text, one.end, after.start) for one, after in pairwise(tags)]
        follows.append(False)
        ends = _value_ends(tags, follows)
        schemas = ParameterSchemas(tools)
        dead: set[int] = set()  # parameters known to lead to no complete call, so that none is walked twice
        segments: list[Segment] = []
        taken = at = 0
        while at < len(tags):
            tag = tags[at]
            if tag.kind != "opening" or not follows[at]:
                at += 1
                continue
            walked: list[tuple[str, str]] = []
            visited: list[int] = []
            here = at + 1
            while tags[here].kind == "parameter" and here not in dead and (end := ends[here]) is not None:
                visited.append(here)
                walked.append((tags[here].label, self._value(text[tags[here].end : tags[end].start])))
                here = end + 1
            if tags[here].kind != "closing":
                dead.update(visited)
                at += 1
                continue
            segments += [text[taken : tag.start], ParsedCall(tag.label, _arguments(walked, schemas.of(tag.label)))]
            taken, at = tags[here].end, here + 1
        return [*segments, text[taken:]]

    @staticmethod
    def _tag(found: re.Match[str]) -> _Tag:
        kind = str(found.lastgroup)
        label = found[(found.lastindex or 0) + 1] if kind in ("opening", "parameter") else ""
        return _Tag(kind, found.start(), found.end(), label.strip())

    def _value(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._value_newlines else text


def _value_ends(tags: Sequence[_Tag], follows: Sequence[bool]) -> list[int | None]:
    """For each tag the first end of a value behind it."""
    ends: list[int | None] = [None] * len(tags)
    nearest: int | None = None
    for index in range(len(tags) - 1, -1, -1):
        ends[index] = nearest
        if tags[index].kind == "end" and follows[index] and tags[index + 1].kind in ("parameter", "closing"):
            nearest = index
    return ends


def _only_space(text: str, start: int, end: int) -> bool:
    return start == end or text[start:end].isspace()


def _arguments(walked: Sequence[tuple[str, str]], schemas: Mapping[str, Mapping[str, object]]) -> str:
    values = {name: typed_json(value, schemas.get(name)) for name, value in walked}
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items()) + "}"
