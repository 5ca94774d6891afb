"""Errors in the form of each dialect, so that every SDK raises its typed exception and harnesses react correctly.

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

Rows without a ``code`` use the error's own code. Details are never included, except ``param``, which names a field of
the caller's own body.
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
    """The prompt alone leaves no room in the policy's context. Harnesses compact their history on this error."""

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
    """Return the HTTP status of an error for a harness: both vendors use 400 for an invalid body. Only an error of a
    NeMo Gym plugin's typed hook, which lists each wrong field, keeps its framework's 422."""
    return 400 if isinstance(error, InvalidBodyError) and not error.details.get("errors") else error.status


def openai_code(error: NemoGymError) -> str:
    return _OPENAI_CODES.get(error.status, error.code)


def error_body(dialect: Dialect, error: NemoGymError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    status = status_of(error)
    if dialect is Dialect.MESSAGES:
        message = error.message
        if isinstance(error, ContextOverflowError):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return status, {"type": "error", "error": {"type": kind, "message": message}}
    fields = {
        "message": error.message,
        "type": _OPENAI.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": error.details.get("param"),
        "code": openai_code(error),
    }
    return status, {"error": fields}


# Error responses on inference routes: every error in the caller's dialect, whatever part of a server raised it.
#
# SDKs raise their typed exceptions from these bodies, and harnesses decide by them whether to try again, to compact
# their history, or to give up.

_RATE_LIMITED = 429
_RETRIED_BY_STATUS = frozenset({408, 409, _RATE_LIMITED})
_DIALECT_BY_ROUTE = {**PATHS, "/v1/messages/count_tokens": Dialect.MESSAGES}


def dialect_error(dialect: Dialect, error: NemoGymError) -> Response:
    """Return the response to a request of ``dialect`` that ended with ``error``. It has ``Retry-After`` if the error
    has a time, and with every 429."""
    status, body = error_body(dialect, error)
    headers = {}
    retry_after_s = error.details.get("retry_after_s")
    if retry_after_s is not None or status == _RATE_LIMITED:
        # Whole seconds, at least 1: Codex gives up on a 429 whose ``Retry-After`` is missing or 0.
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s or 0)))
    if error.details.get("retries_spent"):
        headers[SHOULD_RETRY_HEADER] = "false"
    elif error.retryable:
        headers[SHOULD_RETRY_HEADER] = "true"
    elif status >= 500 or status in _RETRIED_BY_STATUS:
        headers[SHOULD_RETRY_HEADER] = "false"
    return Response(orjson.dumps(body, default=str), status, headers, "application/json")


# "maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens" (OpenAI, vLLM), "request
# (9000 tokens) exceeds the available context size (8192 tokens)" (llama.cpp); but no limit of an answer's tokens.
_CONTEXT = re.compile(r"context.{0,3}(?:length|window|size)\D{1,20}(\d{1,12})", re.IGNORECASE)
_OF_A_PROMPT = re.compile(r"(?<!total of )(?<!total of at least )\b(\d{1,12})(?: input)? tokens")
# Where the prompt and the requested answer exceed the context together, endpoints give the parts: "you requested 32500
# tokens (500 in the messages, 32000 in the completion)" (OpenAI, DeepSeek, vLLM), "(500 of text input, 32000 in the
# output)" (OpenRouter), "500 tokens from the input messages and 32000 tokens for the completion" (SGLang).
_PART_OF_A_PROMPT = re.compile(
    r"\b(\d{1,12}) (?:in (?:the|your) (?:messages|functions|prompt)|of \w{1,20} input|tokens from the input messages)"
)
# Endpoints that say nothing of a context.
_PROMPT, _LIMIT = r"(?P<prompt>\d{1,12})", r"(?P<limit>\d{1,12})"
_IN_OTHER_WORDS = [
    re.compile(pattern)
    for pattern in (
        rf"prompt is too long: {_PROMPT} tokens > {_LIMIT}",  # Anthropic
        rf"limit of {_LIMIT} tokens\. Your messages resulted in {_PROMPT} tokens",  # OpenAI, since GPT-5
        rf"must be <= {_LIMIT}\. Given: {_PROMPT} `inputs` tokens",  # TGI
        rf"`inputs` must have less than {_LIMIT} tokens\. Given: {_PROMPT}",  # TGI
        rf"token count \({_PROMPT}\)\s{{1,8}}exceeds the maximum number of tokens allowed \({_LIMIT}\)",  # Gemini
        rf"maximum prompt length is {_LIMIT} but the request contains {_PROMPT} tokens",  # xAI
    )
]


def overflow_of(body: bytes) -> ContextOverflowError | None:
    """Return the error for an endpoint's refusal of a prompt that exceeds its context; ``None`` for any other refusal.
    Endpoints have different texts for it, and harnesses recognize only one."""
    text = _message_of(body)
    for words in _IN_OTHER_WORDS:
        if (match := words.search(text)) is not None:
            prompt_tokens, limit = int(match["prompt"]), int(match["limit"])
            return ContextOverflowError(prompt_tokens, limit) if prompt_tokens > limit else None
    if (match := _CONTEXT.search(text)) is None:
        return None
    limit = int(match[1])
    parts = _PART_OF_A_PROMPT.findall(text)
    prompt_tokens = sum(map(int, parts)) if parts else max(map(int, _OF_A_PROMPT.findall(text)), default=0)
    return ContextOverflowError(prompt_tokens, limit) if prompt_tokens > limit else None


def relayed_error(dialect: Dialect, status: int, body: bytes) -> Response:
    """Return an endpoint's error as a response in another dialect."""
    if status in (400, 413, 422) and (overflow := overflow_of(body)) is not None:
        return dialect_error(dialect, overflow)
    return dialect_error(dialect, http_error(status, _message_of(body) or f"the endpoint answered {status}"))


def _message_of(body: bytes) -> str:
    """Return the message in an error's body, or the beginning of any other body."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else body[:500].decode(errors="replace")


def inference_path(path: str) -> str | None:
    """Return the path of an inference route from ``/v1/`` on, without a session's prefix; ``None`` for any other
    route."""
    if path.startswith("/v1/"):
        return path
    parts = path.split("/", 3)
    if len(parts) == 4 and parts[1] == "sessions" and (at := f"/{parts[3]}".find("/v1/")) >= 0:
        return f"/{parts[3]}"[at:]
    return None


def dialect_of(path: str, header_names: Iterable[bytes] = ()) -> Dialect | None:
    """Return the dialect of responses to requests for ``path``; ``None`` if it is no inference route. For an unknown
    path under ``/v1/``, the caller's headers decide."""
    route = inference_path(path)
    if route is None:
        return None
    if (dialect := _DIALECT_BY_ROUTE.get(route)) is not None:
        return dialect
    return Dialect.MESSAGES if b"anthropic-version" in header_names else Dialect.CHAT


def inference_refusal(scope: Scope, error: NemoGymError) -> Response | None:
    """Return the response to an inference request that ended with ``error``, else ``None``; see `shape_errors`."""
    dialect = dialect_of(scope["path"], (name for name, _ in scope["headers"]))
    return None if dialect is None else dialect_error(dialect, error)
