"""Engines that sample from the policy: adapters, their requests and answers, and how they fail."""

from nemo_gym.gateway.engines.engine_config import (
    EngineConfig,
    OpenAIEngineConfig,
    SglangEngineConfig,
    VllmEngineConfig,
)
from nemo_gym.gateway.engines.http import EngineEndpoint, HttpEngine
from nemo_gym.gateway.engines.openai import OpenAIEngine, SampledText, sampled_text
from nemo_gym.gateway.engines.sampling import asked_otherwise, pinned_sampling
from nemo_gym.gateway.engines.sglang import SglangEngine
from nemo_gym.gateway.engines.types import (
    Engine,
    EngineAnswerError,
    EngineAnswerTooLargeError,
    EngineCredentialError,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    FinishReason,
    Generation,
    Sampling,
    Segment,
    TextEngine,
    TextReply,
    TokenDelta,
    TokenEngine,
    TokenRequest,
    WeightsSpan,
)
from nemo_gym.gateway.engines.vllm import VllmEngine
from nemo_gym.http.connections import Connections as EngineConnections

__all__ = [
    "Engine",
    "EngineAnswerError",
    "EngineAnswerTooLargeError",
    "EngineConfig",
    "EngineConnections",
    "EngineCredentialError",
    "EngineEndpoint",
    "EngineError",
    "EngineFailedError",
    "EngineLostError",
    "EngineRateLimitedError",
    "EngineRefusedError",
    "EngineTimeoutError",
    "EngineUnreachableError",
    "FinishReason",
    "Generation",
    "HttpEngine",
    "OpenAIEngine",
    "OpenAIEngineConfig",
    "SampledText",
    "Sampling",
    "Segment",
    "SglangEngine",
    "SglangEngineConfig",
    "TextEngine",
    "TextReply",
    "TokenDelta",
    "TokenEngine",
    "TokenRequest",
    "VllmEngine",
    "VllmEngineConfig",
    "WeightsSpan",
    "asked_otherwise",
    "pinned_sampling",
    "sampled_text",
]
