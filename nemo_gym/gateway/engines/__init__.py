"""Engines that sample from the policy: adapters, requests, answers and errors; their pool, router and calls.
Their configuration is part of a model server's, or comes from the trainer at run time."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nemo_gym.contract.session import CONNECT_TIMEOUT_S, IDLE_TIMEOUT_S, REQUEST_TIMEOUT_S
from nemo_gym.gateway.engines.http import MAX_ANSWER_BYTES, EngineEndpoint, HttpEngine
from nemo_gym.gateway.engines.openai import OpenAIEngine
from nemo_gym.gateway.engines.sglang import STREAM_INTERVAL as SGLANG_STREAM_INTERVAL
from nemo_gym.gateway.engines.sglang import SglangEngine
from nemo_gym.gateway.engines.types import (
    EngineAnswerError,
    EngineAnswerTooLargeError,
    EngineCredentialError,
    EngineError,
    EngineFailedError,
    EngineLacksModelError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    FinishReason,
    Generation,
    Sampling,
    TextReply,
    TokenDelta,
    TokenEngine,
    TokenRequest,
    WeightsSpan,
    asked_otherwise,
    pinned_sampling,
)
from nemo_gym.gateway.engines.vllm import STREAM_INTERVAL as VLLM_STREAM_INTERVAL
from nemo_gym.gateway.engines.vllm import VllmEngine, VllmRoute
from nemo_gym.http.client import is_server_url
from nemo_gym.http.connections import Connections as EngineConnections

__all__ = [
    "EngineAnswerError",
    "EngineAnswerTooLargeError",
    "EngineConfig",
    "EngineConnections",
    "EngineCredentialError",
    "EngineEndpoint",
    "EngineError",
    "EngineFailedError",
    "EngineLacksModelError",
    "EngineLostError",
    "EngineRateLimitedError",
    "EngineRefusedError",
    "EngineTimeoutError",
    "EngineUnreachableError",
    "FinishReason",
    "Generation",
    "HttpEngine",
    "OpenAIEngine",
    "Sampling",
    "SglangEngine",
    "TextReply",
    "TokenDelta",
    "TokenEngine",
    "TokenRequest",
    "VllmEngine",
    "WeightsSpan",
    "asked_otherwise",
    "pinned_sampling",
]

API_KEY_ENV = "OPENAI_API_KEY"


class _EngineConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    base_url: str
    name: str | None = Field(None, min_length=1, pattern=r"^[^/?#\s]+$")
    """Unique among the engines, and part of paths like ``/engines/<name>``; default: host and port."""
    api_key: str | None = Field(None, repr=False)
    """Sent as a bearer token."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Sent with every request."""
    model: str | None = None
    """The model's name at the engine, if it needs one."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Share of the calls, relative to the other engines."""
    max_in_flight: int | None = Field(None, gt=0)
    """Limit of simultaneous calls; ``None`` sets no limit."""
    weights_version: str | None = None
    """The version being served at the start, for engines that do not report it."""
    connect_timeout_s: float = Field(CONNECT_TIMEOUT_S, gt=0)
    request_timeout_s: float = Field(REQUEST_TIMEOUT_S, gt=0)
    """Limit of one try; a call with all its tries has the gateway's ``request_timeout_s``."""
    idle_timeout_s: float | None = Field(IDLE_TIMEOUT_S, gt=0)
    """Limit of silence between two pieces of a response that has begun; ``null`` sets no limit."""
    probe_timeout_s: float = Field(5.0, gt=0)
    max_answer_bytes: int = Field(MAX_ANSWER_BYTES, gt=0)
    """Limit of one response, or of one event of a stream. A longer response is dropped with its connection, and the
    call fails; so does a response longer than the requested tokens can be."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if "@" in urlsplit(url).netloc:
            raise ValueError("a URL appears in logs and takes no password; use 'api_key' or 'headers'")
        if not is_server_url(url):
            raise ValueError(f"'{url[:200]}' is not a valid server URL; give for example http://127.0.0.1:8000")
        return url.rstrip("/")

    @property
    def engine_name(self) -> str:
        """``name``, or host and port."""
        return self.name or urlsplit(self.base_url).netloc

    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(
            name=self.engine_name,
            base_url=self.base_url,
            api_key=self.api_key,
            model=self.model,
            headers=self.headers,
            connect_timeout_s=self.connect_timeout_s,
            request_timeout_s=self.request_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
            probe_timeout_s=self.probe_timeout_s,
            max_answer_bytes=self.max_answer_bytes,
        )


class _TokenEngineConfig(_EngineConfig):
    """``base_url`` is the server's root. A ``/v1`` at its end is left out: trainers publish their servers with it."""

    @field_validator("base_url")
    @classmethod
    def _is_a_root(cls, url: str) -> str:
        return url.removesuffix("/v1")


class VllmEngineConfig(_TokenEngineConfig):
    type: Literal["vllm"]
    route: VllmRoute = "completions"
    """Set ``generate`` if the server has ``/inference/v1/generate``."""
    stream_interval: int = Field(VLLM_STREAM_INTERVAL, ge=1)
    """Requested number of tokens per streamed event. An interrupted answer is continued on another engine after the
    last event."""

    def make(self, http: EngineConnections) -> VllmEngine:
        engine = VllmEngine(self.endpoint(), http, route=self.route, stream_interval=self.stream_interval)
        engine.weights_version = self.weights_version
        return engine


class SglangEngineConfig(_TokenEngineConfig):
    type: Literal["sglang"]
    stream_interval: int = Field(SGLANG_STREAM_INTERVAL, ge=1)
    """Requested number of tokens per streamed event. An interrupted answer is continued on another engine after the
    last event."""

    def make(self, http: EngineConnections) -> SglangEngine:
        return SglangEngine(
            self.endpoint(), http, stream_interval=self.stream_interval, weights_version=self.weights_version
        )


class OpenAIEngineConfig(_EngineConfig):
    """``base_url`` usually ends in ``/v1``. Without ``api_key``, the environment variable ``OPENAI_API_KEY`` is used
    if it is set."""

    type: Literal["openai"]
    logprobs: bool = False
    """Ask for the logprobs of sampled tokens."""

    def make(self, http: EngineConnections) -> OpenAIEngine:
        endpoint = self.endpoint()
        if endpoint.api_key is None:
            endpoint = replace(endpoint, api_key=os.environ.get(API_KEY_ENV) or None)
        engine = OpenAIEngine(endpoint, http, logprobs=self.logprobs)
        engine.weights_version = self.weights_version
        return engine


EngineConfig = Annotated[VllmEngineConfig | SglangEngineConfig | OpenAIEngineConfig, Field(discriminator="type")]
"""``make(http)`` returns the engine; ``weight`` and ``max_in_flight`` are for `Router.add`."""
