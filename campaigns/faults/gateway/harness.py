"""A minimal harness for every dialect: its conversation, its request bodies, and its parser of responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from nemo_gym.gateway.dialects import Dialect

PATHS = {Dialect.CHAT: "/chat/completions", Dialect.RESPONSES: "/responses", Dialect.MESSAGES: "/messages"}


@dataclass(frozen=True)
class Received:
    """A complete response. ``call_id``: the gateway's id of the call, which also identifies the trajectory's turn."""

    call_id: str
    history: tuple[Mapping[str, Any], ...]
    """The messages that a harness adds to its conversation."""
    text: str


@dataclass
class Conversation:
    """The messages so far, as a harness of this dialect would send them again."""

    dialect: Dialect
    history: list[Mapping[str, Any]] = field(default_factory=list)

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def body(self, *, stream: bool, max_tokens: int) -> dict[str, Any]:
        limit = {Dialect.CHAT: "max_completion_tokens", Dialect.RESPONSES: "max_output_tokens"}
        items = "input" if self.dialect is Dialect.RESPONSES else "messages"
        body = {"model": "policy", items: [*self.history], limit.get(self.dialect, "max_tokens"): max_tokens}
        return {**body, "stream": True} if stream else body

    def received(self, data: bytes, *, stream: bool) -> Received | None:
        """Return the response in ``data``, or ``None`` if it is incomplete."""
        reply = whole_reply(self.dialect, data) if stream else _json(data)
        return None if reply is None else _received(self.dialect, reply)


def _json(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def events(data: bytes) -> Iterator[dict[str, Any] | str]:
    """Yield the complete server-sent events; skip comments and pings without data."""
    for block in data.split(b"\n\n")[:-1]:
        for line in block.split(b"\n"):
            if line.startswith(b"data: "):
                payload = line[6:]
                yield "[DONE]" if payload == b"[DONE]" else orjson.loads(payload)


def whole_reply(dialect: Dialect, data: bytes) -> dict[str, Any] | None:
    """Return the reply that a stream carries, or ``None`` if the stream is incomplete. Raises `ValueError` for a
    stream that reports a failure."""
    parsed = [*events(data)]
    for event in parsed:
        if isinstance(event, dict) and (event.get("type") == "response.failed" or event.get("error")):
            raise ValueError(f"the stream failed: {event}")
    if dialect is Dialect.CHAT:
        return _joined_chat([event for event in parsed if isinstance(event, dict)]) if "[DONE]" in parsed else None
    last = parsed[-1] if parsed else None
    if not isinstance(last, dict):
        return None
    if dialect is Dialect.RESPONSES:
        return last["response"] if last["type"] in ("response.completed", "response.incomplete") else None
    if last["type"] != "message_stop":
        return None
    return _joined_message([event for event in parsed if isinstance(event, dict)])


def _joined_chat(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            for key in ("content", "reasoning_content"):
                if choice["delta"].get(key):
                    message[key] = message.get(key, "") + choice["delta"][key]
            finish = choice.get("finish_reason") or finish
    return {"id": chunks[0]["id"], "choices": [{"message": message, "finish_reason": finish}]}


def _joined_message(stream: list[dict[str, Any]]) -> dict[str, Any]:
    message = next(event["message"] for event in stream if event["type"] == "message_start")
    content: list[dict[str, Any]] = []
    for event in stream:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            for key in ("text", "thinking", "signature"):
                if key in event["delta"]:
                    content[-1][key] = content[-1].get(key, "") + event["delta"][key]
    return {**message, "content": content}


def _received(dialect: Dialect, reply: Mapping[str, Any]) -> Received:
    call_id = str(reply["id"]).rsplit("-", 1)[-1].rsplit("_", 1)[-1]
    if dialect is Dialect.CHAT:
        message = reply["choices"][0]["message"]
        return Received(call_id, (message,), message.get("content") or "")
    if dialect is Dialect.RESPONSES:
        parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
        return Received(call_id, tuple(reply["output"]), "".join(part["text"] for part in parts))
    text = "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    return Received(call_id, ({"role": "assistant", "content": reply["content"]},), text)
