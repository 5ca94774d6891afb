"""NeMo RL's entry points: rows in, results with tokens out, over a real gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError
from nemo_gym.openai_types.responses import NeMoGymResponse
from nemo_gym.rollout_collection import RolloutCollectionHelper
from tests.framework.conftest import Stage
from tests.framework.test_agent_servers import AskingAgent
from tests.rollouts.test_training_fields import read_as_nemo_rl
from tests.servers.plugins import PhraseEnvironment


async def start(stage: Stage, **block: Any) -> None:
    await stage.start(**block)
    await asyncio.to_thread(stage.stack.add, "phrase", PhraseEnvironment, Role.ENVIRONMENT)
    references = {
        "resources_server": {"type": "resources_servers", "name": "phrase"},
        "model_server": {"type": "responses_api_models", "name": "gateway_1"},
    }
    add = lambda: stage.stack.add("agent", AskingAgent, Role.AGENT, ("phrase", "gateway_1"), **references)  # noqa: E731
    await asyncio.to_thread(add)


def example(number: int, text: str, **fields: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": text}]}
    return {"id": f"t{number}", "responses_create_params": params, "phrase": "right", "_rowidx": number, **fields}


async def run(stage: Stage, rows: list[dict[str, Any]], **keys: Any) -> dict[int, dict[str, Any]]:
    masked = keys.pop("masked_reward", None)
    helper = RolloutCollectionHelper(stage.stack.client(), masked_reward=masked)
    got = [await done for done in helper.run_examples(rows, max_attempts=1, **keys)]
    await helper.aclose()
    return {row["_rowidx"]: result for row, result in got}


async def test_results_have_the_tokens_where_nemo_rl_reads_them(stage: Stage) -> None:
    await start(stage)
    results = await run(stage, [example(0, "right"), example(1, "wrong")])
    sampled = {call.token_ids: call for call in stage.engine.calls}
    for number, reward in ((0, 1.0), (1, 0.0)):
        result = results[number]
        assert (result["reward"], result["mask_sample"]) == (reward, False)
        NeMoGymResponse.model_validate(result["response"])
        tokens, mask, logprobs = read_as_nemo_rl(result["response"])
        trained = tuple(token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled)
        call = sampled[trained]
        assert call.body["prompt"] == tokens[: len(tokens) - len(trained)]
        assert logprobs[-len(trained) :] == pytest.approx(list(call.logprobs), rel=1e-6)


async def test_rollout_without_a_verdict_is_complete_and_masked(stage: Stage) -> None:
    await start(stage)
    (result,) = (await run(stage, [example(0, "broken grader")])).values()
    assert (result["reward"], result["mask_sample"], result["valid"]) == (None, True, False)
    assert result["instance_config"] == {"mask_sample": True}
    assert result["responses_create_params"]["input"] == [{"role": "user", "content": "broken grader"}]
    assert "phrase" not in result
    NeMoGymResponse.model_validate(result["response"])
    assert read_as_nemo_rl(result["response"])[0]


async def test_masked_reward_is_the_mean_of_its_group_where_a_trainer_needs_a_number(stage: Stage) -> None:
    await start(stage)
    texts = ["right", "wrong", "broken grader", "wrong", "broken grader"]
    rows = [example(number, text, _ng_task_index=0) for number, text in enumerate(texts[:4])]
    rows.append(example(4, texts[4], _ng_task_index=1))
    results = await run(stage, rows, masked_reward="group_mean")
    assert [results[number]["reward"] for number in range(5)] == [1.0, 0.0, pytest.approx(1 / 3), 0.0, 0.0]
    assert [results[number].get("reward_source") for number in (0, 2, 4)] == [None, "group_mean", "group_mean"]
    assert [results[number]["mask_sample"] for number in (2, 4)] == [True, True]


async def test_sampling_of_the_run_holds_whatever_the_harness_asks_for(stage: Stage) -> None:
    await start(stage)
    keys = {"temperature": 0.25, "top_p": 0.5, "top_k": 11, "max_output_tokens": 6, "seed": 5, "stop": ["END"]}
    row = example(0, "right")
    (result,) = (await run(stage, [row], **keys)).values()
    asked = stage.engine.calls[-1].body
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (0.25, 0.5, 11, 6)
    assert (asked["seed"], asked["stop"]) == (5, ["END"])
    assert "asked_otherwise" not in result["ng_trajectory"][0]["turns"][0]["details"]


async def test_what_a_harness_asked_for_otherwise_is_recorded(stage: Stage) -> None:
    await start(stage)
    agent: Any = stage.stack.servers["agent"]
    agent.asks = {"temperature": 1.5, "top_p": 0.5, "max_output_tokens": 500}
    keys = {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 6}
    (result,) = (await run(stage, [example(0, "right")], **keys)).values()
    (turn,) = result["ng_trajectory"][0]["turns"]
    assert turn["details"]["asked_otherwise"] == {"temperature": 1.5, "max_output_tokens": 500}
    assert stage.engine.calls[-1].body["temperature"] == 0.25


@pytest.mark.parametrize(("key", "value"), [("top_k", -2), ("stop", 7), ("top_p", 1.5), ("max_output_tokens", 0)])
async def test_sampling_that_cannot_be_meant_is_refused(stage: Stage, key: str, value: Any) -> None:
    helper = RolloutCollectionHelper(stage.stack.client())
    with pytest.raises(ConfigError, match=key):
        helper.run_examples([example(0, "right")], **{key: value})
