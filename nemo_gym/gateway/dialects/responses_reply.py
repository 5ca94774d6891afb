"""Replies of Responses: an answer as a response, and as the events of its stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.gateway.dialects.chat import TOKEN_FIELDS, logprobs_content, token_fields
from nemo_gym.gateway.dialects.content import (
    AnswerCall,
    Body,
    calls_in,
    custom_input,
    event,
    made_up,
    pieces,
    reasoning_in,
    shell_action,
    text_in,
)
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerUsage, CallName, PolicyRequest

ENCRYPTED = "reasoning.encrypted_content"
_INCOMPLETE = {AnswerEnd.LENGTH: "max_output_tokens", AnswerEnd.CONTENT_FILTER: "content_filter"}
_ECHOED_TOOLS = ("function", "custom", "local_shell")


def included(body: Body) -> list[Any]:
    """Return the values of a request's ``include``."""
    value = body.get("include")
    return [*value] if isinstance(value, list | tuple) else []


def response_of(answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
    """Return the answer as a ``response``. Its last item has the token fields."""
    output: list[dict[str, Any]] = []
    if reasoning := reasoning_in(answer):
        item: dict[str, Any] = {"id": f"rs_{answer.answer_id}", "type": "reasoning"}
        item["summary"] = [{"type": "summary_text", "text": reasoning}]
        if ENCRYPTED in included(body):
            item["encrypted_content"] = made_up(answer, "reasoning")
        output.append(item)
    calls = calls_in(answer)
    text = text_in(answer)
    if text or not calls:
        output.append(_message(answer, text, request))
    output += [_call(answer, number, call, request) for number, call in enumerate(calls)]
    reason = _INCOMPLETE.get(answer.end)
    if reason and "status" in output[-1]:
        output[-1]["status"] = "incomplete"
    if request.token_ids and answer.tokens is not None:
        output[-1] |= token_fields(answer.tokens)
    response = response_object(answer.answer_id, answer.created_at, answer.model, body)
    return {
        **response,
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "output": output,
        "usage": _usage(answer.usage),
    }


def _message(answer: Answer, text: str, request: PolicyRequest) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    if request.logprobs and answer.tokens is not None and answer.tokens.logprobs is not None:
        part["logprobs"] = logprobs_content(answer.tokens)
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _call(answer: Answer, number: int, call: AnswerCall, request: PolicyRequest) -> dict[str, Any]:
    call_name = request.names.get(call.name) or CallName(call.name)
    own_id = f"{answer.answer_id}_{number}"
    if call_name.local_shell and (action := shell_action(call.data)) is not None:
        return {
            "id": f"lsh_{own_id}",
            "type": "local_shell_call",
            "call_id": call.call_id,
            "action": action,
            "status": "completed",
        }
    if call_name.custom:
        call_id, text = custom_input(call)
        item = {"id": f"ctc_{own_id}", "type": "custom_tool_call", "call_id": call_id, "input": text}
    else:
        item = {
            "id": f"fc_{own_id}",
            "type": "function_call",
            "call_id": call.call_id,
            "arguments": call.arguments,
        }
    item |= {"name": call_name.name, "status": "completed"}
    return item if call_name.namespace is None else {**item, "namespace": call_name.namespace}


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


REPEATED = ("instructions", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools")
"""Parameters of any depth that the response repeats from the request."""


def response_object(answer_id: str, created_at: float, model: str, body: Body) -> dict[str, Any]:
    """Return a response without output, with the request's parameters that the dialect repeats."""
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata"),
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": body.get("reasoning"),
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool_in_reply(tool) for tool in body.get("tools") or () if tool.get("type") in _ECHOED_TOOLS],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _tool_in_reply(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that validating clients require."""
    required = {"strict": False, "parameters": None} if tool.get("type") == "function" else {}
    return {**required, **tool}


# A response of Responses as its events. Every event has a sequence number; deltas add up to the items.

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
    """Return the response object that opens a stream. Only the last event has the tools: the harness knows them, and
    some forty kilobytes of them would come back with every ping."""
    empty: dict[str, Any] = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "tools": [],
    }
    return {**response, **empty}


def responses_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the events of a response, the gateway's or an endpoint's."""
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
            yield from _message_events(item, at)
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


def _message_events(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
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
            piece_logprobs = {"logprobs": entries[place * share : (place + 1) * share]} if has_logprobs else {}
            yield {"type": f"{name}.delta", **where, "delta": piece, **piece_logprobs}
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
