"""Responses ↔ Chat Completions, for endpoints that speak only one of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from nemo_gym.gateway.dialects.chat import ChatAdapter
from nemo_gym.gateway.dialects.chat_reply import TOKEN_FIELDS
from nemo_gym.gateway.dialects.endpoint import answer_of_completion, chat_body
from nemo_gym.gateway.dialects.fields import objects_in
from nemo_gym.gateway.dialects.responses import ResponsesAdapter, tool_table
from nemo_gym.gateway.dialects.responses_history import extend_turn, lower_input
from nemo_gym.gateway.dialects.responses_reply import response_of
from nemo_gym.gateway.dialects.tools import ToolTable
from nemo_gym.gateway.lowered import LoweredRequest
from nemo_gym.gateway.tokens.messages import text_of
from nemo_gym.gateway.usage import Usage

_ADAPTER = ResponsesAdapter()
_CHAT = ChatAdapter()
_SAME = ("model", "temperature", "top_p", "parallel_tool_calls", "user", "metadata", "store", "service_tier", "stream")
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}
_OF_THE_ANSWER = ("message", "function_call", "custom_tool_call", "reasoning")


def chat_request(params: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses request as a Chat Completions request."""
    request = {key: params[key] for key in ("model", "stream") if params.get(key) is not None}
    request |= chat_body(_ADAPTER.lower(params))
    if request.get("stream"):
        request["stream_options"] = {"include_usage": True}
    return request


def chat_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None) -> list[dict[str, Any]]:
    """Responses input items as chat messages."""
    return lower_input({"input": items, "instructions": instructions}, ToolTable())


def response_of_completion(completion: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion as a Responses object; token ids of the message go to its last item. Raises what
    `answer_of_completion` raises."""
    message = completion["choices"][0]["message"]
    answer = answer_of_completion(
        completion,
        answer_id=uuid4().hex,
        created_at=completion.get("created") or time.time(),
        model=str(completion.get("model") or params.get("model") or "policy"),
    )
    request = LoweredRequest(messages=(), names=tool_table(params).names, logprobs=bool(params.get("top_logprobs")))
    response = response_of(answer, request, params)
    response["output"][-1] |= {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    return response if completion.get("usage") else {**response, "usage": None}


def responses_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """A Chat Completions request as a Responses request."""
    body = {**{key: body[key] for key in _SAME if body.get(key) is not None}, **chat_body(_CHAT.lower(body))}
    request: dict[str, Any] = {key: body[key] for key in _SAME if body.get(key) is not None}
    request["input"] = _items(body["messages"])
    if (limit := body.get("max_tokens")) is not None:
        request["max_output_tokens"] = limit
    if effort := body.get("reasoning_effort"):
        request["reasoning"] = {"effort": effort}
    if tools := body.get("tools"):
        request["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
    if (choice := body.get("tool_choice")) is not None:
        named = isinstance(choice, Mapping)
        request["tool_choice"] = {"type": "function", **choice["function"]} if named else choice
    if form := body.get("response_format"):
        request["text"] = {"format": {"type": form.get("type"), **(form.get("json_schema") or {})}}
    return request


def _items(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            output = _input_content(content)
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
        elif role == "assistant":
            if content:
                items.append({"type": "message", "role": "assistant", "content": text_of(content)})
            for call in message.get("tool_calls") or ():
                function = call["function"]
                items.append(
                    {
                        "type": "function_call",
                        "call_id": call["id"],
                        "name": function["name"],
                        "arguments": function["arguments"],
                    }
                )
        else:
            items.append({"type": "message", "role": role, "content": _input_content(content)})
    return items


def _input_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part.get("type") == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in content
    ]


def completion_of_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses object as a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for where, item in objects_in(response.get("output"), "output"):
        kind = item.get("type")
        if kind in _OF_THE_ANSWER:
            extend_turn(message, kind, item, where, ToolTable())
            message |= {key: item[key] for key in TOKEN_FIELDS if item.get(key) is not None}
    reason = (response.get("incomplete_details") or {}).get("reason")
    finish = _FINISH.get(str(reason)) or ("tool_calls" if message.get("tool_calls") else "stop")
    usage = Usage.of(response.get("usage"))
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(response.get("created_at") or time.time()),
        "model": response.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }
