"""Errors as each dialect words them, so that every SDK raises its own exception and harnesses know what to do.

| status | OpenAI's ``type`` (``code``) | Anthropic's ``type`` |
|---|---|---|
| 400, 413, 422 → 400 | ``invalid_request_error`` | ``invalid_request_error`` |
| overflow, 400 | ``invalid_request_error`` (``context_length_exceeded``) | the same: "prompt is too long: …" |
| 401 | ``invalid_request_error`` (``invalid_api_key``) | ``authentication_error`` |
| 403 | ``permission_error`` | ``permission_error`` |
| 404 | ``invalid_request_error`` | ``not_found_error`` |
| 409 | ``conflict_error`` | ``invalid_request_error`` |
| 429 | ``rate_limit_error`` (``rate_limit_exceeded``) | ``rate_limit_error`` |
| 503, 529 | ``server_error`` | ``overloaded_error`` |
| 504 | ``server_error`` | ``timeout_error`` |
| other 5xx | ``server_error`` | ``api_error`` |

Where no ``code`` is given above, it is the error's own. Details are never shown, except ``param``, which is the
caller's own field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Scope

from nemo_gym.contract.errors import InvalidBodyError, ModelError, NemoGymError
from nemo_gym.gateway.dialects import PATHS, Dialect
from nemo_gym.http.openai_client import SHOULD_RETRY_HEADER
from nemo_gym.http.problems import http_error

_OPENAI = {401: "invalid_request_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ContextOverflowError(ModelError):
    """The prompt alone leaves no room in the policy's context. Harnesses compact their history when they see it."""

    code = "context_length_exceeded"
    status = 400

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in"
            f" {prompt_tokens} tokens. Please reduce the length of the messages.",
            prompt_tokens=prompt_tokens,
            limit=limit,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


def status_of(error: NemoGymError) -> int:
    """The status of an error towards a harness: both dialects say 400 for a body they do not take. What the types of
    a NeMo Gym plugin's hook refuse, field by field, stays the 422 that its framework answers."""
    return 400 if isinstance(error, InvalidBodyError) and not error.details.get("errors") else error.status


def openai_type(error: NemoGymError) -> str:
    status = status_of(error)
    return _OPENAI.get(status, "server_error" if status >= 500 else "invalid_request_error")


def openai_code(error: NemoGymError) -> str:
    return _OPENAI_CODES.get(error.status, error.code)


def openai_error(error: NemoGymError) -> tuple[int, dict[str, Any]]:
    """Status and body, for Chat Completions and Responses."""
    said = {
        "message": error.message,
        "type": openai_type(error),
        "param": error.details.get("param"),
        "code": openai_code(error),
    }
    return status_of(error), {"error": said}


def anthropic_type(error: NemoGymError) -> str:
    status = status_of(error)
    return _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")


def anthropic_message(error: NemoGymError) -> str:
    if isinstance(error, ContextOverflowError):
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return error.message


def anthropic_error(error: NemoGymError) -> tuple[int, dict[str, Any]]:
    """Status and body, for Messages."""
    said = {"type": anthropic_type(error), "message": anthropic_message(error)}
    return status_of(error), {"type": "error", "error": said}


# Refusals on inference routes: every error in the words of the caller's dialect, whatever part of a server raised
# it.
#
# SDKs raise their typed exceptions from these bodies, and harnesses decide by them whether to try again, to compact
# their history, or to give up.

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


# "maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens" (OpenAI, vLLM), "request
# (9000 tokens) exceeds the available context size (8192 tokens)" (llama.cpp); not the tokens that an answer may have.
_CONTEXT = re.compile(r"context.{0,3}(?:length|window|size)\D{1,20}(\d{1,12})", re.IGNORECASE)
_OF_A_PROMPT = re.compile(r"(?<!total of )(?<!total of at least )\b(\d{1,12})(?: input)? tokens")


def overflow_of(body: bytes) -> ContextOverflowError | None:
    """What an endpoint's refusal says of a prompt that exceeds its context; ``None`` where it speaks of anything else.
    Endpoints word it in their own ways, and harnesses know one."""
    text = _message_of(body)
    if (found := _CONTEXT.search(text)) is None:
        return None
    limit = int(found[1])
    prompt_tokens = max(map(int, _OF_A_PROMPT.findall(text)), default=0)
    return ContextOverflowError(prompt_tokens, limit) if prompt_tokens > limit else None


def relayed_error(dialect: Dialect, status: int, body: bytes) -> Response:
    """An endpoint's refusal, said in another dialect than its own."""
    if status == 400 and (overflow := overflow_of(body)) is not None:
        return dialect_error(dialect, overflow)
    return dialect_error(dialect, http_error(status, _message_of(body) or f"the endpoint answered {status}"))


def _message_of(body: bytes) -> str:
    """The sentence in an error's body, or the beginning of another body."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    said = value.get("error") if isinstance(value, dict) else None
    message = said.get("message") if isinstance(said, dict) else said
    return message if isinstance(message, str) and message else body[:500].decode(errors="replace")


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
