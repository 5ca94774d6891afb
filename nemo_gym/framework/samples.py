"""A session's reward, and the columns and the tag of its trajectories' rows in TransferQueue, which the trainer reads.

A session without a reward fails; it does not count as a reward of 0.

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

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from nemo_gym.contract.errors import RowError, VerifierError
from nemo_gym.framework.batch import CARRIED, PromptSample
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


def media_columns(processor: Any, trajectory: Trajectory) -> tuple[Any, dict[str, Any]]:
    """Return ``position_ids`` int64 [4, P + R] (text, time, height, width) and the processor's tensors, or
    ``(None, {})`` for a conversation of text alone or without a processor. Raises `RowError` for media that cannot
    be read.

    Args:
        processor: the policy's, of ``transformers``, with a tokenizer and ``get_rope_index``.
    """
    if processor is None or not trajectory.multimodal:
        return None, {}
    import torch

    ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.response_ids]], dtype=torch.long)
    images = [_image(item) for item in trajectory.multimodal]
    text = processor.tokenizer.decode(ids[0], skip_special_tokens=True)
    output = processor(text=[text], images=images, videos=None, return_tensors="pt", do_sample_frames=False)
    inputs = {name: value for name, value in dict(output).items() if name not in ("input_ids", "attention_mask")}
    grid = inputs.get("image_grid_thw")
    rope_inputs: dict[str, Any] = {"image_grid_thw": grid, "video_grid_thw": inputs.get("video_grid_thw")}
    if grid is not None:
        inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    if inputs.get("mm_token_type_ids") is not None:
        kinds = torch.zeros_like(ids)
        kinds[ids == processor.image_token_id] = 1
        rope_inputs["mm_token_type_ids"] = kinds
    mask = torch.ones_like(ids)
    vision, _ = processor.get_rope_index(input_ids=ids, attention_mask=mask, **rope_inputs)
    order = torch.arange(ids.shape[1], dtype=torch.long)[None]
    return torch.cat([order, vision[:, 0]], dim=0), inputs


def _image(item: Mapping[str, Any]) -> Any:
    from PIL import Image

    source = str(item["source"])
    if item["kind"] != "image" or not source.startswith("data:"):
        raise RowError(
            f"a trajectory holds {item['kind']} at {source[:60]!r}: positions are computed of images that were sent as"
            " data: URLs"
        )
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB")
