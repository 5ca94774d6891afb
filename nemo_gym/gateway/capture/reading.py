"""Captured calls read back, also as the model calls of a rollout's observations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.rollout_observability import TrajectoryModelCall, TrajectoryResponseMetadata, TrajectoryTokenStats
from nemo_gym.storage.jsonl import whole_lines


def read_calls(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of one file, oldest first. A last line that is still being written is left out."""
    for line in whole_lines(Path(path)):
        yield orjson.loads(line)


def model_call(call: Mapping[str, Any]) -> TrajectoryModelCall:
    """A captured call as `nemo_gym.rollout_observability` has it."""
    usage = call.get("usage") or {}
    sent_ms = (call.get("milliseconds") or {}).get("sent")
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return TrajectoryModelCall(
        model_call_id=call["call_id"],
        started_at=call["received_at"],
        completed_at=call["received_at"] + sent_ms / 1000 if sent_ms is not None else None,
        duration_ms=sent_ms,
        request=call.get("request"),
        response=call.get("answer"),
        response_metadata=TrajectoryResponseMetadata(
            dialect=call["dialect"],
            status_code=call.get("status"),
            finish_reason=call.get("finish"),
            error_category=call.get("code"),
        ),
        token_stats=TrajectoryTokenStats(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion if prompt is not None and completion is not None else None,
            cached_tokens=usage.get("cached_tokens"),
            reasoning_tokens=usage.get("reasoning_tokens"),
        ),
    )
