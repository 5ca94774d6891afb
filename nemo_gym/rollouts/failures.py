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
from nemo_gym.contract.rows import NG_FAILURE_CLASS_KEY
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import RETRYABLE_FAILURES, FailureKind
from nemo_gym.rollouts.interfaces import Job, StageFailure, StageName

NG_TERMINAL_KEY = "_ng_failure_terminal"
NG_NO_PERSIST_KEY = "_ng_no_persist"

MAX_REASON_CHARS = 500

INFRASTRUCTURE_OUTCOMES = {
    AgentOutcome.CRASHED: FailureKind.AGENT_CRASHED,
    AgentOutcome.MODEL_UNREACHABLE: FailureKind.MODEL_UNREACHABLE,
    AgentOutcome.MODEL_REFUSED: FailureKind.MODEL_REFUSED,
    AgentOutcome.CONTEXT_EXCEEDED: FailureKind.CONTEXT_EXCEEDED,
    AgentOutcome.MCP_FAILED: FailureKind.MCP_FAILED,
    # A lost box leaves nothing that could be graded.
    AgentOutcome.SANDBOX_LOST: FailureKind.SANDBOX_LOST,
}
"""Outcomes of an act that are no work of the policy; every other outcome is graded."""

_KIND_BY_STAGE = {
    StageName.INIT: FailureKind.SEED_FAILED,
    StageName.RUN: FailureKind.AGENT_CRASHED,
    StageName.EVAL: FailureKind.VERIFIER_FAILED,
}
_LOST_BY_STAGE = {
    StageName.INIT: FailureKind.ENVIRONMENT_LOST,
    StageName.RUN: FailureKind.AGENT_LOST,
    StageName.EVAL: FailureKind.ENVIRONMENT_LOST,
}
_KIND_BY_CODE = {
    "sandbox_create": FailureKind.SANDBOX_FAILED,
    "sandbox_create_verification": FailureKind.SANDBOX_FAILED,
    "sandbox_image_missing": FailureKind.SANDBOX_FAILED,
    "sandbox": FailureKind.SANDBOX_FAILED,
    "sandbox_capability": FailureKind.SANDBOX_FAILED,
    "sandbox_lost": FailureKind.SANDBOX_LOST,
    "model": FailureKind.MODEL_UNREACHABLE,
}
# What a second try of the same request cannot change: the request itself is refused.
_FINAL_CODES = frozenset({"config", "row", "sandbox_capability", "sandbox_image_missing", "role"})
_FINAL_STATUSES = frozenset({400, 404, 405, 413, 422, 501})


class StageError(Exception):
    """Carries a typed failure out of a stage."""

    def __init__(self, failure: StageFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class PeerError(Exception):
    """A server of the stack answered with an error, or not at all (``status`` 0)."""

    def __init__(self, server: str, path: str, status: int, problem: Mapping[str, Any]) -> None:
        self.server, self.path, self.status, self.problem = server, path, status, problem
        super().__init__(f"{server}{path}: {problem.get('detail') or problem.get('title') or f'status {status}'}")


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


def of_peer(stage: StageName, error: PeerError) -> StageFailure:
    """What a peer's error means for the attempt."""
    code = str(error.problem.get("code", ""))
    kind = _LOST_BY_STAGE[stage] if error.status == 0 else _KIND_BY_CODE.get(code, _KIND_BY_STAGE[stage])
    refused = error.status in (401, 403, 404, 409, 410)
    told = error.problem.get("retryable")
    final = (code in _FINAL_CODES or error.status in _FINAL_STATUSES) and told is not True
    return StageFailure(
        stage=stage,
        kind=kind,
        reason=str(error)[:MAX_REASON_CHARS],
        retryable=not final or (stage is StageName.EVAL and refused),
        # A fenced, forgotten or foreign attempt cannot be verified again, nor one whose replica is gone for good; only
        # a new one can.
        new_attempt=stage is not StageName.EVAL or refused or error.problem.get("replica_lost") is True,
        details={"server": error.server, "status": error.status, "code": code},
    )


def of_outcome(outcome: AgentOutcome, detail: Any) -> StageFailure | None:
    """The failure that an act's outcome stands for, or ``None`` when the work is to be graded."""
    kind = INFRASTRUCTURE_OUTCOMES.get(outcome)
    if kind is None:
        return None
    reason = str(detail or f"the agent reported '{outcome}'")[:MAX_REASON_CHARS]
    return StageFailure(StageName.RUN, kind, reason, retryable=kind in RETRYABLE_FAILURES)


def of_verdict(stage: StageName, row: Mapping[str, Any]) -> StageFailure | None:
    """The failure in a verify response, or ``None`` when it holds a reward. Understands NeMo Gym's markers."""
    legacy_class = row.get(NG_FAILURE_CLASS_KEY)
    masked = row.get("valid") is False or row.get("mask_sample") is True or bool(row.get(NG_NO_PERSIST_KEY))
    if not masked and legacy_class is None and isinstance(row.get("reward"), int | float):
        return None
    text = row.get("failure_kind") or legacy_class
    try:
        kind = FailureKind(str(text))
    except ValueError:
        kind = FailureKind.AGENT_CRASHED if stage is StageName.RUN else FailureKind.VERIFIER_FAILED
    reason = row.get("failure_reason") or (f"reported as '{text}'" if text else "the verify response has no reward")
    return StageFailure(
        stage=stage,
        kind=kind,
        reason=str(reason)[:MAX_REASON_CHARS],
        retryable=kind in RETRYABLE_FAILURES and not row.get(NG_TERMINAL_KEY),
        new_attempt=stage is not StageName.EVAL,
        details={"failure_class": legacy_class} if legacy_class else {},
    )


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
