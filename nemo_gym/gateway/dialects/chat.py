"""Chat Completions (``/v1/chat/completions``) and the lowered request.

| field | what becomes of it |
|---|---|
| ``messages`` | lowered: ``developer`` is ``system``; leading system messages are one; parts of text are one text |
| ``messages[].content`` | ``text``, ``refusal``, ``image_url`` (``input_image``); audio, video and files are refused |
| ``messages[].reasoning_content``, ``reasoning`` | the assistant's reasoning |
| ``messages[].tool_calls`` | ``function`` and ``custom`` calls |
| ``tools``, ``tool_choice`` | ``function`` and ``custom`` tools; other types, which OpenAI would run, are not shown |
| ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``, ``stop``, ``presence_penalty``, ``frequency_penalty``, ``repetition_penalty`` | sampling |
| ``max_completion_tokens``, ``max_tokens`` | token budget; the newer name wins |
| ``stream``, ``stream_options.include_usage`` | the stream |
| ``response_format`` | passed on |
| ``logprobs`` | of the sampled tokens; ``top_logprobs`` gives no alternatives |
| ``return_token_ids``, ``return_token_id_information`` | token ids and logprobs in the message |
| ``n`` other than 1, ``best_of`` above 1 | refused |
| ``logit_bias``, ``functions``, ``function_call``, ``audio``, ``modalities`` with more than text, ``echo``, ``suffix``, ``prompt``, ``background``, ``previous_response_id``, ``conversation`` | refused where they ask for something |
| ``web_search_options``, ``store``, ``metadata``, ``model`` | ignored; the session has its model |
| anything else (``user``, ``reasoning_effort``, ``parallel_tool_calls``, ``chat_template_kwargs``, unknown fields) | ``extra`` |

Types of content, of messages and of tool choices that are not known are refused by name; other unknown fields are
harmless.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.content import (
    Body,
    ToolTable,
    answer_text,
    called,
    chosen,
    custom_arguments,
    custom_input,
    flag_at,
    json_at,
    kind_of,
    lead_system,
    number_at,
    object_at,
    objects_in,
    openai_content,
    reasoning_of,
    refuse,
    refuse_set,
    rest_of,
    sampling_at,
    stop_at,
    system_text,
    text_at,
)
from nemo_gym.gateway.dialects.conversation_cache import ConversationCache, lowered_history
from nemo_gym.gateway.dialects.errors import openai_error
from nemo_gym.gateway.dialects.reply_parts import calls_in, data, pieces, reasoning_in, text_in
from nemo_gym.gateway.policy_request import Answer, AnswerTokens, AnswerUsage, PolicyRequest

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
LOGPROBS_PER_CHUNK = 64


def completion_of(answer: Answer, request: PolicyRequest) -> dict[str, Any]:
    """A ``chat.completion``."""
    message: dict[str, Any] = {"role": "assistant", "content": text_in(answer) or None, "refusal": None}
    if reasoning := reasoning_in(answer):
        message["reasoning_content"] = reasoning
    if calls := calls_in(answer):
        message["tool_calls"] = [
            _reply_call(call.call_id, call.name, call.arguments, call.data, request) for call in calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    if request.token_ids and answer.tokens is not None:
        message |= token_fields(answer.tokens)
    logprobs: dict[str, Any] | None = None
    if request.logprobs and (tokens := answer.tokens) is not None:
        if tokens.entries_json is not None:
            logprobs = {"content": tokens.entries_json, "refusal": None}
        elif tokens.logprobs is not None:
            logprobs = {"content": logprobs_content(tokens), "refusal": None}
    return {
        "id": f"chatcmpl-{answer.answer_id}",
        "object": "chat.completion",
        "created": int(answer.created_at),
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": answer.end.value}],
        "usage": _usage(answer.usage),
    }


def _reply_call(call_id: str, name: str, arguments: str, parsed: Any, request: PolicyRequest) -> dict[str, Any]:
    known = request.names.get(name)
    if known is not None and known.custom:
        call_id, text = custom_input(call_id, arguments, parsed)
        return {"id": call_id, "type": "custom", "custom": {"name": known.name, "input": text}}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def token_fields(tokens: AnswerTokens) -> dict[str, Any]:
    """The token fields of a message or item; nothing of an endpoint that told no ids."""
    ids = tokens.ids_json if tokens.ids_json is not None else tokens.ids
    if not ids:
        return {}
    fields: dict[str, Any] = {"prompt_token_ids": tokens.prompt_json or tokens.prompt_ids, "generation_token_ids": ids}
    logprobs = tokens.logprobs_json if tokens.logprobs_json is not None else tokens.logprobs
    return fields | ({} if logprobs is None else {"generation_log_probs": logprobs})


def logprobs_content(tokens: AnswerTokens) -> list[dict[str, Any]]:
    """``logprobs`` entries of OpenAI's dialects: text, logprob and bytes of each sampled token."""
    texts: Sequence[str] = tokens.texts if tokens.texts is not None else [f"token_id:{one}" for one in tokens.ids]
    # Made once for each of the few thousand different tokens that an answer has, and not changed by anybody.
    data = {text: [*text.encode("utf-8", "replace")] for text in {*texts}}
    return [
        {"token": text, "logprob": logprob, "bytes": data[text], "top_logprobs": []}
        for text, logprob in zip(texts, tokens.logprobs or (), strict=False)
    ]


