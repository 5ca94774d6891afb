"""When two spellings of a message are the same message. What harnesses do to history must not cost the trajectory.

A harness sends its whole history with every request, rarely letter for letter. Messages are compared by a digest of
their canonical form; what the policy saw and wrote stays in tokens, whatever the later spelling.

| what differs | same? | because |
|---|---|---|
| whitespace in an assistant's text (stripped, re-wrapped, lost where it was joined) | yes | known by token |
| an assistant's reasoning: replayed, dropped, in ``<think>`` | yes | harnesses drop it at will |
| ``content``: absent, null, empty | yes | nothing was said |
| text as one string, or split over parts | yes | dialects differ |
| tool arguments: key order, spacing, escapes, 1.0 for 1, integers as doubles | yes | JavaScript re-serialises JSON |
| an argument that is false or null: left out, or put in | yes | Claude Code writes defaults into history |
| whitespace at the ends of an argument's lines; ``\\u00e9`` for é | yes | Claude Code cleans what it writes to files |
| arguments that are no JSON, or wrapped as ``{"arguments": text}`` | yes | the Messages dialect must wrap them |
| ids of tool calls and results | yes | renamed by harnesses; results belong to calls by order |
| order of the results of parallel calls | yes | each result goes to its call |
| one answer sent as several assistant messages | yes | text and calls arrive as separate events |
| ``cache_control``, annotations, null fields | yes | never shown to the policy |
| ``developer`` for ``system``, ``function`` for ``tool`` | yes | two names |
| the billing header line of a system prompt | yes | varies by request, means nothing |
| whitespace around a user's, system's or tool's text; CRLF | yes | trimmed |
| a ``<system-reminder>`` removed from history, or moved to newer messages | yes | the policy has seen it |
| a ``<system-reminder>`` added to history, or changed | **no** | the policy has not seen it |
| tools in another order; their keys in another order; ``strict: null`` | yes | the same tools |
| a tool added, removed or described otherwise | **no** | another prompt |
| any other change of a user's, system's or tool's text; an image | **no** | another conversation |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.gateway.tokens.messages import Message, arguments_of, calls_of, media_parts, role_of, text_of

_REMINDER = re.compile(r"<system-reminder>(.*?)</system-reminder>", re.DOTALL)
_THINKING = re.compile(r"\A\s*(?:<think>)?(?:(?!<think>).)*?</think>", re.DOTALL)
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)
_ESCAPED = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
_SPACES = bytes(ord(char) for char in map(chr, range(128)) if char.isspace())
_EXACT_INTEGER = 2**53
NO_REMINDERS: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a conversation in canonical form: usually a message; a run of an assistant's, or of results."""

    end: int
    """Number of messages up to and with this entry."""
    digest: bytes | None
    """Of the canonical form; nothing for messages that hold only reminders."""
    reminders: frozenset[bytes]
    role: str


