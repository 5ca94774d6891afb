"""Parsers of sampled answers into content, reasoning and tool calls, for each format in which policies write them.

Most formats are of two kinds: JSON in a frame of markup (`FramedJson`), and arguments one by one between tags
(`TaggedCalls`). Llama's and Mistral's have rules of their own; Harmony is a format of whole answers. The table
`CALL_FORMATS` lists the formats of calls.

JSON that a policy wrote is passed on unchanged, so a scanner finds where it ends in a text, and where its members are.
The standard library's decoder also returns the end of a value, but not the places of its members, and each of its
errors costs a count of all lines before it. This scanner reads the text once, needs no stack frame per nesting level,
and stops at the first character that JSON does not allow there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Protocol, TypeAlias, runtime_checkable

_SPACE = re.compile(r"[ \t\n\r]*+")
# Groups are not possessive: before CPython 3.11.5 possessive groups match wrongly. No pattern here can match in two
# ways, so backtracking never finds another match.
_STRING = re.compile(r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*"')
_ATOM = re.compile(r"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)(?![\w.+-])")
_FLAT = re.compile(
    rf"\{{{_SPACE.pattern}(?:{_STRING.pattern}{_SPACE.pattern}:{_SPACE.pattern}(?:{_STRING.pattern}|{_ATOM.pattern})"
    rf"{_SPACE.pattern}(?:,{_SPACE.pattern}(?=\")|(?=\}})))*\}}"
)
"""An object of strings and atoms, which most arguments are."""


def skip_space(text: str, at: int) -> int:
    """Return the first place from ``at`` on without JSON whitespace."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def string_at(text: str, at: int) -> tuple[str, int] | None:
    """Return the JSON string that starts at ``at``, decoded, and its end."""
    match = _STRING.match(text, at)
    if match is None:
        return None
    decoded, _ = scanstring(text, at + 1, True)
    return decoded, match.end()


def value_end(text: str, at: int) -> int | None:
    """Return the end of the JSON value that starts at ``at``; ``None`` if none does."""
    if (flat := _FLAT.match(text, at)) is not None:
        return flat.end()
    closers: list[str] = []
    key = False  # whether the next value is a member's key
    while True:
        at = skip_space(text, at)
        letter = text[at : at + 1]
        if key:
            match = _STRING.match(text, at)
            if match is None:
                return None
            at = skip_space(text, match.end())
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
            match = (_STRING if letter == '"' else _ATOM).match(text, at)
            if match is None:
                return None
            at = match.end()
        while closers:  # a value has ended: its container goes on, or ends too
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
    """Return the members of the JSON object that starts at ``at``, as key → start and end of its value (the last value
    if a key is repeated), and the object's end."""
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
    """Return whether a text is one JSON object, with only whitespace around it."""
    start = skip_space(text, 0)
    end = value_end(text, start) if text[start : start + 1] == "{" else None
    return end is not None and skip_space(text, end) == len(text)


# The type of a value that a policy wrote as bare text, by the schema of the called tool.

_MAX_REFERENCES = 16
_ALL = frozenset(["object", "array", "string", "number", "integer", "boolean", "null"])
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Chat templates print constants in Python's form, so policies write them in that form too."""


class ParameterSchemas:
    """The parameters of the tools of one answer. An answer can have thousands of calls, and a request thousands of
    tools and parameters, so each is resolved only once."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        self._tools = tools or ()
        self._resolved: dict[str, dict[str, Mapping[str, Any]]] = {}

    def of(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Return parameter → schema with references resolved, for the tool ``name``; empty for an unknown tool."""
        if name not in self._resolved:
            root = self._roots.get(name, {})
            properties = root.get("properties", {})
            self._resolved[name] = {str(key): _resolved(schema, root) for key, schema in properties.items()}
        return self._resolved[name]

    @cached_property
    def _roots(self) -> dict[str, Mapping[str, Any]]:
        roots: dict[str, Mapping[str, Any]] = {}
        for tool in reversed(self._tools):  # if a name is repeated, the first tool wins
            function = tool.get("function", tool)
            root = function.get("parameters") if isinstance(function, Mapping) else None
            if isinstance(root, Mapping) and isinstance(root.get("properties"), Mapping):
                roots[str(function.get("name"))] = root
        return roots


