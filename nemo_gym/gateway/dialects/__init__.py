"""Wire dialects of inference: Chat Completions, Responses, Messages; as bodies and as server-sent events."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from nemo_gym.gateway.policy_request import OVERRIDING, TOKEN_BUDGETS, without_metadata_parameters


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
    overriding = OVERRIDING if sampling.keys() - {"seed"} else frozenset()
    budgets = [sampling[name] for name in TOKEN_BUDGETS if sampling.get(name) is not None]
    changed = without_metadata_parameters(body, overriding.union(sampling, TOKEN_BUDGETS if budgets else ()))
    changed = {key: value for key, value in changed.items() if key not in overriding}
    if budgets:
        newer = dialect is Dialect.CHAT and "max_completion_tokens" in body
        name = "max_completion_tokens" if newer else "max_tokens"
        changed = {key: value for key, value in changed.items() if key not in TOKEN_BUDGETS}
        changed["max_output_tokens" if dialect is Dialect.RESPONSES else name] = min(budgets)
    for key, value in sampling.items():
        if key in TOKEN_BUDGETS:
            continue
        elif key == "seed" and dialect is not Dialect.CHAT:
            continue  # only Chat Completions has it
        elif key == "stop" and dialect is Dialect.MESSAGES:
            changed["stop_sequences"] = [value] if isinstance(value, str) else value
        else:
            changed[key] = value
    return changed