def digest_of(value: Any) -> bytes:
    """A digest of JSON data in canonical form."""
    data = _number_safe(value)
    try:
        text = orjson.dumps(data, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except (orjson.JSONEncodeError, TypeError):  # lone surrogates, which only JSON's own escapes can hold
        text = json.dumps(data, sort_keys=True, default=repr).encode()
    return hashlib.blake2b(text, digest_size=16).digest()


def tools_digest(tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """A digest of the tools a request offers, whatever their order."""
    listed = [_without_nulls(tool.get("function") or tool) for tool in tools or ()]
    return digest_of(sorted((str(tool.get("name")), digest_of(tool).hex()) for tool in listed))


def entries_of(messages: Sequence[Message]) -> list[Entry]:
    """The canonical entries of a conversation."""
    entries: list[Entry] = []
    while (at := entries[-1].end if entries else 0) < len(messages):
        entries.append(entry_at(messages, at))
    return entries


def entry_at(messages: Sequence[Message], at: int) -> Entry:
    """The canonical entry that starts with message ``at``."""
    role = role_of(messages[at])
    end = at + 1
    while role in ("assistant", "tool") and end < len(messages) and role_of(messages[end]) == role:
        end += 1
    run = messages[at:end]
    if role == "assistant":
        return Entry(end, digest_of(_answer(run)), NO_REMINDERS, role)
    if role == "tool":
        calls = _calls_before(messages, at)
        run = sorted(run, key=lambda result: calls.get(_call_id(result), len(calls)))
    return _entry(end, role, run)


def _entry(end: int, role: str, run: Sequence[Message]) -> Entry:
    canonical: list[Any] = []
    reminders: set[bytes] = set()
    for message in run:
        content = message.get("content")
        text = text_of(content).replace("\r\n", "\n")
        if role == "system":
            text = _BILLING.sub("", text)
        if "<system-reminder>" in text:
            reminders.update(digest_of(" ".join(found.split())) for found in _REMINDER.findall(text))
            text = _REMINDER.sub("", text)
        media = [[kind, digest_of(source).hex()] for kind, source in media_parts(content)]
        canonical.append([text.strip(), *media])
    if role == "user" and reminders and canonical == [[""]]:
        return Entry(end, None, frozenset(reminders), role)
    return Entry(end, digest_of([role, canonical]), frozenset(reminders) if reminders else NO_REMINDERS, role)


def _answer(run: Sequence[Message]) -> Any:
    text = " ".join(_without_thinking(text_of(message.get("content"))) for message in run)
    calls = []
    for call in (call for message in run for call in calls_of(message)):
        arguments = arguments_of(call)
        if (
            isinstance(arguments, Mapping)
            and [*arguments] == ["arguments"]
            and isinstance(arguments["arguments"], str)
        ):
            arguments = arguments["arguments"]
        calls.append([str((call.get("function") or {}).get("name")), _argument(arguments)])
    return ["assistant", _without_spaces(text), calls]


def _without_spaces(text: str) -> str:
    # Those of ASCII first, and at once: a long answer has tens of thousands of words.
    text = text.encode("utf-8", "surrogatepass").translate(None, _SPACES).decode("utf-8", "surrogatepass")
    return text if text.isascii() else "".join(text.split())


def _without_thinking(text: str) -> str:
    # A single letter is looked for in a tenth of the time that a word takes, and few long texts hold this one.
    return _THINKING.sub("", text) if "<" in text and "</think>" in text else text


def _argument(value: Any) -> Any:
    """Without what harnesses change in the arguments of calls that they have run."""
    if isinstance(value, str):
        text = _ESCAPED.sub(_unescaped, value) if "\\u" in value else value
        return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()
    if isinstance(value, Mapping):
        return {key: _argument(item) for key, item in value.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [_argument(item) for item in value]
    return value


def _unescaped(escapes: re.Match[str]) -> str:
    return bytes.fromhex(escapes[0].replace("\\u", "")).decode("utf-16-be", "surrogatepass")


def _calls_before(messages: Sequence[Message], at: int) -> dict[str, int]:
    """Id → place of the calls of the answer that the results at ``at`` belong to."""
    ids: list[str] = []
    while at > 0 and role_of(messages[at - 1]) == "assistant":
        at -= 1
        ids[:0] = [str(call.get("id")) for call in calls_of(messages[at])]
    return {call_id: place for place, call_id in enumerate(ids)}


def _call_id(result: Message) -> str:
    return str(result.get("tool_call_id"))


def _number_safe(value: Any) -> Any:
    """Numbers as a double holds them: JavaScript harnesses write 1.0 as 1, and round large integers."""
    kind = type(value)  # what nearly all data is made of, at a fraction of the time that asking for instances takes
    if kind is str:
        return value
    if kind is dict:
        return {str(key): _number_safe(item) for key, item in value.items()}
    if kind is list:
        return [_number_safe(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < _EXACT_INTEGER else repr(float(value)) if abs(value) < 10**308 else repr(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value) if abs(value) < _EXACT_INTEGER else repr(value)
        return value if value == value and abs(value) != float("inf") else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _number_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_number_safe(item) for item in value]
    return repr(value)


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tool.items() if value is not None and key not in ("cache_control", "type")}
    if not kept.get("description"):
        kept.pop("description", None)
    return kept