def offered_names(tools: Sequence[Tool] | None) -> frozenset[str]:
    functions = (tool.get("function", tool) for tool in tools or ())
    return frozenset(str(function.get("name")) for function in functions if isinstance(function, Mapping))


def typed_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """Return ``text`` as JSON text of a type that ``schema`` allows; text that is such JSON stays unchanged.

    Text that fits no allowed type becomes a string, for the tool's own check to refuse; so does all text for a
    parameter without a schema. If strings are allowed, only objects, lists and ``null`` are not taken as a string.
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
    """Return the schema type of valid JSON text. A whole number is an ``integer`` (`_types` adds it to ``number``)."""
    named = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0])
    return named or ("number" if any(letter in value for letter in ".eE") else "integer")


def _types(schema: Mapping[str, Any], depth: int) -> frozenset[str]:
    # The schemas that harnesses offer are unchecked, so an invalid keyword limits nothing.
    given = schema.get("type")
    types = {kind for kind in (given if isinstance(given, list) else [given]) if isinstance(kind, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if depth > 0 and isinstance(branches, list) else ():
            if isinstance(branch, Mapping):
                types |= _types(branch, depth - 1)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types = {_kind(json.dumps(value, default=str)) for value in values}
    if "number" in types:
        types.add("integer")
    return frozenset(types) or _ALL


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its own reference, and those of its alternatives, resolved in the tool's parameters."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = _resolve_pointer(reference, root)
    if not isinstance(schema, Mapping):
        return {}
    flat = dict(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := flat.get(key), list):
            flat[key] = [
                _resolve_pointer(branch["$ref"], root)
                if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str)
                else branch
                for branch in branches
            ]
    return flat


def _resolve_pointer(reference: str, root: Mapping[str, Any]) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


Tool: TypeAlias = Mapping[str, Any]
"""A function tool as in Chat Completions."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call. It may name a tool that was not offered: the harness's reply then tells the policy so."""

    name: str
    arguments: str
    """JSON text; the policy's own text if that is valid JSON."""
    call_id: str | None = field(default=None, compare=False)
    """The id that the policy wrote, for formats that have ids: its template writes it again with the result."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """One answer, parsed."""

    content: str | None
    """``None`` if the answer has only reasoning or calls."""
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()


Segment: TypeAlias = str | ParsedCall
"""A stretch of an answer: text, or a call."""


class AnswerParser(Protocol):
    """Parses whole answers. Created by `answer_parser`."""

    @property
    def name(self) -> str:
        """The names of its formats, for logs: ``hermes+think``."""
        ...

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        """Parse one answer. ``text``: the sampled text with special tokens, but without the token that ended it.
        ``prompt_tail``: the last ~256 characters of the prompt. If ``parse_calls`` is false, calls stay content.

        Never raises: text that is no call stays content.
        """
        ...


@runtime_checkable
class CallFormat(Protocol):
    """The format in which one family of policies writes tool calls."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        """Split an answer without its reasoning into text and calls, in order. Never raises, drops only the markup of
        calls, and takes time linear in the text."""
        ...


@runtime_checkable
class ReasoningFormat(Protocol):
    """The format in which one family of policies writes its reasoning before the answer."""

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        """Return ``(reasoning, rest)``. ``rest`` is the whole text if there is no reasoning, and ``None`` if the
        answer ended within its reasoning. Never raises."""
        ...


# Reasoning between tags. The opening tag may be in the prompt, sampled, or missing.


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Reasoning between ``opening`` and ``closing``, at the start of the answer.

    Reasoning is open from the start if the prompt ends with ``opening``. Then an answer without ``closing`` is all
    reasoning. A ``closing`` without an ``opening`` also ends reasoning (some policies' prompts omit the opening),
    unless the prompt has just closed it. Later tags belong to the content, and tags within a call to the call.
    Whitespace between tags, reasoning and content belongs to the format and is dropped.
    """

    opening: str
    closing: str

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        body = text.lstrip()
        opened = self.is_open(text, prompt_tail)
        if body.startswith(self.opening):
            body = body[len(self.opening) :]
        reasoning, closing, rest = body.partition(self.closing)
        if not opened and (not closing or self.opening in reasoning or prompt_tail.rstrip().endswith(self.closing)):
            return None, text
        thought = reasoning.strip() or None
        return (thought, rest.lstrip()) if closing else (thought, None)

    def is_open(self, text: str, prompt_tail: str) -> bool:
        """Return whether the end of the prompt or the start of ``text`` opens reasoning."""
        return prompt_tail.rstrip().endswith(self.opening) or text.lstrip().startswith(self.opening)


