"""The formats in which policies write tool calls, and one table of them.

Most are of two kinds: JSON in a frame of markup (`FramedJson`), and arguments one by one between tags (`TaggedCalls`).
Llama's and Mistral's have rules of their own; Harmony is a format of whole answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_gym.gateway.parsing.answers import CallFormat, ParsedAnswer, ParsedCall, Segment, Tool
from nemo_gym.gateway.parsing.json_text import (
    ParameterSchemas,
    is_object,
    members_at,
    skip_space,
    string_at,
    typed_json,
    value_end,
)

NAME = r"[^\s<>{}\[\]\"`|｜:]{1,256}"
"""Pattern of a tool's name in markup. Its length is bounded, so that a search never runs on."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class FramedJson:
    """Calls of the form ``opening {json} closing``.

    The JSON is the arguments where ``opening`` has a group ``name``, else an object with the name and the arguments.
    A frame whose inside is anything else is text. The end of the answer closes a frame too: engines leave the closing
    markup out where it is what they stop at.
    """

    def __init__(self, opening: str, closing: str) -> None:
        """Patterns."""
        self._opening = re.compile(opening)
        self._closing = re.compile(closing)
        self._named = "name" in self._opening.groupindex

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


# Calls whose arguments the policy writes one by one between tags, as text that the tool's schema gives a type.


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
            segments += [
                text[taken : tag.start],
                ParsedCall(tag.label, _typed_arguments(walked, schemas.of(tag.label))),
            ]
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


def _typed_arguments(walked: Sequence[tuple[str, str]], schemas: Mapping[str, Mapping[str, object]]) -> str:
    values = {name: typed_json(value, schemas.get(name)) for name, value in walked}
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items()) + "}"


# Harmony, the format of gpt-oss: every part of an answer is a message on a channel, calls have a recipient.
#
#     <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>
#
# The keeper's own package parses tokens of a vocabulary that it downloads; the text says the same, offline.

_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,32})")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<>]{1,256})")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s{0,8}(?:to=[^\s<>]{1,256})?")
_MESSAGE = "<|message|>"


class Harmony:
    """``analysis`` is reasoning, what has a recipient and JSON arguments is a call, the rest is content."""

    name = "harmony"

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        at, found = 0, False
        while (opened := text.find(_MESSAGE, at)) >= 0:
            found = True
            header = text[at:opened]
            if (stray := _HEADER.sub("", header.partition("<|channel|>")[0])).strip():
                content.append(stray)
            ended = _ENDS.search(text, opened + len(_MESSAGE))
            body = text[opened + len(_MESSAGE) : ended.start() if ended else len(text)]
            at = len(text) if ended is None else ended.end()
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if recipient is not None and parse_calls and is_object(body):
                calls.append(ParsedCall(recipient[1], body.strip()))
            elif recipient is None and channel is not None and channel[1] == "analysis":
                reasoning.append(body.strip())
            else:
                content.append(body if recipient is None else f"{header}{_MESSAGE}{body}")
        if not found:
            return ParsedAnswer(text)
        if (rest := _HEADER.sub("", text[at:])).strip():
            content.append(rest)
        said = "\n".join(part for part in content if part) or None
        return ParsedAnswer(said, "\n".join(filter(None, reasoning)) or None, tuple(calls))


# ``{"name": …, "parameters": {…}}`` as the answer itself, or after ``<|python_tag|>``: Llama 3.1 to 3.3.

_PYTHON_TAG = "<|python_tag|>"
_KEYS = frozenset(["name", "parameters", "arguments", "type", "id"])


