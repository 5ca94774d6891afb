"""An answer as a message of Messages, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.gateway.dialects.answers import calls_in, made_up, reasoning_in, text_in
from nemo_gym.gateway.dialects.chat_reply import token_fields
from nemo_gym.gateway.dialects.messages_history import WRAPPED
from nemo_gym.gateway.dialects.sse import dumped, event, pieces
from nemo_gym.gateway.lowered import Answer, AnswerEnd, LoweredRequest


def message_of(answer: Answer, request: LoweredRequest) -> dict[str, Any]:
    """A ``message``."""
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
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": data})
    if not content:
        # Claude Code takes a message without any content for a broken stream, and asks again.
        content.append({"type": "text", "text": ""})
    usage = answer.usage
    message: dict[str, Any] = {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": _stop_reason(answer, called=bool(calls)),
        "stop_sequence": answer.stop if _stopped_by_text(answer, called=bool(calls)) else None,
        "usage": {
            # Here the prompt's tokens are those that came from no cache.
            "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        },
    }
    if request.token_ids and answer.tokens is not None:
        message |= token_fields(answer.tokens)
    return message


def _stopped_by_text(answer: Answer, *, called: bool) -> bool:
    return answer.end is AnswerEnd.STOP and answer.stop is not None and not called


def _stop_reason(answer: Answer, *, called: bool) -> str:
    if answer.end is AnswerEnd.LENGTH:
        return "max_tokens"
    if answer.end is AnswerEnd.CONTENT_FILTER:
        return "refusal"
    if called:
        return "tool_use"
    return "stop_sequence" if _stopped_by_text(answer, called=called) else "end_turn"


def messages_events(message: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of a message, of ours or of an endpoint."""
    usage = message.get("usage") or {}
    started = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event({"type": "message_start", "message": {**started, "usage": {**usage, "output_tokens": 0}}})
    for index, block in enumerate(message.get("content") or ()):
        yield event({"type": "content_block_start", "index": index, "content_block": _empty(block)})
        for delta in _deltas(block):
            yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    stop = {key: message.get(key) for key in ("stop_reason", "stop_sequence")}
    yield event({"type": "message_delta", "delta": stop, "usage": {"output_tokens": 0, **usage}})
    yield event({"type": "message_stop"})


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    begun: dict[str, dict[str, Any]] = {
        "text": {"text": ""},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    return {**block, **begun.get(block["type"], {})}


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
