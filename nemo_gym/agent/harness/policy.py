"""The policy endpoint of one attempt, asked from an agent server, with bounded and classified retries.

Every attempt of a server asks over the connections of that server's event loop (`nemo_gym.http.exchange`). A client of
its own costs an attempt a TLS context, which reads every certificate authority of the system: 25 ms of CPU.
"""

from __future__ import annotations

from typing import Any, Literal

import orjson

from nemo_gym._util.backoff import NETWORK_JITTER, Backoff, retry_after_s
from nemo_gym.contract.errors import ModelError
from nemo_gym.contract.model_limits import CONNECT_TIMEOUT_S, WAIT_BEYOND_S
from nemo_gym.contract.session import InferenceEndpoint
from nemo_gym.contract.verdict import is_context_exceeded
from nemo_gym.http.connections import BROKEN, Patience, is_own_timeout
from nemo_gym.http.exchange import read_whole, send_once
from nemo_gym.http.openai_client import SHOULD_RETRY_HEADER
from nemo_gym.http.tracing import inject

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0

Route = Literal["/chat/completions", "/responses"]


class ContextExceededError(ModelError):
    """The conversation grew past what the model takes: the policy's doing, and no failure of its endpoint."""

    code = "context_exceeded"


class PolicyClient:
    """Asks one attempt's endpoint. Retries what a later try may cure, at most ``max_tries`` times."""

    def __init__(self, endpoint: InferenceEndpoint, *, max_tries: int) -> None:
        self.endpoint = endpoint
        self._base_url = endpoint.base_url.rstrip("/")
        self._model = endpoint.model
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}
        # The endpoint ends a call itself, and says why; this is for one that does not answer at all.
        self._limit_s = endpoint.request_timeout_s + WAIT_BEYOND_S
        self._patience = Patience(CONNECT_TIMEOUT_S, self._limit_s)
        self._max_tries = max_tries

    async def ask(self, route: Route, body: dict[str, Any]) -> dict[str, Any]:
        """The endpoint's answer to ``body``, a JSON object. Raises `ModelError` when the endpoint refuses, or fails
        every try."""
        data = orjson.dumps({**body, "model": self._model})
        headers = {**self._headers}
        inject(headers)
        url = self._base_url + route
        backoff = Backoff(
            first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, tries=self._max_tries, jitter=NETWORK_JITTER
        )
        while True:
            try:
                reply = await send_once("POST", url, headers=headers, data=data, patience=self._patience)
                content = await read_whole(reply)
                if reply.status == 200:
                    return _object(content)
                problem = f"answered {reply.status}: {_problem(content)}"
                if reply.status in (400, 413) and is_context_exceeded(problem):
                    raise ContextExceededError(f"the conversation exceeds the model's context ({problem})")
                final = reply.headers.get(SHOULD_RETRY_HEADER) == "false"
                if final or reply.status not in RETRIED_STATUSES:
                    raise ModelError(f"the policy endpoint {problem}", status=reply.status)
                asked_s = retry_after_s(reply.headers.get("retry-after"))
            except BROKEN as error:
                if is_own_timeout(error):
                    raise ModelError(f"the policy endpoint did not answer within {self._limit_s:g} s") from error
                problem, asked_s = f"failed: {type(error).__name__}: {error}", None
            if not await backoff.again(instead_s=asked_s):
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


def _object(content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ModelError(f"the policy endpoint's answer is no JSON object: {content[:200]!r}")
    return answer
