"""Refusals on inference routes: every error in the words of the caller's dialect, whatever part of a server raised it.

SDKs raise their typed exceptions from these bodies, and harnesses decide by them whether to try again, to compact
their history, or to give up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import orjson
from starlette.responses import Response
from starlette.types import Scope

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.gateway.dialects.errors import anthropic_error, openai_error
from nemo_gym.http.openai_client import SHOULD_RETRY_HEADER
from nemo_gym.http.problems import http_error

_RATE_LIMITED = 429
_RETRIED_BY_STATUS = frozenset({408, 409, _RATE_LIMITED})
_DIALECT_BY_ROUTE = {**PATHS, "/v1/messages/count_tokens": Dialect.MESSAGES}


def dialect_error(dialect: Dialect, error: NemoGymError) -> Response:
    """The answer to a request of ``dialect`` that ended with ``error``; ``Retry-After`` where the error says when,
    and with every 429."""
    status, body = (anthropic_error if dialect is Dialect.MESSAGES else openai_error)(error)
    headers = {}
    retry_after_s = error.details.get("retry_after_s")
    if retry_after_s is not None or status == _RATE_LIMITED:
        # Whole seconds, and never none: Codex gives up at once over a 429 that does not say when to come back, or says
        # at once.
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s or 0)))
    if error.details.get("retries_spent"):
        headers[SHOULD_RETRY_HEADER] = "false"
    elif error.retryable:
        headers[SHOULD_RETRY_HEADER] = "true"
    elif status >= 500 or status in _RETRIED_BY_STATUS:
        headers[SHOULD_RETRY_HEADER] = "false"
    return Response(orjson.dumps(body, default=str), status, headers, "application/json")


def relayed_error(dialect: Dialect, status: int, body: bytes) -> Response:
    """An endpoint's refusal, said in another dialect than its own."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    said = value.get("error") if isinstance(value, dict) else None
    message = said.get("message") if isinstance(said, dict) else said
    text = message if isinstance(message, str) and message else body[:500].decode(errors="replace")
    return dialect_error(dialect, http_error(status, text or f"the endpoint answered {status}"))


def inference_path(path: str) -> str | None:
    """The part of an inference route's path from ``/v1/`` on, with or without a session before it; ``None`` for any
    other route."""
    if path.startswith("/v1/"):
        return path
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[1] == "sessions" and (at := f"/{parts[3]}".find("/v1/")) >= 0:
        return f"/{parts[3]}"[at:]
    return None


def dialect_of(path: str, header_names: Iterable[bytes] = ()) -> Dialect | None:
    """The dialect in which a request for ``path`` expects its answers; ``None`` for what is no inference route. A
    path under ``/v1/`` that does not exist is answered as the caller's headers suggest."""
    route = inference_path(path)
    if route is None:
        return None
    if (known := _DIALECT_BY_ROUTE.get(route)) is not None:
        return known
    return Dialect.MESSAGES if b"anthropic-version" in header_names else Dialect.CHAT


def inference_refusal(scope: Scope, error: NemoGymError) -> Response | None:
    """The answer to a request that ended with ``error``, if it was one for inference; see `shape_errors`."""
    dialect = dialect_of(scope["path"], (name for name, _ in scope["headers"]))
    return None if dialect is None else dialect_error(dialect, error)
