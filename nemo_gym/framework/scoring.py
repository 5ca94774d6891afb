"""A session's reward and its source. A session without a reward fails; it does not count as a reward of 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nemo_gym.contract.errors import VerifierError
from nemo_gym.framework.batch import PromptSample
from nemo_gym.gateway.tokens.trajectories import Trajectory

RewardOrigin = Literal["environment", "runner", "reward_worker"]
_REWARD_NAMES = ("reward", "score")
"""The keys for the reward that runners post and that verl's reward functions return."""


class NoRewardError(VerifierError):
    """A session has no reward from any source."""

    code = "no_reward"


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a session, which all its trajectories get."""

    reward: float
    source: RewardOrigin
    extra: Mapping[str, Any] = field(default_factory=dict)


class RewardScorer(Protocol):
    """Scores a session that posted no reward, as a trainer's reward workers do."""

    async def __call__(
        self, trajectory: Trajectory, sample: PromptSample, reward_info: Mapping[str, Any]
    ) -> tuple[float, Mapping[str, Any]]: ...


async def score_session(
    trajectories: Sequence[Trajectory],
    sample: PromptSample,
    *,
    verdict: Score | None = None,
    scorer: RewardScorer | None = None,
) -> Score:
    """Return the environment's verdict, or else the runner's posted reward, or else the score of ``scorer`` for the
    final trajectory. Raises `NoRewardError` and `VerifierError`."""
    if verdict is not None:
        return verdict
    final = trajectories[-1]
    if (posted := posted_score(final)) is not None:
        return posted
    if scorer is None:
        raise NoRewardError(
            "the session ended without a reward: its runner posted none to complete_url, and no environment and no"
            " reward worker scores it"
        )
    info = {name: value for name, value in final.reward_info.items() if name != "finished"}
    reward, extra = await scorer(final, sample, info)
    return Score(_number(reward, "the reward worker's score"), "reward_worker", dict(extra))


def posted_score(trajectory: Trajectory) -> Score | None:
    """Return the runner's posted ``reward``, or else ``score``, with the other posted fields as extras. Raises
    `VerifierError` if it is no finite number."""
    info = dict(trajectory.reward_info)
    info.pop("finished", None)
    if trajectory.reward is not None:
        return Score(_number(trajectory.reward, "the posted reward"), "runner", info)
    for name in _REWARD_NAMES:
        if info.get(name) is not None:
            value = info.pop(name)
            return Score(_number(value, f"the posted reward_info.{name}"), "runner", info)
    return None


def finished(trajectory: Trajectory) -> bool | None:
    """Return the runner's posted ``finished`` flag, or ``None``. Raises `VerifierError` if it is not a bool."""
    flag = trajectory.reward_info.get("finished")
    if flag is not None and not isinstance(flag, bool):
        raise VerifierError(f"reward_info.finished must be true, false or null, got {flag!r}")
    return flag


def _number(value: Any, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise VerifierError(f"{label} must be a finite number, got {value!r}")
    return float(value)
