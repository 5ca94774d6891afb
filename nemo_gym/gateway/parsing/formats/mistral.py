"""``[TOOL_CALLS]`` with a list of calls, or with a name and arguments: Mistral's older and newer tokenizers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemo_gym.gateway.parsing.answers import ParsedCall, Segment, Tool
from nemo_gym.gateway.parsing.json_calls import NAME, arguments_at, call_at
from nemo_gym.gateway.parsing.json_text import skip_space

_TOKEN = "[TOOL_CALLS]"
_NAMED = re.compile(
    rf"\s{{0,16}}(?P<name>{NAME})\s{{0,16}}(?:\[CALL_ID\][a-zA-Z0-9]{{1,64}}\s{{0,16}})?(?:\[ARGS\]\s{{0,16}})?(?={{)"
)


class Mistral:
    """Newer tokenizers repeat the token before each call. A list is taken whole or not at all."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        taken = at = 0
        while (opened := text.find(_TOKEN, at)) >= 0:
            at = opened + len(_TOKEN)
            found = _listed(text, skip_space(text, at)) or _named(text, at)
            if found is not None:
                calls, end = found
                segments += [text[taken:opened], *calls]
                taken = at = end
        return [*segments, text[taken:]]


def _listed(text: str, at: int) -> tuple[list[ParsedCall], int] | None:
    if text[at : at + 1] != "[":
        return None
    calls: list[ParsedCall] = []
    while True:
        found = call_at(text, skip_space(text, at + 1))
        if found is None:
            return None
        calls.append(found[0])
        at = skip_space(text, found[1])
        letter = text[at : at + 1]
        if letter == "]":
            return calls, at + 1
        if letter != ",":
            return None


def _named(text: str, at: int) -> tuple[list[ParsedCall], int] | None:
    head = _NAMED.match(text, at)
    if head is None or (arguments := arguments_at(text, head.end())) is None:
        return None
    return [ParsedCall(head["name"], arguments[0])], arguments[1]
