"""Result rows and failure rows: one line of the output, or of the failures file, per rollout."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.rows import (
    AGENT_REF_KEY,
    ATTEMPT_INDEX_KEY,
    NG_FAILURE_CLASS_KEY,
    NG_TERMINAL_KEY,
    PARAMS_KEY,
    RESPONSE_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    SESSION_KEY,
    TASK_INDEX_KEY,
    public_params,
)
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import StageFailure
from nemo_gym.rollouts.interfaces import Job, JobAttempt
from nemo_gym.rollouts.training_fields import masked_response, with_tokens

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
    job: Job,
    failure: StageFailure,
    *,
    validation: str | None = None,
    kept: Mapping[str, Any] | None = None,
    server_logs: Path | None = None,
) -> bytes:
    """The line of the failures file: NeMo Gym's keys, the verdict's, every earlier failure, what is ``kept`` of the
    attempt, and the folder of the servers' logs. No private field. Its response is complete and masked, so that a
    trainer reads it as any other."""
    row: dict[str, Any] = {
        **(kept or {}),
        PARAMS_KEY: public_params(orjson.loads(job.spec.row).get(PARAMS_KEY) or {"input": []}),
        RESPONSE_KEY: masked_response(failure.kind),
        TASK_INDEX_KEY: job.spec.task_index,
        ROLLOUT_INDEX_KEY: job.spec.sample_index,
        AGENT_REF_KEY: {"type": "responses_api_agents", "name": job.spec.agent},
        ROLLOUT_ID_KEY: job.job_id,
        ATTEMPT_INDEX_KEY: max(0, job.attempt - 1),
        "task_id": job.spec.task_id,
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "instance_config": {"mask_sample": True},  # where NeMo RL reads it
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
    if server_logs is not None:
        row["server_logs"] = str(server_logs)
    return orjson.dumps(with_tokens(row), default=str)


OWN_FIELDS = frozenset(
    {
        *(AGENT_REF_KEY, TASK_INDEX_KEY, ROLLOUT_INDEX_KEY, ROLLOUT_ID_KEY, ATTEMPT_INDEX_KEY, "task_id"),
        *("ng_trajectory", "ng_model_session", "artifacts", "artifacts_digest", "findings", "official", "details"),
        *("reward", "valid", "mask_sample", "failure_kind", "failure_reason", "reward_components", "reward_reason"),
        *("row_access", "validation", "reward_source", "reverified", "verification_skipped", "evaluation_log"),
    }
)
"""Of a result row: what the run, the model server and the environment say, and no agent called by ``/run``."""


def result_row(attempt: JobAttempt, verified: dict[str, Any], *, validation: str | None) -> bytes:
    """One line of the output, for an attempt with a valid verdict."""
    spec, act = attempt.job.spec, attempt.act
    row = dict(verified)
    row.pop(SESSION_KEY, None)
    row[TASK_INDEX_KEY] = spec.task_index
    row[ROLLOUT_INDEX_KEY] = spec.sample_index
    row.setdefault(AGENT_REF_KEY, {"type": "responses_api_agents", "name": spec.agent})
    row[ROLLOUT_ID_KEY] = spec.job_id
    row[ATTEMPT_INDEX_KEY] = attempt.job.attempt - 1
    row["task_id"] = row.get("task_id", spec.task_id)
    if attempt.public_params and PARAMS_KEY not in row:
        # A dataset in its own form: what the agent was asked is the environment's wording, and trainers read it here.
        row[PARAMS_KEY] = attempt.public_params
    row["valid"] = True
    row["mask_sample"] = False
    row.setdefault("failure_kind", None)
    row.setdefault("failure_reason", None)
    row.setdefault("findings", [])
    row["outcome"] = act.get("outcome", AgentOutcome.COMPLETED.value)
    if act.get("outcome_detail"):
        row["outcome_detail"] = act["outcome_detail"]
    if act.get("observations"):
        row["ng_agent_observations"] = act["observations"]
    if artifacts := act.get("artifacts"):
        row["artifacts"] = artifacts
        row["artifacts_digest"] = artifacts_digest(artifacts)
    row["timings"] = {name: round(seconds, 6) for name, seconds in attempt.timings.items()}
    row["topology"] = _topology(attempt)
    if attempt.replicas:
        row["replicas"] = attempt.replicas
    if validation is not None:
        row["validation"] = validation
    if attempt.servers.row_access == "full":
        row["row_access"] = "full"
    if attempt.servers.environment is None:
        row["reward_source"] = "agent"
    return orjson.dumps(with_tokens(row))


def artifacts_digest(artifacts: list[dict[str, Any]]) -> str:
    """SHA-256 over the artifacts' names and digests, in order: what a verdict is bound to."""
    digest = hashlib.sha256()
    for artifact in artifacts:
        digest.update(f"{artifact.get('name')}\0{artifact.get('sha256')}\n".encode())
    return digest.hexdigest()


def _topology(attempt: JobAttempt) -> str | None:
    placement = attempt.descriptor.get("placement") or {}
    topology = placement.get("topology")
    return str(topology) if topology is not None else None
