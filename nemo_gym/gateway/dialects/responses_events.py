"""A response of Responses as its events. Every event has a sequence number; deltas add up to the items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.gateway.dialects.chat_reply import TOKEN_FIELDS
from nemo_gym.gateway.dialects.sse import event, pieces

_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": "", "status": "in_progress"},
    "local_shell_call": {"status": "in_progress"},
    "reasoning": {"summary": []},
}
_TEXT_EVENTS = {"output_text": ("response.output_text", "text"), "refusal": ("response.refusal", "refusal")}
_CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
_ONLY_WHEN_DONE = frozenset({"encrypted_content", *TOKEN_FIELDS})
Event = dict[str, Any]


def begun(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response as its stream opens. The tools are left to the last event: a harness has sent them itself, and some
    forty kilobytes of them would come back with every ping."""
    empty: dict[str, Any] = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "tools": [],
    }
    return {**response, **empty}


def responses_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of a response, of ours or of an endpoint."""
    for number, value in enumerate(_events(response)):
        yield event({"type": value.pop("type"), "sequence_number": number, **value})


def _events(response: Mapping[str, Any]) -> Iterator[Event]:
    opening = begun(response)
    yield {"type": "response.created", "response": opening}
    yield {"type": "response.in_progress", "response": opening}
    for index, item in enumerate(response.get("output") or ()):
        kind = str(item.get("type"))
        at = {"item_id": item.get("id"), "output_index": index}
        added = {key: value for key, value in item.items() if key not in _ONLY_WHEN_DONE}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**added, **_EMPTY.get(kind, {})}}
        if kind == "message":
            yield from _message(item, at)
        elif kind == "reasoning":
            yield from _reasoning(item, at)
        elif kind in _CALL_EVENTS:
            name, key = _CALL_EVENTS[kind]
            text = item.get(key) or ""
            for piece in pieces(text):
                yield {"type": f"{name}.delta", **at, "delta": piece}
            yield {"type": f"{name}.done", **at, key: text, "name": item.get("name")}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    ended = "incomplete" if response.get("status") == "incomplete" else "completed"
    yield {"type": f"response.{ended}", "response": response}


def _message(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
    for number, part in enumerate(item.get("content") or ()):
        where = {**at, "content_index": number}
        name, key = _TEXT_EVENTS.get(str(part.get("type")), _TEXT_EVENTS["output_text"])
        text, entries = part.get(key) or "", part.get("logprobs") or []
        has_logprobs = key == "text"
        begin = {**part, key: ""} | ({"logprobs": []} if has_logprobs and "logprobs" in part else {})
        yield {"type": "response.content_part.added", **where, "part": begin}
        cut = [*pieces(text)]
        share = -(-len(entries) // max(1, len(cut)))
        for place, piece in enumerate(cut):
            told = {"logprobs": entries[place * share : (place + 1) * share]} if has_logprobs else {}
            yield {"type": f"{name}.delta", **where, "delta": piece, **told}
        yield {"type": f"{name}.done", **where, key: text, **({"logprobs": entries} if has_logprobs else {})}
        yield {"type": "response.content_part.done", **where, "part": part}


def _reasoning(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
    for number, part in enumerate(item.get("summary") or ()):
        where = {**at, "summary_index": number}
        yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield {"type": "response.reasoning_summary_text.delta", **where, "delta": piece}
        yield {"type": "response.reasoning_summary_text.done", **where, "text": part["text"]}
        yield {"type": "response.reasoning_summary_part.done", **where, "part": part}
    for number, part in enumerate(item.get("content") or ()):
        where = {**at, "content_index": number}
        for piece in pieces(part["text"]):
            yield {"type": "response.reasoning_text.delta", **where, "delta": piece}
        yield {"type": "response.reasoning_text.done", **where, "text": part["text"]}
