"""The double of vLLM answers as the real one did: no key and no kind of value that the recording has not."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineCredentialError,
    EngineEndpoint,
    Sampling,
    TokenRequest,
    VllmEngine,
)
from nemo_gym_testing.gateway import FakeVllmEngine, Garbage, Status, hashed_sampler
from tests.engines.recordings import PROMPT, ask, recorded, strange

REAL = recorded()
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
    ours = await ask(double.url)
    for name in ("models", "tokenize", "completion", "stream", "generate"):
        assert ours[name]["status"] == REAL[name]["status"] == 200
        assert not strange(ours[name]["answer"], REAL[name]["answer"], name)


@pytest.mark.parametrize("name", ["completion", "generate"])
async def test_recorded_answer_is_read_to_its_last_token(double: FakeVllmEngine, name: str) -> None:
    import orjson

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
