"""What a trainer gets: exact tokens, which of them were sampled, and why this trajectory exists."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrajectoryTurn:
    """One sampled answer: ``response_ids[start:end]``."""

    start: int
    end: int
    finish_reason: str
    weights_version: str | None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation's tokens. ``P`` prompt tokens, ``R`` response tokens.

    Every sampled token of a session is marked in exactly one of its trajectories. Where conversations share a
    beginning, the longest holds its sampled tokens, and the others have it in their prompt.
    """

    session_id: str
    index: int
    """Place among the session's trajectories, by the time of their last turn."""
    prompt_ids: array[int]
    """``int32 [P]``: all tokens before the first one that this trajectory trains on."""
    response_ids: array[int]
    """``int32 [R]``: sampled tokens, and what was put between them."""
    response_mask: bytes
    """``uint8 [R]``: 1 = sampled by the policy, 0 = given."""
    logprobs: array[float] | None
    """``float32 [R]``: natural logarithms as the engine returned them, 0 where the mask is 0. Nothing when the engine
    returned none for any turn of this trajectory."""
    turns: tuple[TrajectoryTurn, ...]
    split_reason: str
    """Why this is a trajectory of its own, a `SplitReason`; ``initial`` for a session's first conversation."""
    split_detail: str | None = None
    message_count: int = 0
    """Messages of the whole conversation, the last answer included."""
    reward: float | None = None
    """The verdict's; nothing while there is none, or where it is invalid."""
    reward_info: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Which rollout this belongs to, where a run is exported: ``rollout_id``, ``task_id``, ``task_index``,
    ``rollout_index``, ``attempt_index``, ``agent``."""
    multimodal: tuple[Mapping[str, Any], ...] = ()
    """``{kind, source, message}`` of each image, audio or video in the conversation, in order; ``source`` as it was
    sent (a URL or data), ``message`` the index of its message in the request that brought it."""

    @property
    def finish_reason(self) -> str:
        """Why the last answer ended."""
        return self.turns[-1].finish_reason

    @property
    def weights_versions(self) -> tuple[str, ...]:
        """The versions that sampled this, in order of first use; more than one: the weights changed meanwhile."""
        return tuple(dict.fromkeys(turn.weights_version for turn in self.turns if turn.weights_version is not None))

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens."""
        return self.response_mask.count(1)
