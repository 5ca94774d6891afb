"""A harness's chat messages as one OpenAI Responses object, which is what ``/act`` answers with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_gym.contract.errors import RowError

_PROMPT_ROLES = ("user", "system", "developer")
_NOT_TEXT = (
    "this agent is given its task as text and begins the conversation itself: write the row so, or choose an agent"
    " that is given whole conversations (simple_agent)"
)


def response_object(
    output: list[dict[str, Any]], *, model: str, usage: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A completed Responses object around ``output`` items."""
    counted = {"input_tokens": 0, "output_tokens": 0, **(usage or {})}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            **counted,
            "total_tokens": counted["input_tokens"] + counted["output_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def text_message(text: str) -> dict[str, Any]:
    """An assistant's message item."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def output_items(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat Completions messages (assistant, tool) → Responses output items; system and user messages are input."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "assistant":
            if text := _text(message.get("content")):
                items.append(text_message(text))
            for call in message.get("tool_calls") or []:
                function = call["function"]
                items.append(
                    {
                        "id": f"fc_{uuid.uuid4().hex}",
                        "type": "function_call",
                        "call_id": call["id"],
                        "name": function["name"],
                        "arguments": function["arguments"],
                        "status": "completed",
                    }
                )
        elif message.get("role") == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": _text(message.get("content")),
                }
            )
    return items


def prompt_text(responses_create_params: Mapping[str, Any]) -> tuple[str, str]:
    """``(system, user)`` text of the public prompt; several messages of one role are joined by blank lines.

    For a harness that takes a task as text and starts a conversation of its own. Raises `RowError` naming the first
    item that it cannot be given so: an earlier answer or tool call, an image, a file.
    """
    prompt = responses_create_params.get("input", "")
    system = [responses_create_params["instructions"]] if responses_create_params.get("instructions") else []
    user: list[str] = []
    for number, message in enumerate([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt):
        where = f"responses_create_params.input[{number}]"
        kind, role = message.get("type", "message"), message.get("role")
        if kind != "message" or role not in _PROMPT_ROLES:
            what = f"a turn of the {role}" if kind == "message" else f"of type '{kind}'"
            raise RowError(f"{where} is {what}; {_NOT_TEXT}")
        (user if role == "user" else system).append(_prompt_content(message.get("content"), where))
    return "\n\n".join(filter(None, system)), "\n\n".join(filter(None, user))


def _prompt_content(content: Any, where: str) -> str:
    for number, part in enumerate([] if isinstance(content, str) else content or []):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("input_text", "text"):
            raise RowError(f"{where}.content[{number}] is of type '{kind}'; {_NOT_TEXT}")
    return _text(content)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [] if isinstance(part, dict))
