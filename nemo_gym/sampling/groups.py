"""Groups of samples, the filters that decide whether a group is effective, the batches that a trainer gets, and when
another group is submitted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from nemo_gym.config.pipeline import SamplingConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.verdict import StageName, failure_of_reply
from nemo_gym.rollouts.interfaces import JobRecord, JobState
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY

OBSERVED = 256
"""How many of the latest groups, and of the latest rollouts, the estimates use."""


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """The first and last weights version with which a sample was generated."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout that has ended."""

    rollout_id: str
    sample_index: int
    attempt: int
    row: Mapping[str, Any]
    """The result row, or the failure row of a rollout that ended without a verdict."""
    weights: WeightsSpan

    @property
    def reward(self) -> float | None:
        """The reward; ``None`` without a valid verdict, because an infrastructure failure is not a reward of 0."""
        return float(self.row["reward"]) if self.valid else None

    @property
    def valid(self) -> bool:
        return failure_of_reply(StageName.EVAL, self.row) is None

    @classmethod
    def of(cls, record: JobRecord, seen: WeightsSpan) -> Sample:
        """Return the sample of a finished job. ``seen`` holds the weights versions that the sampler recorded while the
        job ran; versions that the engines reported take precedence."""
        row = orjson.loads(record.result) if record.result is not None else {}
        if record.state is not JobState.DONE:
            row["mask_sample"] = True
        return cls(record.job_id, record.spec.sample_index, record.attempt, row, _reported(row) or seen)


def _reported(row: Mapping[str, Any]) -> WeightsSpan | None:
    """Return the weights versions in the row's trajectories, if they are numbers."""
    trajectories = row.get(TRAJECTORY_KEY) or ()
    versions = [version for each in trajectories for version in each.get("weights_versions") or ()]
    try:
        numbers = [int(version) for version in versions]
    except ValueError:
        return None
    return WeightsSpan(min(numbers), max(numbers)) if numbers else None


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one row."""

    group_id: str
    row: Mapping[str, Any]
    samples: tuple[Sample, ...]
    size: int
    """The number of samples requested; ``samples`` has fewer if some became too old."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the valid samples."""
        return tuple(sample.reward for sample in self.samples if sample.reward is not None)


class GroupFilter(Protocol):
    """Decides whether a group is effective."""

    def __call__(self, group: Group) -> str | None:
        """Return a short reason to leave the group out, or ``None`` to keep it. Groups are counted by reason."""
        ...


@dataclass(frozen=True, slots=True)
class ValidSamples:
    """Keeps groups with at least ``at_least`` valid samples; ``None`` requires all samples to be valid. Invalid
    samples of a kept group stay in it, without a reward."""

    at_least: int | None = None

    def __call__(self, group: Group) -> str | None:
        required = group.size if self.at_least is None else self.at_least
        return None if len(group.rewards) >= required else "too few valid samples"


@dataclass(frozen=True, slots=True)
class MixedOutcomes:
    """DAPO's dynamic sampling: keeps a group if some of its samples are right and some are not, 0 < right < all,
    because equal rewards give every sample the advantage 0. ``solved_from`` is the lowest reward of a right sample;
    with ``None``, a group is kept if its rewards differ."""

    solved_from: float | None = None

    def __call__(self, group: Group) -> str | None:
        if self.solved_from is None:
            outcomes: set[float] = set(group.rewards)
            if len(outcomes) > 1:
                return None
            return "all samples have the same reward"
        right = sum(reward >= self.solved_from for reward in group.rewards)
        if right == 0:
            return "no sample is right"
        return "all samples are right" if right == len(group.rewards) else None


DEFAULT_FILTERS: tuple[GroupFilter, ...] = (ValidSamples(), MixedOutcomes())


def why_left_out(group: Group, filters: Iterable[GroupFilter]) -> str | None:
    """Return the reason of the first filter that leaves the group out, or ``None``. Raises `ConfigError` for a filter
    that returns neither: with True or False, every group would be left out."""
    reason: Any
    for each in filters:
        if (reason := each(group)) is not None:
            if not isinstance(reason, str):
                raise ConfigError(
                    f"filters: {each!r} returned {reason!r}; a filter returns None to keep a group, or the reason"
                    " against it as text",
                    key="filters",
                )
            return reason
    return None


