"""The bridge from verl's inference client to the gateway: what trainers read about the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nemo_gym.framework.verl import EngineBridge
from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    Sampling,
    SglangEngine,
    TokenRequest,
    WeightsSpan,
)


class Client:
    """As verl's ``LLMServerClient``; ``told`` is what it says about the weights."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        return SimpleNamespace(
            token_ids=[7, 8, 9], log_probs=[-1.0, -2.0, -3.0], stop_reason="completed", extra_fields=self.told
        )


async def test_answer_is_by_the_weights_that_the_client_names_whatever_sampled_the_one_before() -> None:
    client = Client()
    bridge = EngineBridge(client)
    url = bridge.start()
    seen = []
    try:
        async with EngineConnections() as http:
            engine = SglangEngine(EngineEndpoint("verl", url), http)
            for told in (
                {"global_steps": 1},
                {"global_steps": 2, "min_global_steps": None},
                {"min_global_steps": 3, "max_global_steps": 3},
                {"min_global_steps": 5, "max_global_steps": 6},
                {"global_steps": None},
            ):
                client.told = told
                answer = await engine.generate(TokenRequest("r", [5, 6], Sampling(100)))
                assert (answer.token_ids, answer.logprobs) == ((7, 8, 9), (-1.0, -2.0, -3.0))
                seen.append(answer.weights)
    finally:
        bridge.stop()
    assert seen == [WeightsSpan(first, last) for first, last in ("11", "22", "33", "56", "66")]
