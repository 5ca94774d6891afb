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
"""DAPO's, with which a rare token can become likely."""
EPSILON = 1e-4
ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Example:
    """What the loss sees of one trajectory."""

    tokens: Tokens
    logprobs: list[float] | None
    """The engine's, for each token, 0 where it is not said; nothing where the tokens are not the engine's."""
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
    """Advantages within each group; samples without a verdict and groups of one outcome teach nothing."""
    for rows in groups:
        valid = [row for row in rows if row.get("reward") is not None and not row.get("mask_sample")]
        rewards = [float(row["reward"]) for row in valid]
        spread = statistics.pstdev(rewards) if len(rewards) > 1 else 0.0
        if not spread:
            continue
        mean = statistics.fmean(rewards)
        for row, reward in zip(valid, rewards, strict=True):
            advantage = (reward - mean) / (spread + EPSILON)
            for one in trajectories(row):
                tokens = exact(one)
                if source == "retokenised":
                    yield Example(speller.again(tokens.ids), None, advantage, int(row.get("staleness") or 0))
                else:
                    logprobs = [0.0] * len(one.prompt_ids) + list(one.logprobs or ())
                    yield Example(tokens, logprobs, advantage, int(row.get("staleness") or 0))


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    gradient_norm: float
    tokens: int
    """Those that the loss counts."""
    clipped: float
    """Share of them whose ratio left the clip's range on the side that matters."""
    logprob_error: float | None
    """Largest difference between the engine's logprobs and the trainer's, of samples of the current weights."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, examples: Sequence[Example]) -> StepReport:
    """One gradient step: DAPO's mean over tokens, of the clipped ratio to the logprobs sampled with."""
    counted = sum(sum(example.tokens.said) for example in examples)
    optimizer.zero_grad()
    loss = clipped = 0.0
    error: float | None = None
    for at in range(0, len(examples), ROWS_AT_ONCE):
        part = examples[at : at + ROWS_AT_ONCE]
        ids, said = padded([example.tokens for example in part])
        now, mask = logprobs_of(model, ids), said[:, 1:]
        before = _sampled_with(part, now)
        advantage = torch.tensor([example.advantage for example in part])[:, None]
        ratio = (now - before).exp()
        bound = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * advantage, bound * advantage)
        share = -(gain * mask).sum() / counted
        share.backward()
        loss += share.item()
        clipped += (((ratio * advantage) > (bound * advantage)) & mask).sum().item()
        fresh = torch.tensor([example.logprobs is not None and not example.staleness for example in part])
        if fresh.any():
            error = max(error or 0.0, ((now - before).abs() * mask)[fresh].max().item())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    return StepReport(loss, norm, counted, clipped / max(counted, 1), error)


def _sampled_with(part: Sequence[Example], now: Tensor) -> Tensor:
    """The engine's logprobs, or the trainer's own where the engine's tokens are lost."""
    before = now.detach().clone()
    for number, example in enumerate(part):
        if example.logprobs is not None:
            known = torch.tensor(example.logprobs[1:])
            before[number, : len(known)] = known
    return before
