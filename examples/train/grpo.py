"""One step of GRPO with DAPO's loss: groups of result rows in, a gradient step out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from examples.train.policy import Speller, Tokens, logprobs_of, padded
from nemo_gym.gateway.tokens.trajectories import Trajectory, from_row
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY

TokenSource = Literal["exact", "retokenised"]
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""DAPO's values: the larger upper bound lets a rare token become likely."""
EPSILON = 1e-4
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Example:
    """One trajectory, as input of the loss."""

    tokens: Tokens
    logprobs: list[float] | None
    """The engine's logprob of each token, 0 for prompt tokens; ``None`` if the tokens are not the engine's."""
    advantage: float
    staleness: int


def trajectories(row: Mapping[str, Any]) -> list[Trajectory]:
    return [from_row(each) for each in row.get(TRAJECTORY_KEY) or ()]


def exact(one: Trajectory) -> Tokens:
    prompt = list(one.prompt_ids)
    return Tokens(prompt + list(one.response_ids), [False] * len(prompt) + [bool(mark) for mark in one.response_mask])


def examples_of(
    groups: Sequence[Sequence[Mapping[str, Any]]], source: TokenSource, speller: Speller
) -> Iterator[Example]:
    """Yield examples with advantages within each group; skip samples without a verdict and groups of equal rewards."""
    for rows in groups:
        valid = [row for row in rows if row.get("reward") is not None and not row.get("mask_sample")]
        rewards = [float(row["reward"]) for row in valid]
        spread = statistics.pstdev(rewards) if len(rewards) > 1 else 0.0
        if not spread:
            continue
        mean = statistics.fmean(rewards)
        for row, reward in zip(valid, rewards, strict=True):
            advantage = (reward - mean) / (spread + EPSILON)
            for trajectory in trajectories(row):
                tokens = exact(trajectory)
                if source == "retokenised":
                    yield Example(speller.again(tokens.ids), None, advantage, int(row.get("staleness") or 0))
                else:
                    logprobs = [0.0] * len(trajectory.prompt_ids) + list(trajectory.logprobs or ())
                    yield Example(tokens, logprobs, advantage, int(row.get("staleness") or 0))


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    gradient_norm: float
    tokens: int
    """Tokens that count in the loss."""
    clipped: float
    """Share of these tokens whose ratio left the clip range on the side where clipping takes effect."""
    logprob_error: float | None
    """Largest difference between the engine's and the trainer's logprobs on samples of the current weights, if any."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, examples: Sequence[Example]) -> StepReport:
    """Take one gradient step on DAPO's token-mean loss, with clipped ratios to the logprobs at sampling time."""
    counted = sum(sum(example.tokens.said) for example in examples)
    optimizer.zero_grad()
    loss = clipped = 0.0
    error: float | None = None
    for at in range(0, len(examples), ROWS_AT_ONCE):
        part = examples[at : at + ROWS_AT_ONCE]
        ids, generated = padded([example.tokens for example in part])
        current, mask = logprobs_of(model, ids), generated[:, 1:]
        sampled = _sampling_logprobs(part, current)
        advantage = torch.tensor([example.advantage for example in part])[:, None]
        ratio = (current - sampled).exp()
        bound = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * advantage, bound * advantage)
        share = -(gain * mask).sum() / counted
        share.backward()
        loss += share.item()
        clipped += (((ratio * advantage) > (bound * advantage)) & mask).sum().item()
        fresh = torch.tensor([example.logprobs is not None and not example.staleness for example in part])
        if fresh.any():
            error = max(error or 0.0, ((current - sampled).abs() * mask)[fresh].max().item())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    return StepReport(loss, norm, counted, clipped / max(counted, 1), error)


def _sampling_logprobs(part: Sequence[Example], now: Tensor) -> Tensor:
    """Return the engine's logprobs, or the trainer's own for examples without the engine's tokens."""
    before = now.detach().clone()
    for number, example in enumerate(part):
        if example.logprobs is not None:
            logprobs = torch.tensor(example.logprobs[1:])
            before[number, : len(logprobs)] = logprobs
    return before
