"""The policy of one attempt, asked in OpenAI's Responses dialect by OpenAI's client, which retries as servers ask."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Self

import openai

from nemo_gym.errors import ModelError
from nemo_gym.session import InferenceEndpoint, is_context_exceeded


class ContextExceededError(ModelError):
    """The conversation grew past what the model takes."""

    code = "context_exceeded"


class Policy:
    """Raises `ModelError` when the endpoint refuses, or fails ``max_tries`` times."""

    def __init__(self, endpoint: InferenceEndpoint, timeout_s: float, max_tries: int) -> None:
        self._model = endpoint.model
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.token,
            timeout=timeout_s,
            max_retries=max_tries - 1,
            # Authorities as all else here has them: the system's, or those of SSL_CERT_FILE.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=ssl.create_default_context()),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        await self._client.close()

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The Responses object that answers ``body``."""
        try:
            reply: Any = await self._client.post("/responses", cast_to=object, body={**body, "model": self._model})
        except openai.APIStatusError as error:
            told = error.body.get("message") if isinstance(error.body, dict) else None
            said = str(told or error.message)[:500]
            if error.status_code in (400, 413) and is_context_exceeded(said):
                raise ContextExceededError(f"the conversation exceeds the model's context ({said})") from None
            status = error.status_code
            raise ModelError(f"the policy endpoint answered {status}: {said}", status=status) from error
        except openai.APIError as error:
            raise ModelError(f"the policy endpoint failed: {error.message}", retryable=True) from error
        if not isinstance(reply, dict) or not isinstance(reply.get("output"), list):
            raise ModelError(f"the policy endpoint's answer is no Responses object: {str(reply)[:200]!r}")
        return reply
