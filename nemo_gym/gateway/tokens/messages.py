"""What the token code reads of a chat message. Every dialect is lowered to these before it comes here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

Message = Mapping[str, Any]
"""A Chat Completions message: ``role``, ``content`` (text, parts or nothing), ``tool_calls``, ``tool_call_id``."""

_MANY_DIGITS = re.compile(r"[0-9]{19}")
_LONG_CHARS = 64 << 10
_MESSAGE_CHARS = 512
"""What a message of any length costs, as that many characters do."""
_TEXT_PARTS = ("text", "input_text", "output_text")


def role_of(message: Message) -> str:
    """``system``, ``user``, ``assistant`` or ``tool``; the newer and older spellings of them included."""
    role = str(message.get("role") or "")
    return {"developer": "system", "function": "tool"}.get(role, role)


def text_of(content: Any) -> str:
    """The text of a message's content; parts are joined as they stand."""
    if isinstance(content, str):
        return content
    return "".join(
        str(part.get("text") or part.get("refusal") or "") if isinstance(part, Mapping) else str(part)
        for part in content or ()
    )


def media_parts(content: Any) -> Iterator[tuple[str, Any]]:
    """``(kind, source)`` of each image, audio or video part, in order; kind without prefixes (``image``)."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return
    for part in content:
        if not isinstance(part, Mapping):
            continue
        name = str(part.get("type") or "text")
        if name in (*_TEXT_PARTS, "refusal"):
            continue
        source = part.get(name, part.get("source", part.get("image_url")))
        if isinstance(source, Mapping) and "url" in source:
            source = source["url"]
        yield name.removeprefix("input_").removesuffix("_url"), source


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """The tool calls of an assistant message."""
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return calls


def is_long(messages: Sequence[Message]) -> bool:
    """Whether reading, rendering and encoding these may take more than some milliseconds."""
    weight = 0
    for message in messages:
        content = message.get("content")
        parts = (content,) if isinstance(content, str) else content or ()
        weight += _MESSAGE_CHARS + sum(len(part) if isinstance(part, str) else _part_chars(part) for part in parts)
        weight += sum(len(str(call)) for call in calls_of(message))
        if weight > _LONG_CHARS:
            return True
    return False


def _part_chars(part: Any) -> int:
    text = part.get("text") if isinstance(part, Mapping) else None
    return _MESSAGE_CHARS + (len(text) if isinstance(text, str) else 0)


def continues_answer(messages: Sequence[Message]) -> bool:
    """Whether a request asks to go on with the text of its last message, an assistant's (a prefill)."""
    last = messages[-1]
    return role_of(last) == "assistant" and not calls_of(last) and bool(text_of(last.get("content")))


def arguments_of(call: Mapping[str, Any]) -> Any:
    """A call's arguments as data. Text that is not JSON comes back as the text itself."""
    arguments = (call.get("function") or {}).get("arguments")
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        if not _MANY_DIGITS.search(arguments):  # orjson makes doubles of integers beyond 64 bits
            return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(arguments)  # takes escaped lone surrogates, which JavaScript writes
    except (ValueError, RecursionError):
        return arguments