REASONING_FORMATS = {
    "think": TaggedReasoning("<think>", "</think>"),
    "bracket_think": TaggedReasoning("[THINK]", "[/THINK]"),
    "seed_think": TaggedReasoning("<seed:think>", "</seed:think>"),
}


# An answer parser composed of a format for reasoning and one for calls.


@dataclass(frozen=True, slots=True)
class ComposedParser:
    """Removes the reasoning first: a call within the reasoning is not a call. Policies leave the reasoning unclosed
    before a call at times, or close it after the call, so calls at the end of an answer that is all reasoning end it.
    """

    name: str
    reasoning: ReasoningFormat | None
    """``None`` for policies that write none: all text is content."""
    calls: CallFormat | None
    """``None`` for policies that call no tools."""

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        tags = self.reasoning
        reasoning, rest = (None, text) if tags is None else tags.split(text, prompt_tail)
        if self.calls is None or not parse_calls:
            return ParsedAnswer(None, reasoning) if rest is None else _answer(rest, reasoning)
        if rest is None or (reasoning is not None and not rest):
            segments = self.calls.split(reasoning or "", tools)
            calls = tuple(segment for segment in segments if isinstance(segment, ParsedCall))
            if not calls or any(isinstance(segment, str) and segment.strip() for segment in segments[1:]):
                return ParsedAnswer(None, reasoning)
            return ParsedAnswer(None, _content(segments), calls)
        if reasoning is not None and isinstance(tags, TaggedReasoning) and not tags.is_open(text, prompt_tail):
            segments = self.calls.split(text, tools)
            if not any(isinstance(segment, str) and tags.closing in segment for segment in segments):
                reasoning, rest = None, text  # the tag is within an argument: policies edit files that have it
        segments = self.calls.split(rest, tools)
        calls = tuple(segment for segment in segments if isinstance(segment, ParsedCall))
        if not calls:
            return _answer(rest, reasoning)
        return ParsedAnswer(_content(segments), reasoning, calls)


def _answer(content: str, reasoning: str | None) -> ParsedAnswer:
    return ParsedAnswer(None if reasoning is not None and not content else content, reasoning)


def _content(segments: Sequence[Segment]) -> str | None:
    """Return the text around calls. Whitespace next to a call belongs to the format and is dropped; texts between
    calls stay, each on a line of its own."""
    texts = []
    for index, segment in enumerate(segments):
        if isinstance(segment, str):
            text = segment if index == 0 else segment.lstrip()
            text = text if index == len(segments) - 1 else text.rstrip()
            if text.strip():
                texts.append(text)
    return "\n".join(texts) or None


