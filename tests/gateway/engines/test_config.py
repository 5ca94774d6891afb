from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_gym.gateway.engines import (
    EngineConfig,
    EngineConnections,
    OpenAIEngine,
    Sampling,
    SglangEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym_testing.gateway import FakeVllmEngine

CONFIG: TypeAdapter[Any] = TypeAdapter(EngineConfig)


@pytest.mark.parametrize(("kind", "made"), [("vllm", VllmEngine), ("sglang", SglangEngine), ("openai", OpenAIEngine)])
async def test_type_decides_the_adapter(kind: str, made: type, http: EngineConnections) -> None:
    config = CONFIG.validate_python({"type": kind, "base_url": "http://10.0.0.1:8000/", "weights_version": "w"})
    engine = config.make(http)
    assert type(engine) is made and engine.name == "10.0.0.1:8000" and engine.weights_version == "w"


@pytest.mark.parametrize(
    ("kind", "url", "kept"),
    [
        ("vllm", "http://a:8000/v1/", "http://a:8000"),
        ("sglang", "http://a:8000/v1", "http://a:8000"),
        ("vllm", "http://a/proxy/v1", "http://a/proxy"),
        ("openai", "http://a:8000/v1/", "http://a:8000/v1"),
    ],
)
def test_engine_takes_the_url_that_trainers_publish(kind: str, url: str, kept: str) -> None:
    config = CONFIG.validate_python({"type": kind, "base_url": url})
    assert (config.endpoint().base_url, config.engine_name) == (kept, kept.split("/")[2])


async def test_configured_engine_samples(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        engine = CONFIG.validate_python(
            {"type": "vllm", "base_url": fake.url, "name": "a", "model": "m", "route": "generate"}
        ).make(http)
        answer = await engine.generate(TokenRequest("r", [1], Sampling(4)))
    assert (
        answer.engine == "a" and fake.calls[0].path == "/inference/v1/generate" and fake.calls[0].body["model"] == "m"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "vlm", "base_url": "http://a"}, "type"),
        ({"type": "vllm", "base_url": "a:8000"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://a:8000/?key=1"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://a..b:8000"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://a:99999"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://a:port"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://:8000"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://a b:8000"}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://" + "a" * 70}, "is not a valid server URL"),
        ({"type": "vllm", "base_url": "http://me:word@a:8000"}, "api_key"),
        ({"type": "vllm", "base_url": "http://a:8000", "name": "a/b"}, "name"),
        ({"type": "vllm", "base_url": "http://a", "weight": 0}, "weight"),
        ({"type": "vllm", "base_url": "http://a", "logprobs": True}, "logprobs"),
        ({"type": "sglang", "base_url": "http://a", "max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_wrong_engine_is_an_error_that_names_the_field(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CONFIG.validate_python(wrong)


def test_secrets_do_not_show() -> None:
    config = CONFIG.validate_python(
        {"type": "vllm", "base_url": "http://a", "api_key": "sk-1", "headers": {"x": "sk-2"}}
    )
    assert "sk-" not in repr(config) and "sk-" not in repr(config.endpoint())
