"""Groups of samples, what makes one effective, and the batches that a trainer gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from nemo_gym.contract.verdict import StageName, failure_of_reply
from nemo_gym.rollouts.interfaces import JobRecord, JobState
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """Weights versions under which a sample was made."""

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
        """``None`` for a sample without a valid verdict: a failure of the infrastructure is no 0."""
        return float(self.row["reward"]) if self.valid else None

    @property
    def valid(self) -> bool:
        return failure_of_reply(StageName.EVAL, self.row) is None

    @classmethod
    def of(cls, record: JobRecord, seen: WeightsSpan) -> Sample:
        """The sample of a finished job. ``seen`` is what the sampler saw of the weights while the job ran; versions
        that the engines themselves reported win over it."""
        row = orjson.loads(record.result) if record.result is not None else {}
        if record.state is not JobState.DONE:
            row["mask_sample"] = True
        return cls(record.job_id, record.spec.sample_index, record.attempt, row, _reported(row) or seen)


def _reported(row: Mapping[str, Any]) -> WeightsSpan | None:
    """The versions in the row's trajectories, where the trainer numbers them."""
    trajectories = row.get(TRAJECTORY_KEY) or ()
    told = [version for each in trajectories for version in each.get("weights_versions") or ()]
    try:
        numbers = [int(version) for version in told]
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
    """Samples that were asked for; fewer stand here where some were too old."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the valid samples."""
        return tuple(sample.reward for sample in self.samples if sample.reward is not None)

    def lag(self, weights_version: int) -> int:
        """Versions between the oldest sample's first token and ``weights_version``."""
        return max(weights_version - sample.weights.first for sample in self.samples)


class GroupFilter(Protocol):
    """Decides whether a group is effective."""

    def __call__(self, group: Group) -> str | None:
        """Why the group is left out, in a few words that are counted; ``None`` keeps it."""
        ...


@dataclass(frozen=True, slots=True)
class ValidSamples:
    """Keeps groups with enough valid samples. ``at_least`` ``None`` asks for all of them; where fewer are enough, the
    others stay in the group as invalid, without a reward."""

    at_least: int | None = None

    def __call__(self, group: Group) -> str | None:
        wanted = group.size if self.at_least is None else self.at_least
        return None if len(group.rewards) >= wanted else "too few valid samples"


@dataclass(frozen=True, slots=True)
class MixedOutcomes:
    """DAPO's dynamic sampling: a group counts when some of its samples are right and some are not, 0 < right < all.
    Equal rewards give every sample the advantage 0. ``solved_from`` is the reward from which a sample is right;
    ``None`` compares the rewards themselves."""

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
    """The first filter's reason against a group."""
    return next((reason for each in filters if (reason := each(group)) is not None), None)


@dataclass(frozen=True, slots=True)
class Carried:
    """An unfinished rollout that goes on for a later batch."""

    rollout_id: str
    group_id: str
    attempt: int
    """From 1; 0 while it waits for a worker."""
    session_id: str | None
    """The model server's session that holds its trajectory so far; ``None`` before it runs, and for agents that open
    their own."""
    weights_version: int | None
    """When it started; ``None`` before."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Effective groups for one training step."""

    index: int
    """From 1."""
    weights_version: int
    """Of the policy that trains on this."""
    groups: tuple[Group, ...]
    carried: tuple[Carried, ...]
    """Rollouts under way when the batch was full; they go on."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Groups that ended for this batch without counting, by reason."""
    exhausted: bool = False
    """The data has come to its end; such a batch may hold fewer groups than were asked for, or none."""

    @property
    def samples(self) -> Sequence[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    def staleness(self, sample: Sample) -> int:
        """Weights versions between the sample's first token and this batch."""
        return self.weights_version - sample.weights.first

    def rows(self) -> list[dict[str, Any]]:
        """Result rows for a trainer, group by group, each with ``group_id``, ``weights_version_start``,
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
