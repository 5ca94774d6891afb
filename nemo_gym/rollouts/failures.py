"""Typed failures: which of them a peer's answer means, when they may be retried, and the row that records one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from nemo_gym.contract.identity import (
    AGENT_REF_KEY,
    ATTEMPT_INDEX_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
)
from nemo_gym.contract.rows import NG_FAILURE_CLASS_KEY, NG_TERMINAL_KEY
from nemo_gym.contract.verdict import StageFailure
from nemo_gym.rollouts.interfaces import Job

_VARIABLE = re.compile(r"(?i)0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]{8,}\b|(?<![\d.])(?![1-5]\d\d(?![\d.]))\d+(\.\d+)?")
"""Addresses, digests, counts and durations. Three digits that may be an HTTP status are told apart."""

_UNDERSCORES = re.compile("__+")


def same_way(kind: str, reason: str | None, names: Iterable[str] = ()) -> str:
    """What failures have in common that failed the same way: the kind, and the reason without ``names`` (of the task,
    of the rollout; also as image names spell them) and without numbers that change from one to the next."""
    text = _UNDERSCORES.sub("_", (reason or "").lower())
    for name in names:
        if len(name) > 2:
            text = text.replace(_UNDERSCORES.sub("_", name.lower()), "…")
    return f"{kind}: {_VARIABLE.sub('#', text)}"


def failure_row(
    job: Job, failure: StageFailure, *, validation: str | None = None, kept: Mapping[str, Any] | None = None
) -> bytes:
    """The line of the failures file: NeMo Gym's keys, the verdict's, every earlier failure, and what is ``kept`` of
    the attempt. No private field."""
    row: dict[str, Any] = {
        **(kept or {}),
        TASK_INDEX_KEY: job.spec.task_index,
        ROLLOUT_INDEX_KEY: job.spec.sample_index,
        AGENT_REF_KEY: {"type": "responses_api_agents", "name": job.spec.agent},
        ROLLOUT_ID_KEY: job.job_id,
        ATTEMPT_INDEX_KEY: max(0, job.attempt - 1),
        "task_id": job.spec.task_id,
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "failure_kind": failure.kind,
        "failure_reason": failure.reason,
        "failure_stage": failure.stage,
        "findings": [],
        NG_FAILURE_CLASS_KEY: failure.kind,
        NG_TERMINAL_KEY: not failure.retryable,
        "failures": [
            {"stage": past.stage, "kind": past.kind, "reason": past.reason, "details": dict(past.details)}
            for past in (*job.failures, failure)
        ],
    }
    if validation is not None:
        row["validation"] = validation
    return orjson.dumps(row, default=str)