NAME = r"[^\s<>{}\[\]\"`|｜:]{1,256}"
"""Pattern of a tool's name in markup. Its length is limited, so that a search never reads far."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class FramedJson:
    """Calls of the form ``opening {json} closing``.

    The JSON is the arguments if ``opening`` has a group ``name``, otherwise an object with the name and the arguments.
    A group ``id`` is the call's id.
    A frame with any other content is text. The end of the answer closes a frame too: engines omit the closing markup
    if it is the stop token.
    """

    def __init__(self, opening: str, closing: str) -> None:
        """Both are regular expressions."""
        self._opening = re.compile(opening)
        self._closing = re.compile(closing)
        self._named = "name" in self._opening.groupindex

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        consumed = at = 0
        while (opened := self._opening.search(text, at)) is not None:
            at = opened.end()
            start = skip_space(text, at)
            if self._named:
                found = arguments_at(text, start) or self._nothing_at(text, start)
                call_id = opened.groupdict().get("id")
                call = None if found is None else (ParsedCall(opened["name"], found[0], call_id), found[1])
            else:
                call = call_at(text, start)
            if call is None or (closed := self._closing.match(text, call[1])) is None:
                continue
            segments += [text[consumed : opened.start()], call[0]]
            consumed = at = closed.end()
        return [*segments, text[consumed:]]

    def _nothing_at(self, text: str, at: int) -> tuple[str, int] | None:
        """Return no arguments if the frame is closed at ``at``: policies so call tools that take none."""
        closed = self._closing.match(text, at)
        return ("{}", at) if closed is not None and closed[0].strip() else None


def call_at(text: str, at: int, offered: Container[str] | None = None) -> tuple[ParsedCall, int] | None:
    """Return the call written as ``{"name": …, "arguments": {…}}`` (or ``parameters``) at ``at``, and its end.

    ``offered``: the names of the offered tools, for formats in which no markup distinguishes a call from a JSON
    answer. There a call has no key that is not in ``_KEYS``, and only a call of an offered tool may have no arguments.
    """
    found = members_at(text, at)
    if found is None:
        return None
    members, end = found
    if "name" not in members or (offered is not None and not _KEYS.issuperset(members)):
        return None
    name = string_at(text, members["name"][0])
    place = members.get("arguments", members.get("parameters"))
    arguments = "{}" if place is None else _arguments(text[slice(*place)])
    if name is None or not name[0].isprintable() or not name[0] or arguments is None:
        return None  # no offered tool can have such a name; a lone surrogate could not even be sent
    if place is None and offered is not None and name[0] not in offered:
        return None  # {"name": "Bob"} answers a question
    call_id = string_at(text, members["id"][0]) if "id" in members else None
    return ParsedCall(name[0], arguments, call_id[0] if call_id and call_id[0].isprintable() else None), end


def arguments_at(text: str, at: int) -> tuple[str, int] | None:
    """Return the arguments at ``at`` as JSON text, and their end."""
    end = value_end(text, at)
    if end is None or (arguments := _arguments(text[at:end])) is None:
        return None
    return arguments, end


def _arguments(value: str) -> str | None:
    """Return arguments as a JSON object; ``null`` is an empty one, and some policies write the object in a string."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    decoded = string_at(value, 0)
    if decoded is None or not is_object(decoded[0]) or _SURROGATE.search(decoded[0]):
        return None
    return decoded[0]


# Calls whose arguments the policy writes one by one between tags, as text whose type follows from the tool's schema.

_NO_TAG = "end of the text"
"""The kind of the tag that stands behind all others."""


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: str
    start: int
    end: int
    label: str


class TaggedCalls:
    """Calls of the form ``opening (parameter value end)* closing``.

    A value ends at the first ``parameter_end`` that is followed by the next parameter or the end of the call, so that
    a value may contain tags itself (policies edit files that do). If a parameter is repeated, the last value wins, as
    in JSON. An incomplete call is text.

    Policies leave out a ``parameter_end`` at times. Such a value ends with its call if only the next call or nothing
    follows, and at a line that starts with another parameter of its tool. As calls and parameters count only those
    that were offered, so that a value keeps the tags of other tools.
    """

    def __init__(
        self, *, opening: str, parameter: str, parameter_end: str, closing: str, value_newlines: bool = False
    ) -> None:
        """All are regular expressions; ``opening`` and ``parameter`` have one group, the name. ``value_newlines``: one
        line break on either side of a value belongs to the format."""
        self._tags = re.compile(
            f"(?P<opening>{opening})|(?P<parameter>{parameter})|(?P<end>{parameter_end})|(?P<closing>{closing})"
        )
        self._value_newlines = value_newlines

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        tags = [*map(self._tag, self._tags.finditer(text)), _Tag(_NO_TAG, len(text), len(text), "")]
        follows = [not text[before.end : after.start].strip() for before, after in pairwise(tags)]
        follows.append(False)
        ends = _value_ends(tags, follows, offered_names(tools))
        schemas = ParameterSchemas(tools)
        dead: set[int] = set()  # parameters that lead to no complete call, so that none is tried twice
        segments: list[Segment] = []
        consumed = at = 0
        while at < len(tags):
            tag = tags[at]
            if tag.kind != "opening" or not follows[at]:
                at += 1
                continue
            schema = schemas.of(tag.label)
            values: dict[str, str] = {}
            visited: list[int] = []
            cursor = at + 1
            while tags[cursor].kind == "parameter" and cursor not in dead and (end := ends[cursor]) is not None:
                visited.append(cursor)
                given, after = tags[cursor], tags[cursor + 1]
                if (
                    after.kind == "parameter"
                    and after.label in schema
                    and after.label not in values
                    and after.label not in (given.label, tags[end + 1].label)
                    and text.endswith("\n", given.end, after.start)
                ):
                    end = cursor + 1
                has_end = tags[end].kind == "end"
                value = text[given.end : tags[end].start]
                if self._value_newlines:
                    value = value.removeprefix("\n")
                if self._value_newlines or not has_end:
                    value = value.removesuffix("\n")
                values[given.label] = value
                cursor = end + 1 if has_end else end
            if tags[cursor].kind != "closing":
                dead.update(visited)
                at += 1
                continue
            members = (
                f"{json.dumps(name, ensure_ascii=False)}: {typed_json(value, schema.get(name))}"
                for name, value in values.items()
            )
            segments += [text[consumed : tag.start], ParsedCall(tag.label, "{" + ", ".join(members) + "}")]
            consumed, at = tags[cursor].end, cursor + 1
        return [*segments, text[consumed:]]

    @staticmethod
    def _tag(match: re.Match[str]) -> _Tag:
        kind = str(match.lastgroup)
        label = match[(match.lastindex or 0) + 1] if kind in ("opening", "parameter") else ""
        return _Tag(kind, match.start(), match.end(), label.strip())


