"""Messages (Anthropic's ``/v1/messages``, and ``/v1/messages/count_tokens``, which has no ``max_tokens``) and the
lowered request.

| field | what becomes of it |
|---|---|
| ``system`` | a system message; the billing header block that Claude Code leads it with is left out |
| ``messages`` | lowered; ``role: system`` among them stays in its place |
| ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``stop_sequences`` | sampling; ``max_tokens`` may be absent |
| ``tools`` with a schema (``custom``) | shown to the policy; those with ``defer_loading`` where the harness searched for them |
| ``tools`` that Anthropic runs (``web_search_…``, ``code_execution_…``, ``tool_search_tool_…``) | not shown |
| ``tools`` of Anthropic's that the harness runs (``bash_…``, ``text_editor_…``, ``computer_…``, ``memory_…``) | refused: their schemas are known to Anthropic's models only |
| ``tool_choice`` | ``auto``, ``any``, ``tool``, ``none``; ``disable_parallel_tool_use`` goes to ``extra`` |
| ``thinking`` | whether the reply has ``thinking`` blocks; the budget is the policy's own affair |
| ``output_config.format``, ``output_format`` | the response format; ``output_config.effort`` goes to ``extra`` |
| ``stream`` | the stream |
| ``return_token_ids`` | token ids beside the reply's content (not Anthropic's) |
| ``n`` other than 1, ``mcp_servers``, ``container`` | refused where they ask for something |
| ``cache_control``, ``context_management``, ``metadata``, ``service_tier``, ``betas``, ``model``, unknown fields | ignored |

Unknown types of content are refused by name, as are documents (except plain text) and results of server tools.
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import uuid4

import orjson

from nemo_gym._util.exact_json import dumps_exactly, has_long_numbers, loads_exactly
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import (
    ConversationCache,
    DialectAdapter,
    messages_in,
    messages_lowered,
    one_answer,
    token_fields,
    wants_token_ids,
)
from nemo_gym.gateway.dialects.content import (
    Body,
    Part,
    ToolTable,
    anthropic_image,
    called,
    calls_in,
    data_in,
    dumped,
    event,
    flag_at,
    image_part,
    is_refusal,
    joined,
    json_at,
    kind_of,
    lead_system,
    made_up,
    object_at,
    objects_in,
    optional_text,
    pieces,
    reasoning_in,
    refuse,
    refuse_part,
    refuse_set,
    sampling_at,
    text_at,
    text_in,
    text_part,
)
from nemo_gym.gateway.dialects.endpoint import answer_of_completion, chat_body
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, PolicyRequest

# An answer as a message of Messages, whole and streamed.


_STOP_REASONS = {AnswerEnd.LENGTH: "max_tokens", AnswerEnd.CONTENT_FILTER: "refusal"}
_EMPTY: Mapping[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""The fields of a block at its start in a stream."""


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "text":
        for piece in pieces(block["text"]):
            yield {"type": "text_delta", "text": piece}
    elif kind == "thinking":
        for piece in pieces(block["thinking"]):
            yield {"type": "thinking_delta", "thinking": piece}
        yield {"type": "signature_delta", "signature": block.get("signature") or ""}
    elif kind == "tool_use":
        for piece in pieces(dumped(block["input"]).decode()):
            yield {"type": "input_json_delta", "partial_json": piece}


# A request of Messages as a lowered request.

_BILLING = "x-anthropic-billing-header:"
WRAPPED = "arguments"
"""The only key in the input of a call whose sampled arguments are no JSON object: Messages allows only objects."""
Tools = Mapping[str, Mapping[str, Any]]


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
        result = _result(block, at, tools)
        results.append({"role": "tool", "tool_call_id": call_id, "content": result})
    if parts or not results:
        results.append({"role": "user", "content": joined(parts)})
    return results


def _result(block: Body, where: str, tools: Tools) -> str | list[Part]:
    content = block.get("content")
    if not isinstance(content, str):
        content = joined([_part(part, at, tools) for at, part in objects_in(content, f"{where}.content")])
    # A failure without content would look like a success without content.
    return content or ("error" if block.get("is_error") else "")


