"""A small client of an OpenAI-compatible endpoint, over the shared HTTP session, with bounded retries."""

from __future__ import annotations

from typing import Any

import structlog
from pydantic import BaseModel, Field

from nemo_gym._util.tasks import NETWORK_JITTER, Backoff, retry_after_s
from nemo_gym.http.client import get_response_json, raise_for_status, request

RATE_LIMIT_ERROR_CODES = [429, 502, 503, 504, 520]
"""The endpoint is overloaded or restarting, so waiting may help."""
RETRY_ERROR_CODES = [*RATE_LIMIT_ERROR_CODES, 500]
SHOULD_RETRY_HEADER = "x-should-retry"
"""``true`` or ``false``; the official SDKs give it precedence over the status."""
MAX_TRIES = 5
MAX_NUM_TRIES = 3
"""NeMo Gym's default for its model servers' setting ``max_http_attempts``."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0

log = structlog.get_logger(__name__)


class NeMoGymAsyncOpenAI(BaseModel):
    """Calls that return the reply's JSON; a final error status raises aiohttp's ``ClientResponseError``."""

    base_url: str
    api_key: str = Field(repr=False)
    internal: bool = False
    default_headers: dict[str, str] = Field(default_factory=dict, repr=False)
    max_http_attempts: int = Field(MAX_TRIES, ge=1)

    async def _request(self, method: str, url: str, json: Any = None) -> Any:
        headers = {**self.default_headers, "Authorization": f"Bearer {self.api_key}"}
        tries = self.max_http_attempts
        backoff = Backoff(first_s=FIRST_BACKOFF_S, longest_s=MAX_BACKOFF_S, tries=tries, jitter=NETWORK_JITTER)
        while True:
            response = await request(method, url, self.internal, json=json, headers=headers)
            if response.status not in RETRY_ERROR_CODES:
                break
            if response.headers.get(SHOULD_RETRY_HEADER) == "false":  # set by a gateway that has retried already
                break
            await response.read()
            if not await backoff.again(instead_s=retry_after_s(response.headers.get("Retry-After"))):
                break
            log.info("retrying the model call", status=response.status)
        await raise_for_status(response)
        return await get_response_json(response)

    async def create_models(self) -> Any:
        return await self._request("GET", f"{self.base_url}/models")

    async def create_chat_completion(self, **params: Any) -> Any:
        return await self._request("POST", f"{self.base_url}/chat/completions", params)

    async def create_completion(self, **params: Any) -> Any:
        return await self._request("POST", f"{self.base_url}/completions", params)

    async def create_response(self, **params: Any) -> Any:
        return await self._request("POST", f"{self.base_url}/responses", params)

    async def create_tokenize(self, **params: Any) -> Any:
        return await self._request("POST", f"{self.base_url.removesuffix('/v1')}/tokenize", params)
