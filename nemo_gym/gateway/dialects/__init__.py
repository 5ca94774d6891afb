"""Wire dialects of inference: Chat Completions, Responses, Messages; as bodies and as server-sent events."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from nemo_gym.gateway.policy_request import OVERRIDING, TOKEN_BUDGETS


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
    """Return the request with a session's sampling parameters, under the dialect's names, and without others that
    override them."""
    if not sampling:
        return body
    changed = {key: value for key, value in body.items() if key not in OVERRIDING}
    for key, value in sampling.items():
        if key == "max_output_tokens":
            given = "max_completion_tokens" if "max_completion_tokens" in changed else "max_tokens"
            for budget in TOKEN_BUDGETS:
                changed.pop(budget, None)
            changed[key if dialect is Dialect.RESPONSES else given] = value
        elif key == "seed" and dialect is not Dialect.CHAT:
            continue  # only Chat Completions has it
        elif key == "stop" and dialect is Dialect.MESSAGES:
            changed["stop_sequences"] = [value] if isinstance(value, str) else value
        else:
            changed[key] = value
    return changed
