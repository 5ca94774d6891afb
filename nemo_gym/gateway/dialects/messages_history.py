"""The conversation of a Messages request as chat messages.

| block | becomes |
|---|---|
| ``text`` | text; an assistant's blocks are one text |
| ``image`` (``base64``, ``url``) | an ``image_url`` part in its place, also inside a tool's result |
| ``document`` with a ``text`` source | its text |
| ``tool_use`` | a call |
| ``tool_result`` | a tool message before the rest of its message, since it answers the call before it |
| ``tool_reference`` in a result | the definition of the tool that was found, where the policy reads it |
| ``thinking`` | reasoning; its ``signature`` is not looked at |
| ``redacted_thinking`` | nothing: the policy never wrote it |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from nemo_gym.gateway.dialects.content import (
    Part,
    anthropic_image,
    image_part,
    joined,
    lead_system,
    refuse_part,
    text_part,
)
from nemo_gym.gateway.dialects.fields import Body, json_at, object_at, objects_in, optional_text, refuse, text_at
from nemo_gym.gateway.dialects.memo import LoweringMemo, lowered_history
from nemo_gym.gateway.dialects.tools import called

_BILLING = "x-anthropic-billing-header:"
WRAPPED = "arguments"
"""The one key of a call's input whose arguments, as sampled, were no JSON object: Messages has objects only."""
Tools = Mapping[str, Mapping[str, Any]]


def lower_messages(body: Body, tools: Tools, memo: LoweringMemo | None = None) -> list[dict[str, Any]]:
    """The system prompt and the messages of a request. ``tools``: by name, for references to them."""
    value = body.get("messages")
    if not isinstance(value, list | tuple) or not value:
        refuse("messages", "must be a list of at least one message")

    def lower_from(start: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        for end, (where, message) in enumerate(objects_in(value, "messages", start), start + 1):
            yield end, _message(message, where, tools)

    text = _system(body.get("system"), "system")
    before = [{"role": "system", "content": text}] if text else []
    return lead_system([*before, *lowered_history(memo, body.get("tools"), value, lower_from)])


def _message(message: Body, where: str, tools: Tools) -> list[dict[str, Any]]:
    role, at = message.get("role"), f"{where}.content"
    if role == "user":
        return _user(message.get("content"), at, tools)
    if role == "assistant":
        return [_assistant(message.get("content"), at)]
    if role != "system":
        refuse(f"{where}.role", f"is {role!r}; it must be user, assistant or system")
    return [{"role": "system", "content": _system(message.get("content"), at)}]


def _system(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, block in objects_in(content, where):
        if block.get("type") != "text":
            refuse(f"{at}.type", f"is {block.get('type')!r}; system prompts hold text only")
        text = text_at(block, "text", at)
        if not text.startswith(_BILLING):
            texts.append(text_part(text))
    return str(joined(texts))


def _user(content: Any, where: str, tools: Tools) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    parts: list[Part] = []
    for at, block in objects_in(content, where):
        if block.get("type") != "tool_result":
            parts.append(_part(block, at, tools))
            continue
        call_id = text_at(block, "tool_use_id", at)
        said = _result(block, at, tools)
        results.append({"role": "tool", "tool_call_id": call_id, "content": said})
    if parts or not results:
        results.append({"role": "user", "content": joined(parts)})
    return results


def _result(block: Body, where: str, tools: Tools) -> str | list[Part]:
    content = block.get("content")
    if not isinstance(content, str):
        content = joined([_part(part, at, tools) for at, part in objects_in(content, f"{where}.content")])
    # A failure that says nothing would look like a success that says nothing.
    return content or ("error" if block.get("is_error") else "")


def _part(block: Body, where: str, tools: Tools) -> Part:
    kind = block.get("type")
    if kind == "text":
        return text_part(text_at(block, "text", where))
    if kind == "image":
        return anthropic_image(block, where)
    if kind == "image_url":  # OpenAI's form, which bridges between dialects leave as it is
        image = object_at(block, "image_url", where)
        return image_part(text_at(image, "url", where), f"{where}.image_url.url")
    if kind == "tool_reference":
        name = text_at(block, "tool_name", where)
        tool = tools.get(name)
        return text_part(name if tool is None else f"<tool>{json_at(tool['function'], where)}</tool>")
    if kind == "document" and (source := object_at(block, "source", where)).get("type") == "text":
        title = optional_text(block, "title", where)
        return text_part((f"{title}\n" if title else "") + text_at(source, "data", f"{where}.source"))
    refuse_part(kind, where)


def _assistant(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in objects_in(content, where):
        kind = block.get("type")
        if kind == "text":
            texts.append(text_at(block, "text", at))
        elif kind == "thinking":
            thoughts.append(text_at(block, "thinking", at, default=""))
        elif kind == "tool_use":
            arguments = _arguments(object_at(block, "input", at), at)
            calls.append(called(text_at(block, "name", at), text_at(block, "id", at), arguments))
        elif kind != "redacted_thinking":
            refuse_part(kind, at)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if reasoning := "".join(thoughts):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(given: Body, where: str) -> str:
    """The arguments as they were sampled, where they had to be wrapped."""
    if [*given] == [WRAPPED] and isinstance(text := given[WRAPPED], str):
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
        if not isinstance(parsed, dict):
            return text
    return json_at(given, f"{where}.input")