@dataclass(frozen=True, slots=True)
class Carried:
    """An unfinished rollout that continues for a later batch."""

    rollout_id: str
    group_id: str
    attempt: int
    """Counts from 1; 0 while the rollout waits for a worker."""
    session_id: str | None
    """The model server's session that holds the trajectory so far; ``None`` before the rollout runs, and for agents
    that open their own sessions."""
    weights_version: int | None
    """The weights version with which it started; ``None`` before that."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Effective groups for one training step."""

    index: int
    """The batch's number, from 1."""
    weights_version: int
    """The version of the policy that trains on this batch."""
    groups: tuple[Group, ...]
    carried: tuple[Carried, ...]
    """The rollouts that were unfinished when the batch was full; they continue."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of groups that were left out while this batch was filled, by reason."""
    exhausted: bool = False
    """The data has ended; such a batch may hold fewer groups than requested, or none."""

    @property
    def samples(self) -> Sequence[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def staleness(self, sample: Sample) -> int:
        """Return the number of weights versions between the sample's first token and this batch."""
        return self.weights_version - sample.weights.first

    def rows(self) -> list[dict[str, Any]]:
        """Return the result rows for a trainer, group by group, each with ``group_id``, ``weights_version_start``,
        ``weights_version_end`` and ``staleness``."""
        return [
            {
                **sample.row,
                "group_id": group.group_id,
                "weights_version_start": sample.weights.first,
                "weights_version_end": sample.weights.last,
                "staleness": self.staleness(sample),
            }
            for group in self.groups
            for sample in group.samples
        ]


class LookAhead:
    """Decides when to submit another group. ``workers`` are the pipeline's INIT, RUN and EVAL workers.

    **Workers stay busy** as long as some rollout waits for a worker. By Little's law the pipeline holds
    ``RUN workers × (time of a whole rollout / time of its RUN stage)`` rollouts, with both times as observed. Another
    group is submitted while fewer rollouts than that, plus one group, are unfinished.

    **No group is submitted that will probably not be used.** With the effective rate of the latest groups, the open
    groups are expected to yield ``rate × groups``. Once the ready groups and that number, less one standard deviation,
    fill the requested batch and `SamplingConfig.ahead` further ones, no other group is submitted.
    """

    def __init__(self, config: SamplingConfig, workers: Sequence[int]) -> None:
        self._config = config
        self._workers = workers
        self._outcomes: deque[bool] = deque(maxlen=OBSERVED)
        self._stage_s: deque[tuple[float, float]] = deque(maxlen=OBSERVED)

    @property
    def outcomes(self) -> list[bool]:
        """Whether the latest groups were effective, oldest first."""
        return list(self._outcomes)

    def learn_outcomes(self, effective: Iterable[bool]) -> None:
        self._outcomes.extend(effective)

    def learn_times(self, row: Mapping[str, Any]) -> None:
        """Learn from the ``timings`` of a result row; ignore rows without them."""
        timings = row.get("timings") or {}
        init_s, run_s, eval_s = (timings.get(f"{stage}_s") or 0.0 for stage in ("init", "run", "eval"))
        if run_s:
            self._stage_s.append((init_s + run_s + eval_s, run_s))

    def wants_another(self, *, unfinished: int, running: int, under_way: int, ready: int, wanted: int) -> bool:
        """Return whether to submit another group. ``unfinished`` and ``running`` count rollouts, the latter in RUN;
        ``under_way`` and ``ready`` count groups; ``wanted`` is the size of the requested batch and those ahead."""
        if self._config.look_ahead:
            if unfinished >= self.slots + self._config.samples_per_group:
                return False
        elif unfinished > running:
            return False
        rate = self.effective_rate
        likely = rate * under_way - math.sqrt(under_way * rate * (1 - rate))
        return ready + likely < wanted

    @property
    def effective_rate(self) -> float:
        """The share of effective groups among the latest, with one group of each kind added as a prior."""
        return (sum(self._outcomes) + 1) / (len(self._outcomes) + 2)

    @property
    def slots(self) -> float:
        """The number of rollouts in the pipeline when every RUN worker is busy; at most the number of all workers."""
        whole_s = sum(whole for whole, _ in self._stage_s)
        run_s = sum(run for _, run in self._stage_s)
        per_run_worker = whole_s / run_s if run_s else 1.0
        return min(self._workers[1] * per_run_worker, sum(self._workers))
