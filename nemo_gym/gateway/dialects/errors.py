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

from typing import Any

from nemo_gym.contract.errors import InvalidBodyError, ModelError, NemoGymError

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
    """The status of an error towards a harness: both dialects say 400 for a body they do not take."""
    return 400 if isinstance(error, InvalidBodyError) else error.status


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