def _part(block: Body, where: str, tools: Tools) -> Part:
    kind = block.get("type")
    if kind == "text":
        return text_part(text_at(block, "text", where))
    if kind == "image":
        return anthropic_image(block, where)
    if kind == "image_url":  # OpenAI's form, which some bridges between dialects do not convert
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


def _arguments(arguments: Body, where: str) -> str:
    """Return a call's arguments; unwraps sampled arguments that the reply had to wrap (see `WRAPPED`)."""
    wrapped = arguments[WRAPPED] if [*arguments] == [WRAPPED] else None
    if isinstance(wrapped, str) and not isinstance(data_in(wrapped), dict):
        return wrapped
    return json_at(arguments, f"{where}.input")


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high")
_RUN_BY_HARNESS = ("bash_", "text_editor_", "computer_", "memory_")
_SEARCHED_BY_SERVER = "tool_search_tool_"
_REFUSED = {
    "mcp_servers": "asks the API to call MCP servers; let the harness call them and offer their tools",
    "container": "refers to a container of the API; there is none here",
}


class MessagesAdapter(DialectAdapter):
    """Messages. Its tools, for references to them, are by name."""

    dialect = Dialect.MESSAGES
    not_parameters = frozenset({"messages", "system", "metadata"})

    def _parameters(self, body: Body, cache: ConversationCache | None) -> tuple[Tools, PolicyRequest]:
        one_answer(body)
        refuse_set(body, _REFUSED)
        tools, deferred = _tools(body)
        sampling = sampling_at(body, ("temperature", "top_p", "top_k"), stop="stop_sequences")
        choice = object_at(body, "tool_choice", "")
        output = object_at(body, "output_config", "")
        form = object_at(output, "format", "output_config") or object_at(body, "output_format", "")
        extra: dict[str, Any] = {}
        if choice.get("disable_parallel_tool_use") and tools:
            extra["parallel_tool_calls"] = False
        if output.get("effort") in _EFFORTS:
            extra["reasoning_effort"] = output["effort"]
        return {**deferred, **{_name(tool): tool for tool in tools}}, PolicyRequest(
            messages=(),
            tools=tools or None,
            deferred=[*deferred.values()],
            asked=sampling,
            stream=flag_at(body, "stream"),
            tool_choice=_choice(choice),
            response_format=_format(form),
            token_ids=wants_token_ids(body),
            reasoning=object_at(body, "thinking", "").get("type") in ("enabled", "adaptive"),
            extra=extra,
        )

    def _messages(self, body: Body, tools: Tools, cache: ConversationCache | None) -> list[dict[str, Any]]:
        messages_in(body)  # checked first
        text = _system(body.get("system"), "system")
        before = [{"role": "system", "content": text}] if text else []
        return lead_system([*before, *messages_lowered(body, cache, lambda message, at: _message(message, at, tools))])

    def reply(self, answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if (thought := reasoning_in(answer)) and request.reasoning:
            content.append({"type": "thinking", "thinking": thought, "signature": made_up(answer, "signature")})
        calls = calls_in(answer)
        if text := text_in(answer):
            content.append({"type": "text", "text": text})
        for call in calls:
            data = call.data if call.arguments.strip() else {}
            if not isinstance(data, dict):
                data = {WRAPPED: call.arguments}
            elif has_long_numbers(call.arguments):
                # As text, because orjson writes no integers beyond 64 bits; on one line, as captured calls are.
                data = orjson.Fragment(dumps_exactly(loads_exactly(call.arguments.encode())))
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": data})
        if not content:
            # Claude Code treats a message without any content as a broken stream, and sends the request again.
            content.append({"type": "text", "text": ""})
        stopped_by_text = answer.end is AnswerEnd.STOP and answer.stop is not None and not calls
        ended = "tool_use" if calls else "stop_sequence" if stopped_by_text else "end_turn"
        if is_refusal(answer) and not calls:
            ended = _STOP_REASONS[AnswerEnd.CONTENT_FILTER]
        usage = answer.usage
        message: dict[str, Any] = {
            "id": f"msg_{answer.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": _STOP_REASONS.get(answer.end) or ended,
            "stop_sequence": answer.stop if stopped_by_text else None,
            "usage": {
                # In this dialect, ``input_tokens`` does not include cached tokens.
                "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.cached_tokens,
                "output_tokens": usage.completion_tokens,
            },
        }
        if request.token_ids and answer.tokens is not None:
            message |= token_fields(answer.tokens)
        return message

    def events(self, reply: Mapping[str, Any], *, with_usage: bool = True) -> Iterator[bytes]:
        counted = reply.get("usage") or {}
        started = {**reply, "content": [], "stop_reason": None, "stop_sequence": None}
        yield event({"type": "message_start", "message": {**started, "usage": {**counted, "output_tokens": 0}}})
        for index, block in enumerate(reply.get("content") or ()):
            yield event(
                {
                    "type": "content_block_start",
                    "index": index,
                    "content_block": {**block, **_EMPTY.get(block["type"], {})},
                }
            )
            for delta in _deltas(block):
                yield event({"type": "content_block_delta", "index": index, "delta": delta})
            yield event({"type": "content_block_stop", "index": index})
        stop = {key: reply.get(key) for key in ("stop_reason", "stop_sequence")}
        yield event({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 0, **counted}})
        yield event({"type": "message_stop"})


