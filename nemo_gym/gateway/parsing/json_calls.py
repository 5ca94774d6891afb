"""Calls whose arguments the policy writes as JSON, in some frame of markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemo_gym.gateway.parsing.answers import ParsedCall, Segment, Tool
from nemo_gym.gateway.parsing.json_text import is_object, members_at, skip_space, string_at, value_end

NAME = r"[^\s<>{}\[\]\"`|｜:]{1,256}"
"""Pattern of a tool's name in markup. Its length is bounded, so that a search never runs on."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class FramedJson:
    """Calls of the form ``opening {json} closing``.

    The JSON is the arguments where ``opening`` has a group ``name``, else an object with the name and the arguments.
    A frame whose inside is anything else is text. The end of the answer closes a frame too: engines leave the closing
    markup out where it is what they stop at.
    """

    def __init__(self, opening: re.Pattern[str], closing: re.Pattern[str]) -> None:
        self._opening = opening
        self._closing = closing
        self._named = "name" in opening.groupindex

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        taken = at = 0
        while (opened := self._opening.search(text, at)) is not None:
            at = opened.end()
            start = skip_space(text, at)
            if self._named:
                found = arguments_at(text, start)
                call = None if found is None else (ParsedCall(opened["name"], found[0]), found[1])
            else:
                call = call_at(text, start)
            if call is None or (closed := self._closing.match(text, call[1])) is None:
                continue
            segments += [text[taken : opened.start()], call[0]]
            taken = at = closed.end()
        return [*segments, text[taken:]]


def call_at(text: str, at: int, known_keys: frozenset[str] | None = None) -> tuple[ParsedCall, int] | None:
    """The call written as ``{"name": …, "arguments": {…}}`` (or ``parameters``) at ``at``, and its end.

    ``known_keys``: no other keys may be in it, where nothing else tells a call from JSON that is an answer.
    """
    found = members_at(text, at)
    if found is None:
        return None
    members, end = found
    if "name" not in members or (known_keys is not None and not known_keys.issuperset(members)):
        return None
    name = string_at(text, members["name"][0])
    place = members.get("arguments", members.get("parameters"))
    arguments = "{}" if place is None else _arguments(text[slice(*place)])
    if name is None or not name[0].isprintable() or not name[0] or arguments is None:
        return None  # nobody can have been offered a tool of such a name; half a surrogate could not even be sent on
    return ParsedCall(name[0], arguments), end


def arguments_at(text: str, at: int) -> tuple[str, int] | None:
    """The arguments that stand at ``at``, as JSON text, and their end."""
    end = value_end(text, at)
    if end is None or (arguments := _arguments(text[at:end])) is None:
        return None
    return arguments, end


def _arguments(value: str) -> str | None:
    """Arguments are an object; ``null`` is an empty one, and some policies write the object's JSON in a string."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    decoded = string_at(value, 0)
    if decoded is None or not is_object(decoded[0]) or _SURROGATE.search(decoded[0]):
        return None
    return decoded[0]
