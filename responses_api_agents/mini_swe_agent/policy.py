"""The policy endpoint of one attempt, as Chat Completions, with bounded and classified retries."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from nemo_gym.errors import ModelError
from nemo_gym.gateway.refusals import SHOULD_RETRY_HEADER
from nemo_gym.session import InferenceEndpoint, is_context_exceeded

RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})


class ContextExceededError(ModelError):
    """The conversation grew past what the model takes: the policy's doing, and no failure of its endpoint."""

    code = "context_exceeded"


class PolicyClient:
    """Asks one attempt's endpoint. Retries what a later try may cure, at most ``max_tries`` times."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: InferenceEndpoint,
        *,
        sampling: dict[str, Any],
        request_timeout_s: float,
        max_tries: int,
    ) -> None:
        self._session, self._endpoint, self._sampling = session, endpoint, sampling
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._max_tries = max_tries

    async def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """One completion. Raises `ModelError` when the endpoint refuses, or fails every try."""
        body = orjson.dumps({"model": self._endpoint.model, "messages": messages, "tools": tools, **self._sampling})
        headers = {"Authorization": f"Bearer {self._endpoint.token}", "Content-Type": "application/json"}
        url = f"{self._endpoint.base_url.rstrip('/')}/chat/completions"
        for tried in range(1, self._max_tries + 1):
            try:
                async with self._session.post(url, data=body, headers=headers, timeout=self._timeout) as reply:
                    content = await reply.read()
                    if reply.status == 200:
                        return _completion(content)
                    problem = f"answered {reply.status}: {_problem(content)}"
                    if reply.status in (400, 413) and is_context_exceeded(problem):
                        raise ContextExceededError(f"the conversation exceeds the model's context ({problem})")
                    final = reply.headers.get(SHOULD_RETRY_HEADER) == "false"
                    if final or reply.status not in RETRIED_STATUSES:
                        raise ModelError(f"the policy endpoint {problem}", status=reply.status)
                    pause = _retry_after(reply.headers.get("Retry-After"), default=0.5 * 2**tried)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem, pause = f"failed: {type(error).__name__}: {error}", 0.5 * 2**tried
            if tried < self._max_tries:
                await asyncio.sleep(min(pause, 30.0))
        raise ModelError(f"the policy endpoint {problem} (tried {self._max_tries} times)", retryable=True)


def _problem(content: bytes) -> str:
    """What went wrong, in the words of an error body."""
    said = content[:300].decode("utf-8", "replace")
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return said
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else said


def _completion(content: bytes) -> dict[str, Any]:
    try:
        completion = orjson.loads(content)
        completion["choices"][0]["message"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"the policy endpoint's answer is not a chat completion: {content[:200]!r}") from error
    return dict(completion)


def _retry_after(value: str | None, default: float) -> float:
    try:
        return float(value) if value is not None else default
    except ValueError:
        return default