def _tools(body: Body) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the tools of the prompt, and by name those that the harness has to search for."""
    table = ToolTable()
    listed = [*objects_in(body.get("tools"), "tools")]
    by_server = any(str(tool.get("type")).startswith(_SEARCHED_BY_SERVER) for _, tool in listed)
    later: set[str] = set()
    for where, tool in listed:
        kind = tool.get("type") or "custom"
        if not isinstance(kind, str):
            refuse(f"{where}.type", f"must be a string, not {kind_of(kind)}")
        if kind != "custom" and tool.get("input_schema") is None:
            if kind.startswith(_RUN_BY_HARNESS):
                refuse(where, f"is of type '{kind}', whose schema this model does not know; offer it as a custom tool")
            continue
        schema = object_at(tool, "input_schema", where)
        about = optional_text(tool, "description", where)
        table.add({"name": text_at(tool, "name", where), "description": about, "parameters": schema}, where)
        # With the API's own tool search the harness does not search, so a deferred tool could never be found.
        if tool.get("defer_loading") and not by_server:
            later.add(tool["name"])
    shown = [tool for tool in table.tools if _name(tool) not in later]
    return shown, {_name(tool): tool for tool in table.tools if _name(tool) in later}


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _choice(choice: Body) -> str | dict[str, Any]:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"name": text_at(choice, "name", "tool_choice")}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", f"is {kind!r}; it must be auto, any, tool or none")
    return _CHOICES[kind]


def _format(form: Body) -> dict[str, Any] | None:
    if not form:
        return None
    if form.get("type") != "json_schema":
        refuse("output_config.format.type", f"is {form.get('type')!r}; it must be 'json_schema'")
    schema = object_at(form, "schema", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(schema), "strict": True}}


# Messages for endpoints that speak Chat Completions only.

_ADAPTER = MessagesAdapter()


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Messages request to a Chat Completions request."""
    same = {key: body[key] for key in ("model", "stream") if body.get(key) is not None}
    return {**same, **chat_body(_ADAPTER.lower(body))}


def message_of_completion(completion: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Convert a chat completion to the reply to ``body``; without a body, to a reply without thinking. Raises the
    errors of `answer_of_completion`."""
    request_body = body or {"messages": [{"role": "user", "content": ""}]}
    answer = answer_of_completion(completion, answer_id=uuid4().hex, created_at=time.time())
    return _ADAPTER.reply(answer, _ADAPTER.lower(request_body), request_body)
