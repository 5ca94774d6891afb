"""The input of a Responses request as chat messages.

Items of one answer of the policy become one assistant message. A call's output is a tool message, with its images. A
reasoning item is read by its text (``content``, else ``summary``), never by ``encrypted_content``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nemo_gym.gateway.dialects.chat import arguments_at
from nemo_gym.gateway.dialects.content import answer_text, lead_system, openai_content, system_text
from nemo_gym.gateway.dialects.fields import Body, object_at, objects_in, optional_text, refuse, text_at
from nemo_gym.gateway.dialects.memo import LoweringMemo, lowered_history
from nemo_gym.gateway.dialects.tools import LOCAL_SHELL, ToolTable, called, custom_arguments, shell_arguments

_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def lower_input(body: Body, table: ToolTable, memo: LoweringMemo | None = None) -> list[dict[str, Any]]:
    """Instructions and input of a request."""
    value = body.get("input")
    instructions = body.get("instructions")
    start = [{"role": "system", "content": system_text(instructions, "instructions")}] if instructions else []
    if isinstance(value, str):
        return [*start, {"role": "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        refuse("input", "must be a string, or a list of at least one item")
    items = lowered_history(memo, body.get("tools"), value, lambda at: _groups(value, at, table))
    return lead_system([*start, *items])


def _groups(items: Sequence[Any], start: int, table: ToolTable) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Items from ``start`` on as messages, each with where its items end."""
    turn: dict[str, Any] | None = None  # the assistant message being put together
    end = start
    for where, item in objects_in(items, "input", start):
        kind = item.get("type") or ("message" if "role" in item else None)
        alone = _alone(kind, item, where)
        opens = turn is None or (kind == "reasoning" and (turn.get("tool_calls") or turn["content"]))
        if turn is not None and (alone is not None or opens):
            yield end, [_whole(turn)]
            turn = None
        end += 1
        if alone is not None:
            yield end, [alone]
            continue
        turn = turn or {"role": "assistant", "content": None}
        extend_turn(turn, kind, item, where, table)
    if turn is not None:
        yield end, [_whole(turn)]


def _whole(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["content"] is None and not turn.get("tool_calls"):
        turn["content"] = ""
    return turn


def _alone(kind: Any, item: Body, where: str) -> dict[str, Any] | None:
    """The message of an item that is one by itself; nothing for the items of an answer."""
    if kind in _OUTPUTS:
        call_id = text_at(item, "id" if item.get("call_id") is None else "call_id", where)
        content = openai_content(item.get("output"), f"{where}.output") or ""
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    return _message(item, where) if kind == "message" and item.get("role") != "assistant" else None


def _message(item: Body, where: str) -> dict[str, Any]:
    role, at = item.get("role"), f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": system_text(item.get("content"), at)}
    if role != "user":
        refuse(f"{where}.role", f"is {role!r}; it must be user, assistant, system or developer")
    return {"role": "user", "content": openai_content(item.get("content"), at) or ""}


def extend_turn(turn: dict[str, Any], kind: Any, item: Body, where: str, table: ToolTable) -> None:
    """Add an item of the assistant to the message it belongs to."""
    if kind == "message":
        turn["content"] = (turn["content"] or "") + (answer_text(item.get("content"), f"{where}.content") or "")
    elif kind == "reasoning":
        if text := _reasoning(item, where):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        turn.setdefault("tool_calls", []).append(_call(kind, item, where, table))
    elif kind == "item_reference":
        refuse(where, "refers to an item stored elsewhere; nothing is stored here: send the item itself")
    else:
        refuse(f"{where}.type", f"is {kind!r}: items of this type are not known here")


def _call(kind: str, item: Body, where: str, table: ToolTable) -> dict[str, Any]:
    if kind == "local_shell_call":
        arguments = shell_arguments(object_at(item, "action", where), f"{where}.action")
        call_id = text_at(item, "id" if item.get("call_id") is None else "call_id", where)
        return called(LOCAL_SHELL, call_id, arguments)
    call_id = text_at(item, "call_id", where)
    flat = table.flat_name(text_at(item, "name", where), optional_text(item, "namespace", where))
    if kind == "custom_tool_call":
        return called(flat, call_id, custom_arguments(text_at(item, "input", where), call_id, where))
    return called(flat, call_id, arguments_at(item, where))


def _reasoning(item: Body, where: str) -> str:
    return answer_text(item.get("content"), f"{where}.content") or "".join(
        text_at(part, "text", at) for at, part in objects_in(item.get("summary"), f"{where}.summary")
    )
