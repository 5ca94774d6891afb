"""A check that every response of a gateway must pass, whatever the request."""

from __future__ import annotations

import orjson

from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.errors import dialect_of


class WrongAnswerError(AssertionError):
    """A response that no request should get."""


def check(path: str, status: int, headers: dict[str, str], body: bytes) -> None:
    """Check one response. Raises `WrongAnswerError`."""
    if status >= 500:
        raise WrongAnswerError(f"{path}: {status}: {body[:500]!r}")
    kind = headers.get("content-type", "")
    if status < 400:
        if kind.startswith("text/event-stream"):
            return
        orjson.loads(body)
        return
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WrongAnswerError(f"{path}: {status} without JSON: {body[:300]!r}") from error
    dialect = dialect_of(path)
    if dialect is None:
        has_form = kind.startswith("application/problem+json") and {"code", "detail", "status"} <= set(content)
    elif dialect is Dialect.MESSAGES:
        has_form = content.get("type") == "error" and set(content["error"]) == {"type", "message"}
    else:
        has_form = set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    if not has_form:
        raise WrongAnswerError(f"{path}: {status} in no known form: {body[:300]!r}")
