"""A failure inside a stream, whose status was sent long ago, as each dialect says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.errors import ContextOverflowError, anthropic_error, openai_code, openai_error


def failure_event(
    dialect: Dialect, error: NemoGymError, *, response: Mapping[str, Any] | None = None, number: int = 0
) -> bytes:
    """The last event of a stream that fails; no end marker may follow it. ``response`` and ``number`` are for
    Responses: the response as it was begun, and the event's sequence number."""
    if dialect is Dialect.CHAT:
        return _event(None, openai_error(error)[1])
    if dialect is Dialect.MESSAGES:
        return _event("error", anthropic_error(error)[1])
    known = error.status == 429 or isinstance(error, ContextOverflowError)
    code = openai_code(error) if known else "server_error"
    if response is None:
        return _event(
            "error",
            {"type": "error", "sequence_number": number, "code": code, "message": error.message, "param": None},
        )
    failed = {**response, "status": "failed", "error": {"code": code, "message": error.message}}
    return _event("response.failed", {"type": "response.failed", "sequence_number": number, "response": failed})


def _event(kind: str | None, value: Mapping[str, Any]) -> bytes:
    head = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"
