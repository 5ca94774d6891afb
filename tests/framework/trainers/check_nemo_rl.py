"""With NeMo RL's own code and a real Ray, in the environment of `scripts/install-trainers nemo_rl`.

No package index has NeMo RL's code (`nemo-rl` 0.0.0 is a placeholder): ``NEMO_RL`` names a checkout of its repository.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.nemo_gym import NemoGym
from nemo_rl.experience.rollouts import run_async_nemo_gym_rollout
from transformers import PreTrainedTokenizerFast

from nemo_gym_testing.gateway import FakeVllmEngine
from responses_api_models.gateway.tests.conftest import FAMILY, Teller
from tests.framework.conftest import EngineThread
from tests.gateway.tokens.policies import write

ROOT = Path(__file__).parents[3]
MCQA = "resources_servers/mcqa"
AGENT = {"type": "responses_api_agents", "name": "mcqa_agent"}
GROUP, GROUPS, MAX_TOKENS = 4, 2, 64


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "testing"), os.environ["NEMO_RL"]])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def engine() -> Iterator[FakeVllmEngine]:
    thread = EngineThread(FakeVllmEngine(Teller()))
    yield thread.engine
    thread.stop()


def rows() -> list[dict[str, Any]]:
    """Two groups; the last row cannot be graded."""
    first, second = (json.loads(line) for line in (ROOT / MCQA / "data/example.jsonl").read_text().splitlines()[:2])
    made = []
    for group, row in enumerate((first, second)):
        for number in range(GROUP):
            text = f"{row['question']} ({number})"
            params = {"input": [{"role": "user", "content": text}]}
            made.append({**row, "responses_create_params": params, "agent_ref": AGENT, "_ng_task_index": group})
    made[-1].pop("options")
    made[-1].pop("expected_answer")
    return made


def configuration(policy: Path) -> dict[str, Any]:
    """As a recipe's ``env.nemo_gym``; the URLs of the engines are NeMo RL's to fill in."""
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "mcqa"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    gateway = {
        "entrypoint": "app.py",
        "model": "${policy_model_name}",
        "policy": {"path": str(policy), "max_context_tokens": 100_000},
        "engines": [{"type": "vllm", "base_url": "${policy_base_url}"}],
    }
    return {
        "config_paths": [f"{MCQA}/configs/mcqa.yaml"],
        "mcqa_agent": {"responses_api_agents": {"simple_agent": agent}},
        "policy_model": {"responses_api_models": {"gateway": gateway}},
        "default_host": "127.0.0.1",
    }


async def test_batch_of_nemo_rl_holds_the_tokens_that_the_engine_sampled(
    engine: FakeVllmEngine, tmp_path: Path
) -> None:
    policy = write(tmp_path / "policy", FAMILY)
    actor = NemoGym.remote(
        {"model_name": "policy", "base_urls": [engine.url], "initial_global_config_dict": configuration(policy)}
    )
    await actor._spinup.remote()
    try:
        await actor.health_check.remote()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(policy / "tokenizer.json"), pad_token="<|im_end|>")
        await actor.set_tokenizer.remote(tokenizer)
        given = rows()
        limits = {"vllm_cfg": {"max_model_len": 100_000}}
        generation = {"temperature": 0.7, "top_p": 0.9, "top_k": None, "max_new_tokens": MAX_TOKENS}
        groups = run_async_nemo_gym_rollout(
            SimpleNamespace(cfg=limits),  # of an engine, only the limit is read
            BatchedDataDict({"extra_env_info": given, "loss_multiplier": torch.ones(len(given))}),
            tokenizer,
            {"nemo_gym": actor},
            {**generation, "stop_strings": None, "stop_token_ids": None},
            num_generations=GROUP,
            log_full_result_tables=False,
        )
        batches = [group.final_batch async for group in groups]
    finally:
        await actor.shutdown.remote()
    assert len(batches) == GROUPS
    calls = {call.token_ids: call for call in engine.answered}
    assert len(calls) == len(engine.answered) >= GROUP * GROUPS - 1
    masked = [bool(flag) for batch in batches for flag in batch["mask_sample"]]
    assert sum(masked) == 1
    for log, is_masked in zip((log for batch in batches for log in batch["message_log"]), masked, strict=True):
        asked, answered = log
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        if is_masked and tuple(answered["token_ids"].tolist()) not in calls:
            continue  # a row that could not be asked has one token, which the mask keeps out of the loss
        call = calls[tuple(answered["token_ids"].tolist())]
        assert call.body["prompt"] == asked["token_ids"].tolist()
        assert answered["generation_logprobs"].tolist() == pytest.approx(list(call.logprobs), rel=1e-6)
        assert (call.body["temperature"], call.body["top_p"], call.body["max_tokens"]) == (0.7, 0.9, MAX_TOKENS)
    for batch in batches:
        assert batch["total_reward"].dtype == torch.float32 and not torch.isnan(batch["total_reward"]).any()
