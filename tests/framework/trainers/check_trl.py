"""With the real TRL, in the environment of `scripts/install-trainers trl`: steps of `GRPOTrainer` on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from nemo_gym.framework import OpenAICompatibleAgentFramework
from nemo_gym.framework.trl import FrameworkRollouts, MemorySink
from tests.framework.conftest import Stage, trainer_config

RUNNERS = "tests.framework.runners"


def rollouts(stage: Stage, runner: str, **kwargs: Any) -> FrameworkRollouts:
    block = {"agent_runners": {"one": {"runner_fqn": f"{RUNNERS}.{runner}", "runner_kwargs": kwargs}}}

    def make(sink: MemorySink) -> OpenAICompatibleAgentFramework:
        return OpenAICompatibleAgentFramework.from_config(
            config=trainer_config(block), gateways=stage.pool(), sink=sink
        )

    return FrameworkRollouts(make)


def trainer(stage: Stage, made: FrameworkRollouts, prompts: list[str], **options: Any) -> GRPOTrainer:
    file = str(stage.folder / "policy" / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **size, **heads))
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    given = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    config = GRPOConfig(
        output_dir=str(stage.folder / "out"),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        bf16=False,
        save_strategy="no",
        **{**given, **options},
    )
    return GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=made.reward,
        rollout_func=made,
    )


async def trained(stage: Stage, made: FrameworkRollouts, prompts: list[str]) -> GRPOTrainer:
    found = await asyncio.to_thread(trainer, stage, made, prompts)
    await asyncio.to_thread(found.train)
    return found


async def closed(made: FrameworkRollouts) -> None:
    await asyncio.to_thread(made.close)


async def test_trainer_learns_from_the_tokens_and_rewards_of_sessions(stage: Stage) -> None:
    await stage.start()
    made = rollouts(stage, "rewards_in_turn")
    seen: list[dict[str, Any]] = []
    call: Callable[..., Any] = FrameworkRollouts.__call__

    def watched(self: FrameworkRollouts, prompts: Any, trainer: Any) -> Any:
        seen.append(call(self, prompts, trainer))
        return dict(seen[-1])

    FrameworkRollouts.__call__ = watched  # type: ignore[method-assign]
    try:
        found = await trained(stage, made, ["one", "two"])
    finally:
        FrameworkRollouts.__call__ = call  # type: ignore[method-assign]
    sampled = {call.token_ids for call in stage.engine.calls}
    for output in seen:
        assert all(tuple(ids) in sampled for ids in output["completion_ids"])
        assert output["session_reward"] == [0.0, 1.0, 0.0, 1.0]
        assert all(set(mask) == {1} for mask in output["env_mask"])
    steps = [entry for entry in found.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in steps] == [0.5, 0.5]
    assert [entry["reward_std"] for entry in steps] == [pytest.approx(0.577, abs=0.01)] * 2
    assert all(entry["grad_norm"] > 0 for entry in steps)
    assert made.masked == 0
    await closed(made)


async def test_session_without_a_reward_is_masked_and_moves_no_sibling(stage: Stage) -> None:
    await stage.start()
    made = rollouts(stage, "rewards_in_turn", failing=3)
    output = await asyncio.to_thread(made, [[{"role": "user", "content": "one"}]] * 4, None)
    assert made.masked == 1
    masked = [not any(mask) for mask in output["env_mask"]]
    assert sum(masked) == 1
    rewards = [reward for reward, is_masked in zip(output["session_reward"], masked, strict=True) if not is_masked]
    assert output["session_reward"][masked.index(True)] == pytest.approx(sum(rewards) / 3)
    await closed(made)
