"""Engines that sample from the policy: adapters, requests, answers and errors."""

from nemo_gym.gateway.engines.engine_config import EngineConfig
from nemo_gym.gateway.engines.http import EngineEndpoint, HttpEngine
from nemo_gym.gateway.engines.openai import OpenAIEngine
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
from nemo_gym.gateway.engines.vllm import VllmEngine
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