def chat_events(completion: Mapping[str, Any], *, usage: bool) -> Iterator[bytes]:
    """The chunks of a completion, of ours or of an endpoint. ``usage``: whether the last one reports it."""
    head = {key: completion.get(key) for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    if usage:
        head["usage"] = None
    for choice in completion.get("choices") or ():
        yield from _choice(head, choice)
    if usage and completion.get("usage"):
        yield data({**head, "choices": [], "usage": completion["usage"]})
    yield b"data: [DONE]\n\n"


def _choice(head: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[bytes]:
    index, message = choice.get("index", 0), choice["message"]
    entries = (choice.get("logprobs") or {}).get("content") or []
    told = 0

    def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: int = LOGPROBS_PER_CHUNK) -> bytes:
        nonlocal told
        made = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if told < len(entries) and logprobs:
            made["logprobs"] = {"content": entries[told : told + logprobs], "refusal": None}
            told += logprobs
        return data({**head, "choices": [made]})

    yield chunk({"role": "assistant", "content": ""}, logprobs=0)
    for delta in _deltas(message):
        yield chunk(delta)
    while told < len(entries):
        yield chunk({})
    tokens = {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    yield chunk(tokens, choice.get("finish_reason") or "stop")


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in ("reasoning_content", "content", "refusal"):
        for piece in pieces(message.get(key) or ""):
            yield {key: piece}
    for number, call in enumerate(message.get("tool_calls") or ()):
        kind = call.get("type") or "function"
        text_key = "input" if kind == "custom" else "arguments"
        inner = call[kind]
        start = {"index": number, "id": call.get("id"), "type": kind, kind: {"name": inner["name"], text_key: ""}}
        yield {"tool_calls": [start]}
        for piece in pieces(inner.get(text_key) or ""):
            yield {"tool_calls": [{"index": number, kind: {text_key: piece}}]}


# An answer as a chat completion, whole and streamed.

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
ONE_ANSWER = "asks for several answers; one request gets one answer here"
NOT_STORED = "refers to a conversation stored elsewhere; nothing is stored here: send the whole conversation"
_REFUSED = {
    "logit_bias": "changes the policy's distribution; its tokens would no longer be its own",
    "functions": "is the old form of 'tools'; use 'tools'",
    "function_call": "is the old form of 'tool_choice'; use 'tool_choice'",
    "audio": "asks for audio; this model writes text only",
    "echo": "is not possible here",
    "suffix": "is not possible here",
    "prompt": "is not read here; send 'messages'",
    "background": "asks for an answer to be fetched later; nothing is stored here",
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
}
_USED = frozenset(
    {
        *SAMPLING,
        *_REFUSED,
        *("messages", "tools", "tool_choice", "max_completion_tokens", "max_tokens", "stop", "stream"),
        *("stream_options", "response_format", "logprobs", "return_token_ids", "return_token_id_information", "n"),
        *("best_of", "modalities", "web_search_options", "store", "metadata", "model"),
    }
)


class ChatAdapter:
    """Chat Completions."""

    def lower(self, body: Body, cache: ConversationCache | None = None) -> PolicyRequest:
        if cache is None:
            table, request = _parameters(body, _tools(body))
        else:
            given = {key: value for key, value in body.items() if key != "messages"}
            table, request = cache.parameters(
                "lowered",
                Dialect.CHAT,
                given,
                lambda: _parameters(body, cache.tools(body.get("tools"), lambda: _tools(body))),
            )
        return request.asking(_messages(body, table, cache))

    def reply(self, answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
        return completion_of(answer, request)

    def events(self, reply: Mapping[str, Any], request: PolicyRequest) -> Iterator[bytes]:
        return chat_events(reply, usage=request.stream_usage)

    def opening(
        self, answer_id: str, created_at: float, model: str, request: PolicyRequest, body: Body
    ) -> dict[str, Any] | None:
        return None

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


def _parameters(body: Body, table: ToolTable) -> tuple[ToolTable, PolicyRequest]:
    """A request without its messages."""
    one_answer(body)
    refuse_set(body, _REFUSED)
    if body.get("modalities") not in (None, [], ["text"]):
        refuse("modalities", "asks for more than text; this model writes text only")
    asked = sampling_at(body, *SAMPLING)
    budget = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    if (limit := number_at(body, budget, low=1, whole=True)) is not None:
        asked["max_tokens"] = limit
    if stop := stop_at(body, "stop"):
        asked["stop"] = stop
    return table, PolicyRequest(
        messages=(),
        tools=table.tools or None,
        names=table.names,
        asked=asked,
        stream=flag_at(body, "stream"),
        stream_usage=flag_at(object_at(body, "stream_options", ""), "include_usage"),
        tool_choice=chosen(body.get("tool_choice"), table),
        response_format=object_at(body, "response_format", "") or None,
        logprobs=flag_at(body, "logprobs"),
        token_ids=wants_token_ids(body),
        extra=rest_of(body, _USED),
    )


def one_answer(body: Body) -> None:
    """Refuse a request for several answers, in any dialect."""
    for key in ("n", "best_of"):
        if (number_at(body, key, whole=True) or 1) != 1:
            refuse(key, ONE_ANSWER)


def wants_token_ids(body: Body) -> bool:
    return flag_at(body, "return_token_ids") or flag_at(body, "return_token_id_information")


def _messages(body: Body, table: ToolTable, cache: ConversationCache | None) -> list[dict[str, Any]]:
    value = body.get("messages")
    if not isinstance(value, list | tuple) or not value:
        refuse("messages", "must be a list of at least one message")

    def lower_from(start: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        for end, (where, message) in enumerate(objects_in(value, "messages", start), start + 1):
            yield end, [_message(message, where, table)]

    return lead_system(lowered_history(cache, body.get("tools"), value, lower_from))


def _message(message: Body, where: str, table: ToolTable) -> dict[str, Any]:
    role, content, at = message.get("role"), message.get("content"), f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": system_text(content, at)}
    if role == "user":
        return {"role": "user", "content": openai_content(content, at) or ""}
    if role == "tool":
        call_id = text_at(message, "tool_call_id", where, default="")
        return {"role": "tool", "tool_call_id": call_id, "content": openai_content(content, at) or ""}
    if role != "assistant":
        refuse(f"{where}.role", f"is {role!r}; it must be system, developer, user, assistant or tool")
    answer: dict[str, Any] = {"role": "assistant", "content": answer_text(content, at)}
    if answer["content"] is None and isinstance(message.get("refusal"), str):
        answer["content"] = message["refusal"]
    if reasoning := reasoning_of(message, where):
        answer["reasoning_content"] = reasoning
    if message.get("function_call"):
        refuse(f"{where}.function_call", "is the old form of 'tool_calls'; use 'tool_calls'")
    if calls := [_call(call, at, table) for at, call in objects_in(message.get("tool_calls"), f"{where}.tool_calls")]:
        answer["tool_calls"] = calls
    return answer


def _call(call: Body, where: str, table: ToolTable) -> dict[str, Any]:
    call_id = text_at(call, "id", where, default="")
    kind = call.get("type") or "function"
    if kind == "custom":
        custom, at = object_at(call, "custom", where), f"{where}.custom"
        text = custom_arguments(text_at(custom, "input", at), call_id, at)
        return called(table.flat_name(text_at(custom, "name", at)), call_id, text)
    if kind != "function":
        refuse(f"{where}.type", f"is {kind!r}; it must be 'function' or 'custom'")
    function, at = object_at(call, "function", where), f"{where}.function"
    return called(table.flat_name(text_at(function, "name", at)), call_id, arguments_at(function, at))


def arguments_at(function: Body, where: str) -> str:
    """A call's arguments: JSON text, or the data itself, which some harnesses send."""
    value = function.get("arguments")
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return json_at(value, f"{where}.arguments")
    refuse(f"{where}.arguments", f"must be JSON text, not {kind_of(value)}")


def _tools(body: Body) -> ToolTable:
    table = ToolTable()
    for where, tool in objects_in(body.get("tools"), "tools"):
        _add_tool(table, tool, where)
    return table


def _add_tool(table: ToolTable, tool: Body, where: str) -> None:
    kind = tool.get("type") or "function"
    if kind == "function":
        table.add(object_at(tool, "function", where), f"{where}.function")
    elif kind == "custom":
        table.add_custom(object_at(tool, "custom", where), f"{where}.custom")
    elif not isinstance(kind, str):
        refuse(f"{where}.type", f"must be a string, not {kind_of(kind)}")
