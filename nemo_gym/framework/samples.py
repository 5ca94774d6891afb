"""The columns and the tag of a trajectory's row in TransferQueue, which the trainer reads.

``P`` prompt tokens, ``R`` response tokens. Plain arrays; `nemo_gym.framework.transfer_queue` makes tensors of them.

| column | type |
|---|---|
| ``prompts``, ``responses``, ``response_mask``, ``loss_mask`` | int64 [P], [R], [R], [R] |
| ``input_ids``, ``attention_mask``, ``position_ids`` | int64 [P + R]; ``position_ids`` [4, P + R] with images |
| ``rm_scores`` | float32 [R], the score at the last token |
| ``rollout_log_probs`` | float32 [R], if the engine returned them |
| ``num_turns``, ``session_id``, ``global_steps`` | numbers |
| the sample's own columns, ``multi_modal_inputs``, ``reward_extra_info``, ``extra_fields`` | plain data |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_gym.framework.batch import CARRIED, PromptSample
from nemo_gym.framework.media import media_columns
from nemo_gym.framework.scoring import Score
from nemo_gym.gateway.tokens.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory as a row of TransferQueue."""

    key: str
    """``<uid>_<session>_<trajectory>``."""
    fields: dict[str, Any]
    tag: dict[str, Any]


def trajectory_row(
    sample: PromptSample,
    session_index: int,
    index: int,
    trajectory: Trajectory,
    score: Score,
    *,
    global_steps: int | None,
    masked: bool,
    processor: Any = None,
) -> TrajectoryRow:
    """Return the row of a trajectory. ``masked`` leaves it out of the loss and keeps its reward. ``processor`` is the
    policy's, for conversations with images."""
    prompts = np.asarray(trajectory.prompt_ids, dtype=np.int64)
    responses = np.asarray(trajectory.response_ids, dtype=np.int64)
    mask = np.frombuffer(trajectory.response_mask, dtype=np.uint8).astype(np.int64)
    if masked:
        mask = np.zeros_like(mask)
    total = len(prompts) + len(responses)
    scores = np.zeros(len(responses), dtype=np.float32)
    if len(responses):
        scores[-1] = score.reward
    first, last = _steps(trajectory, global_steps)
    positions, media = media_columns(processor, trajectory)
    fields: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses]),
        "attention_mask": np.ones(total, dtype=np.int64),
        "position_ids": np.arange(total, dtype=np.int64) if positions is None else positions,
        "response_mask": mask,
        "loss_mask": mask.copy(),
        "rm_scores": scores,
        "multi_modal_inputs": media,
        "num_turns": len(trajectory.turns) * 2 if not trajectory.message_count else trajectory.message_count + 1,
        "reward_extra_info": dict(score.extra),
        "extra_fields": {
            "reward_extra_info": dict(score.extra),
            "min_global_steps": first,
            "max_global_steps": last,
        },
        "session_id": session_index,
        "global_steps": global_steps,
        **{name: sample.fields[name] for name in CARRIED if name in sample.fields},
    }
    if trajectory.logprobs is not None:
        fields["rollout_log_probs"] = np.asarray(trajectory.logprobs, dtype=np.float32)
    tag: dict[str, Any] = {
        "status": "success",
        "uid": sample.uid,
        "prompt_len": len(prompts),
        "response_len": len(responses),
        "seq_len": total,
        "global_steps": global_steps,
        "min_global_steps": first,
        "max_global_steps": last,
        "reward_source": score.source,
    }
    if masked:
        tag["masked"] = True
    if trajectory.finish_reason == "length":
        tag["materialization_reason"] = "max_trajectory_length"
    return TrajectoryRow(f"{sample.uid}_{session_index}_{index}", fields, tag)


def shared_columns(rows: list[TrajectoryRow]) -> list[str]:
    """Return the columns that all rows have, in order, because only these can be written together. If an engine
    returned logprobs for only some of a session's conversations, the session is written without logprobs."""
    first, *others = (row.fields for row in rows)
    return [name for name in first if all(name in other for other in others)]


def _steps(trajectory: Trajectory, global_steps: int | None) -> tuple[int | None, int | None]:
    """Return the first and last weights version that sampled the trajectory if versions are trainer steps, or else the
    batch's step twice."""
    versions = [int(version) for version in trajectory.weights_versions if version.lstrip("-").isdecimal()]
    return (min(versions), max(versions)) if versions else (global_steps, global_steps)
