"""Wire dialects of inference: Chat Completions, Responses, Messages; as bodies and as server-sent events."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Dialect(StrEnum):
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


PATHS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
}


def apply_sampling(dialect: Dialect, body: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the request with a session's sampling parameters, under the dialect's names."""
    if not sampling:
        return body
    changed = dict(body)
    for key, value in sampling.items():
        if key == "max_output_tokens" and dialect is not Dialect.RESPONSES:
            given = "max_completion_tokens" if "max_completion_tokens" in changed else "max_tokens"
            changed[given] = value
        elif key == "seed" and dialect is not Dialect.CHAT:
            continue  # only Chat Completions has it
        elif key == "stop" and dialect is Dialect.MESSAGES:
            changed["stop_sequences"] = [value] if isinstance(value, str) else value
        else:
            changed[key] = value
    return changed