def _value_ends(tags: Sequence[_Tag], follows: Sequence[bool], offered: Container[str]) -> list[int | None]:
    """Return, for each tag, the index of the first tag after it at which a value ends: its own end tag, or the closing
    tag of a call whose last value has none."""
    ends: list[int | None] = [None] * len(tags)
    nearest: int | None = None
    for index in range(len(tags) - 1, -1, -1):
        ends[index] = nearest
        if not follows[index]:
            continue
        kind, after = tags[index].kind, tags[index + 1]
        own = kind == "end" and after.kind in ("parameter", "closing")
        next_call = after.kind == "opening" and after.label in offered
        if own or (kind == "closing" and (next_call or after.kind == _NO_TAG)):
            nearest = index
    return ends


# Harmony, the format of gpt-oss: every part of an answer is a message on a channel, calls have a recipient.
#
#     <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>
#
# OpenAI's own package parses tokens of a vocabulary that it downloads; parsing the text works offline.

_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,32})")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<>]{1,256})")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s{0,8}(?:to=[^\s<>]{1,256})?")
_MESSAGE = "<|message|>"


class Harmony:
    """``analysis`` is reasoning, a part with a recipient and JSON arguments is a call, every other part is content."""

    name = "harmony"

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        at, has_messages = 0, False
        while (opened := text.find(_MESSAGE, at)) >= 0:
            has_messages = True
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
        if not has_messages:
            return ParsedAnswer(text)
        if (rest := _HEADER.sub("", text[at:])).strip():
            content.append(rest)
        content_text = "\n".join(part for part in content if part) or None
        return ParsedAnswer(content_text, "\n".join(filter(None, reasoning)) or None, tuple(calls))


# ``{"name": …, "parameters": {…}}`` as the answer itself, or after ``<|python_tag|>``: Llama 3.1 to 3.3.

_PYTHON_TAG = "<|python_tag|>"
_KEYS = frozenset(["name", "parameters", "arguments", "type", "id"])


class LlamaJson:
    """Only its place marks a call: at the start of the answer, after the token, or after another call, with or without
    a semicolon. JSON with any key not in ``_KEYS``, or with only the name of no offered tool, is an answer."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        offered = offered_names(tools)
        segments: list[Segment] = []
        consumed = start = at = 0  # the end of the text in segments; where a call's markup, and its JSON, would start
        while True:
            call_and_end = call_at(text, skip_space(text, at), offered)
            if call_and_end is not None:
                segments += [text[consumed:start], call_and_end[0]]
                consumed = start = at = call_and_end[1]
                after = skip_space(text, at)
                if text[after : after + 1] == ";":
                    at = after + 1
                continue
            start = text.find(_PYTHON_TAG, at)
            if start < 0:
                return [*segments, text[consumed:]]
            at = start + len(_PYTHON_TAG)


# ``[TOOL_CALLS]`` with a list of calls, or with a name and arguments: Mistral's older and newer tokenizers.

_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(
    rf"\s{{0,16}}(?P<name>{NAME})\s{{0,16}}(?:\[CALL_ID\](?P<id>[a-zA-Z0-9]{{1,64}})\s{{0,16}})?"
    r"(?:\[ARGS\]\s{0,16})?(?=\{)"
)


class Mistral:
    """Newer tokenizers repeat the token before each call. A list in which any call is invalid stays text."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        segments: list[Segment] = []
        consumed = at = 0
        while (opened := text.find(_TOOL_CALLS, at)) >= 0:
            at = opened + len(_TOOL_CALLS)
            calls_and_end = _listed(text, skip_space(text, at)) or _named(text, at)
            if calls_and_end is not None:
                calls, end = calls_and_end
                segments += [text[consumed:opened], *calls]
                consumed = at = end
        return [*segments, text[consumed:]]


