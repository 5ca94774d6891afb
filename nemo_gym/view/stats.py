"""The uncertainty of figures: intervals of means over tasks, and two runs compared task by task.

Samples of one task resemble each other, so the tasks are counted: a mean is the mean of the tasks' means, and its
standard error is that of the tasks' means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

_Task = TypeVar("_Task")
Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval; without an interval if there is only one task."""

    value: float
    std_err: float | None
    tasks: int

    @property
    def low(self) -> float | None:
        return None if self.std_err is None else self.value - Z95 * self.std_err

    @property
    def high(self) -> float | None:
        return None if self.std_err is None else self.value + Z95 * self.std_err


def mean_of_tasks(rewards: Sequence[Sequence[float]]) -> Mean | None:
    """Return the mean over tasks of the mean reward; ``None`` without rewards. ``rewards[i]`` are those of task i."""
    means = [fmean(of_task) for of_task in rewards if of_task]
    if not means:
        return None
    spread = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Mean(fmean(means), spread, len(means))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A, over the tasks that have a reward in both."""

    tasks: int
    wins: int
    """Tasks whose mean reward is higher in B."""
    losses: int
    ties: int
    gained: int
    """Tasks that B solves and A does not. A task is solved if a sample has at least the reward 1."""
    lost: int
    difference: Mean | None
    """The difference of the tasks' mean rewards, B − A."""
    p_value: float
    """The p-value of the exact two-sided sign test: how often chance alone gives as many wins, or as many losses."""


def compare(first: Mapping[_Task, Sequence[float]], second: Mapping[_Task, Sequence[float]]) -> Comparison:
    """Compare rewards by task, of run A and of run B."""
    both = [task for task, rewards in first.items() if rewards and second.get(task)]
    differences = [fmean(second[task]) - fmean(first[task]) for task in both]
    wins = sum(each > 1e-12 for each in differences)
    losses = sum(each < -1e-12 for each in differences)
    solved = [(max(first[task]) >= 1, max(second[task]) >= 1) for task in both]
    return Comparison(
        tasks=len(both),
        wins=wins,
        losses=losses,
        ties=len(both) - wins - losses,
        gained=sum(after and not before for before, after in solved),
        lost=sum(before and not after for before, after in solved),
        difference=mean_of_tasks([[each] for each in differences]),
        p_value=sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Return the probability that fair coins fall at least this unevenly, to either side."""
    count, fewer = wins + losses, min(wins, losses)
    if count == 0:
        return 1.0
    # In logarithms: for 100,000 coins, the powers alone would not fit a float.
    logs = [math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(fewer + 1)]
    tail = sum(math.exp(each - count * math.log(2)) for each in logs)
    return min(1.0, 2 * tail)
