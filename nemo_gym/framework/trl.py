"""Integrates the framework into TRL, as a ``rollout_func`` of ``GRPOTrainer``.

    rollout = FrameworkRollouts(make_framework)
    trainer = GRPOTrainer(model=…, reward_funcs=rollout.reward, rollout_func=rollout, …)

The framework writes into a sink of this module instead of TransferQueue. Each session gives one completion: its
trajectory with the most sampled tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_gym._util.tasks import LoopThread
from nemo_gym.contract.errors import ConfigError
from nemo_gym.framework.framework import OpenAICompatibleAgentFramework
from nemo_gym.framework.samples import TrajectoryRow


class MemorySink:
    """Holds the trajectories of the current batch in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, list[TrajectoryRow]] = {}
        """The rows of each session, by ``<uid>_<session>``."""

    async def put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        self.rows[rows[0].key.rpartition("_")[0]] = list(rows)

    async def tag(self, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        """Do nothing, because TRL does not use the states of prompts."""


class FrameworkRollouts:
    """A ``rollout_func`` and its reward function.

    Args:
        framework: builds the framework over the given sink; called in the loop that runs it.
        columns: returns further columns for a prompt, which agent servers or runners read.
        before_batch: called with the trainer before each batch, for example to push weights to the engine.
    """

    def __init__(
        self,
        framework: Callable[[MemorySink], OpenAICompatibleAgentFramework],
        *,
        columns: Callable[[Any], Mapping[str, Any]] | None = None,
        before_batch: Callable[[Any], None] | None = None,
    ) -> None:
        self.sink = MemorySink()
        self._columns = columns or (lambda prompt: {})
        self._before_batch = before_batch
        self._batches = itertools.count()
        # TRL calls repeatedly from a thread without an event loop; the framework's connections need a lasting loop.
        self._thread = LoopThread("framework-rollouts")
        self._framework = self._thread.run(self._build(framework))
        self.masked = 0
        """How many completions are placeholders for sessions without a trajectory."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one completion per prompt, in order; TRL repeats a prompt for each of its generations."""
        if self._before_batch is not None:
            self._before_batch(trainer)
        number = next(self._batches)
        step = int(getattr(getattr(trainer, "state", None), "global_step", 0) or 0)
        uids = [f"b{number}p{index}" for index in range(len(prompts))]
        batch: dict[str, Any] = {
            "uid": uids,
            "raw_prompt": [_messages(prompt) for prompt in prompts],
            "global_steps": step,
            "__rollout_n__": [1] * len(prompts),
        }
        extra_columns = [self._columns(prompt) for prompt in prompts]
        for name in {name for each in extra_columns for name in each}:
            batch[name] = [each.get(name) for each in extra_columns]
        self.sink.rows.clear()
        self._thread.run(self._framework.run_batch(batch))
        rows = [self._longest(uid) for uid in uids]
        rewards = _fill_rewards([None if row is None else float(row.fields["rm_scores"][-1]) for row in rows], prompts)
        columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
        for row in rows:
            for name, values in _completion(row).items():
                columns[name].append(values)
        self.masked += sum(row is None for row in rows)
        return {**columns, "session_reward": rewards}

    def reward(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the rewards of the sessions; for ``reward_funcs``."""
        if "session_reward" not in columns:
            raise ConfigError("the reward function of FrameworkRollouts needs it as rollout_func too")
        return [float(reward) for reward in columns["session_reward"]]

    def close(self) -> None:
        self._thread.run(self._framework.aclose())
        self._thread.close()

    def _longest(self, uid: str) -> TrajectoryRow | None:
        rows = self.sink.rows.get(f"{uid}_0")
        return max(rows, key=lambda row: int(row.fields["response_mask"].sum())) if rows else None

    async def _build(
        self, framework: Callable[[MemorySink], OpenAICompatibleAgentFramework]
    ) -> OpenAICompatibleAgentFramework:
        return framework(self.sink)


def _completion(row: TrajectoryRow | None) -> dict[str, list[Any]]:
    """Return a row's columns under TRL's names. A session without a trajectory becomes one token that is left out of
    the loss."""
    if row is None:
        return {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0]}
    fields = row.fields
    if "rollout_log_probs" not in fields:
        raise ConfigError("the engine gives no logprobs, and TRL needs them: choose one that does")
    return {
        "prompt_ids": fields["prompts"].tolist(),
        "completion_ids": fields["responses"].tolist(),
        "logprobs": fields["rollout_log_probs"].tolist(),
        "env_mask": fields["loss_mask"].tolist(),
    }


def _fill_rewards(rewards: Sequence[float | None], prompts: Sequence[Any]) -> list[float]:
    """Fill in missing rewards with the mean reward of the prompt's other sessions (0 if none has a reward), which
    changes no sibling's advantage. TRL would count a missing reward as 0."""
    groups: dict[str, list[float]] = {}
    for reward, prompt in zip(rewards, prompts, strict=True):
        if reward is not None:
            groups.setdefault(repr(prompt), []).append(reward)
    filled = []
    for reward, prompt in zip(rewards, prompts, strict=True):
        others = groups.get(repr(prompt), [])
        mean = sum(others) / len(others) if others else 0.0
        filled.append(mean if reward is None else reward)
    return filled


def _messages(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