class LlamaJson:
    """Nothing but its place marks a call: at the start of the answer or after the token, and after another call with
    or without a semicolon. JSON with any other key is an answer, not a call."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        taken = start = at = 0  # up to where text is in segments; where a call's markup, and its JSON, would start
        while True:
            found = call_at(text, skip_space(text, at), _KEYS)
            if found is not None:
                segments += [text[taken:start], found[0]]
                taken = start = at = found[1]
                after = skip_space(text, at)
                if text[after : after + 1] == ";":
                    at = after + 1
                continue
            start = text.find(_PYTHON_TAG, at)
            if start < 0:
                return [*segments, text[taken:]]
            at = start + len(_PYTHON_TAG)


# ``[TOOL_CALLS]`` with a list of calls, or with a name and arguments: Mistral's older and newer tokenizers.

_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(
    rf"\s{{0,16}}(?P<name>{NAME})\s{{0,16}}(?:\[CALL_ID\][a-zA-Z0-9]{{1,64}}\s{{0,16}})?(?:\[ARGS\]\s{{0,16}})?(?={{)"
)


class Mistral:
    """Newer tokenizers repeat the token before each call. A list is taken whole or not at all."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        taken = at = 0
        while (opened := text.find(_TOOL_CALLS, at)) >= 0:
            at = opened + len(_TOOL_CALLS)
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


CALL_FORMATS: dict[str, CallFormat] = {
    # Hermes, Qwen 2.5 and 3, and many tuned after them: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": FramedJson(r"<tool_call>", r"\s*+(?:</tool_call>|\Z)"),
    # Qwen3-Coder: <function=name><parameter=key>value</parameter></function>, usually inside <tool_call>.
    "qwen3_coder": TaggedCalls(
        opening=r"(?:<tool_call>\s{0,16})?<function=([^<>\n]{1,256})>",
        parameter=r"<parameter=([^<>\n]{1,256})>",
        parameter_end=r"</parameter>",
        closing=r"</function>(?:\s{0,16}</tool_call>)?",
        value_newlines=True,
    ),
    # GLM 4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
    "glm45": TaggedCalls(
        opening=r"<tool_call>\s{0,16}([^\s<>{}\"]{1,256})",
        parameter=r"<arg_key>([^<>\n]{1,256})</arg_key>\s{0,16}<arg_value>",
        parameter_end=r"</arg_value>",
        closing=r"</tool_call>",
    ),
    # DeepSeek V3 and R1 write "function⟨sep⟩name", a line break and a fenced block of JSON; V3.1 writes "name⟨sep⟩"
    # and the arguments. Tokens around a run of calls go with them.
    "deepseek": FramedJson(
        r"(?:<｜tool▁calls▁begin｜>\s{0,16})?<｜tool▁call▁begin｜>"
        rf"(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>|\s{{0,16}}```json\b)",
        r"\s*+(?:```\s{0,16})?(?:<｜tool▁call▁end｜>(?:\s{0,16}<｜tool▁calls▁end｜>)?|<｜tool▁calls▁end｜>|\Z)",
    ),
    # Kimi K2: functions.name:0 and JSON arguments between tokens.
    "kimi_k2": FramedJson(
        r"(?:<\|tool_calls_section_begin\|>\s{0,16})?<\|tool_call_begin\|>\s{0,16}"
        rf"(?:functions\.)?(?P<name>{NAME})(?::[0-9]{{1,9}})?\s{{0,16}}<\|tool_call_argument_begin\|>",
        r"\s*+(?:<\|tool_call_end\|>(?:\s{0,16}<\|tool_calls_section_end\|>)?|\Z)",
    ),
    # MiniMax M2: <invoke name="f"><parameter name="key">value</parameter></invoke> in <minimax:tool_call>.
    "minimax_m2": TaggedCalls(
        opening=r"(?:<minimax:tool_call>\s{0,16})?<invoke name=\"([^<>\"\n]{1,256})\">",
        parameter=r"<parameter name=\"([^<>\"\n]{1,256})\">",
        parameter_end=r"</parameter>",
        closing=r"</invoke>(?:\s{0,16}</minimax:tool_call>)?",
    ),
    "mistral": Mistral(),
    "llama_json": LlamaJson(),
}
"""At most one reads what a given chat template writes; `auto` takes it. Formats without state are shared."""