def _listed(text: str, at: int) -> tuple[list[ParsedCall], int] | None:
    if text[at : at + 1] != "[":
        return None
    calls: list[ParsedCall] = []
    while True:
        call_and_end = call_at(text, skip_space(text, at + 1))
        if call_and_end is None:
            return None
        calls.append(call_and_end[0])
        at = skip_space(text, call_and_end[1])
        letter = text[at : at + 1]
        if letter == "]":
            return calls, at + 1
        if letter != ",":
            return None


def _named(text: str, at: int) -> tuple[list[ParsedCall], int] | None:
    head = _NAMED.match(text, at)
    if head is None or (arguments := arguments_at(text, head.end())) is None:
        return None
    return [ParsedCall(head["name"], arguments[0], head["id"])], arguments[1]


CALL_FORMATS: dict[str, CallFormat] = {
    # Hermes, Qwen 2.5 and 3, and many derived from them: <tool_call>{"name": …, "arguments": {…}}</tool_call>
    "hermes": FramedJson(r"<tool_call>", r"\s*+(?:</tool_call>|\Z)"),
    # Qwen3-Coder: <function=name><parameter=key>value</parameter></function>, usually inside <tool_call>. Seed-OSS:
    # the same inside <seed:tool_call>.
    "qwen3_coder": TaggedCalls(
        opening=r"(?:<(?:seed:)?tool_call>\s{0,16})?<function=([^<>\n]{1,256})>",
        parameter=r"<parameter=([^<>\n]{1,256})>",
        parameter_end=r"</parameter>",
        closing=r"</function>(?:\s{0,16}</(?:seed:)?tool_call>)?|</(?:seed:)?tool_call>",
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
    # and the arguments. The tokens around a run of calls are part of the markup.
    "deepseek": FramedJson(
        r"(?:<｜tool▁calls▁begin｜>\s{0,16})?<｜tool▁call▁begin｜>"
        rf"(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>|\s{{0,16}}```json\b)",
        r"\s*+(?:```\s{0,16})?(?:<｜tool▁call▁end｜>(?:\s{0,16}<｜tool▁calls▁end｜>)?|<｜tool▁calls▁end｜>|\Z)",
    ),
    # Kimi K2: functions.name:0 and JSON arguments between tokens.
    "kimi_k2": FramedJson(
        r"(?:<\|tool_calls_section_begin\|>\s{0,16})?<\|tool_call_begin\|>\s{0,16}"
        rf"(?P<id>(?:functions\.)?(?P<name>{NAME})(?::[0-9]{{1,9}})?)\s{{0,16}}<\|tool_call_argument_begin\|>",
        r"\s*+(?:<\|tool_call_end\|>(?:\s{0,16}<\|tool_calls_section_end\|>)?|\Z)",
    ),
    # MiniMax M2: <invoke name="f"><parameter name="key">value</parameter></invoke> in <minimax:tool_call>.
    "minimax_m2": TaggedCalls(
        opening=r"(?:<minimax:tool_call>\s{0,16})?<invoke name=\"([^<>\"\n]{1,256})\">",
        parameter=r"<parameter name=\"([^<>\"\n]{1,256})\">",
        parameter_end=r"</parameter>",
        closing=r"</invoke>(?:\s{0,16}</minimax:tool_call>)?|</minimax:tool_call>",
    ),
    "mistral": Mistral(),
    "llama_json": LlamaJson(),
}
"""At most one of them can read the calls of a given chat template; `auto` takes it. The formats have no state."""
