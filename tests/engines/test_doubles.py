"""Doubles answer as the real engines did: no key and no kind of value that the recording has not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from nemo_gym.gateway.dialects.errors import overflow_of
from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineCredentialError,
    EngineEndpoint,
    EngineRefusedError,
    OpenAIEngine,
    Sampling,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.engines.openai import completion_in
from nemo_gym_testing.gateway import FakeOpenAIEngine, FakeVllmEngine, Garbage, Status, hashed_sampler
from tests.engines.recordings import PROMPT, ask, recorded, strange

REAL = recorded("vllm")
CLOSED_ROUTE = (
    b'{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable'
    b' them.","type":"PermissionDeniedError","param":null,"code":403}}'
)
"""Of vLLM 0.32.0 without the option."""


@pytest.fixture
async def double() -> Any:
    async with FakeVllmEngine(hashed_sampler(6)) as engine:
        engine.max_model_len = 16_384
        engine.tokenizer = lambda text: [1, 2, 3]
        yield engine


async def test_double_has_no_key_and_no_kind_of_value_that_the_real_engine_has_not(double: FakeVllmEngine) -> None:
    ours = await ask("vllm", double.url)
    for name in ("models", "tokenize", "completion", "stream", "generate"):
        assert ours[name]["status"] == REAL[name]["status"] == 200
        assert not strange(ours[name]["answer"], REAL[name]["answer"], name)


async def test_double_of_an_openai_endpoint_answers_as_llama_cpp_did() -> None:
    real = recorded("llama-cpp")
    async with FakeOpenAIEngine(hashed_sampler(6)) as engine:
        ours = await ask("llama-cpp", engine.url.removesuffix("/v1"))
        for name in ("models", "chat", "stream"):
            assert ours[name]["status"] == real[name]["status"] == 200
            assert not strange(ours[name]["answer"], real[name]["answer"], name)


async def test_recorded_answer_and_refusal_of_llama_cpp_are_read() -> None:
    real = recorded("llama-cpp")
    http = EngineConnections()
    async with FakeOpenAIEngine() as double:
        engine = OpenAIEngine(EngineEndpoint("e0", double.url, model="tiny"), http)
        double.faults.append(Garbage(orjson.dumps(real["chat"]["answer"])))
        completion = completion_in((await engine.complete("/chat/completions", {"messages": []})).body)
        choice = real["chat"]["answer"]["choices"][0]
        assert completion.message["content"] == choice["message"]["content"]
        double.faults.append(Status(400, orjson.dumps(real["too_long"]["answer"])))
        with pytest.raises(EngineRefusedError) as refused:
            await engine.complete("/chat/completions", {"messages": []})
        overflow = overflow_of(refused.value.body)
        assert overflow is not None and overflow.limit == real["too_long"]["answer"]["error"]["n_ctx"]
    await http.aclose()


@pytest.mark.parametrize("name", ["completion", "generate"])
async def test_recorded_answer_is_read_to_its_last_token(double: FakeVllmEngine, name: str) -> None:
    double.faults.append(Garbage(orjson.dumps(REAL[name]["answer"])))
    http = EngineConnections()
    route: Any = "completions" if name == "completion" else "generate"
    engine = VllmEngine(EngineEndpoint("e0", double.url, model="tiny"), http, route=route)
    answer = await engine.generate(TokenRequest("r", PROMPT, Sampling(6)))
    choice = REAL[name]["answer"]["choices"][0]
    assert list(answer.token_ids) == choice["token_ids"] and len(answer.logprobs) == 6
    await http.aclose()


async def test_route_that_the_server_does_not_open_is_named_with_the_option_that_opens_it(
    double: FakeVllmEngine,
) -> None:
    double.faults.append(Status(403, CLOSED_ROUTE))
    http = EngineConnections()
    engine = VllmEngine(EngineEndpoint("e0", double.url, model="tiny"), http, route="generate")
    with pytest.raises(EngineCredentialError, match="start vLLM with --enable-scale-out"):
        await engine.generate(TokenRequest("r", PROMPT, Sampling(4)))
    await http.aclose()
