"""Messages for endpoints that speak Chat Completions only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from nemo_gym.gateway.dialects.endpoint import answer_of_completion, chat_body
from nemo_gym.gateway.dialects.messages import MessagesAdapter

_ADAPTER = MessagesAdapter()


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """A Messages request as a Chat Completions request."""
    same = {key: body[key] for key in ("model", "stream") if body.get(key) is not None}
    return {**same, **chat_body(_ADAPTER.lower(body))}


def message_of_completion(completion: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A chat completion as the reply to ``body``; without one, as a reply that shows no thinking. Raises what
    `answer_of_completion` raises."""
    asked = body or {"messages": [{"role": "user", "content": ""}]}
    answer = answer_of_completion(completion, answer_id=uuid4().hex, created_at=time.time())
    return _ADAPTER.reply(answer, _ADAPTER.lower(asked), asked)
