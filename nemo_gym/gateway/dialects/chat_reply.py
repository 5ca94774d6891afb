"""An answer as a chat completion, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_gym.gateway.dialects.answers import calls_in, reasoning_in, text_in
from nemo_gym.gateway.dialects.sse import data, pieces
from nemo_gym.gateway.dialects.tools import custom_input
from nemo_gym.gateway.lowered import Answer, AnswerTokens, AnswerUsage, LoweredRequest

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")
LOGPROBS_PER_CHUNK = 64


def completion_of(answer: Answer, request: LoweredRequest) -> dict[str, Any]:
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


def _reply_call(call_id: str, name: str, arguments: str, parsed: Any, request: LoweredRequest) -> dict[str, Any]:
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
