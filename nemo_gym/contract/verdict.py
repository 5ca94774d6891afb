"""Verdicts: a reward that can be trusted, or the typed reason why there is none.

A verdict is ``valid`` with a reward or ``invalid`` with a failure and no reward; there is no third state, and no zero
stands for a failure of ours. ``invalid`` needs evidence from outside the agent's reach. What a patch or a box's
contents can cause is a valid failure and graded as one. Tampering is a finding beside the verdict.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_EVALUATION_LOG_CHARS = 64 * 1024


class FailureKind(StrEnum):
    """Why an attempt has no reward."""

    SEED_FAILED = "seed_failed"
    SANDBOX_FAILED = "sandbox_failed"
    """A box could not be created, or its provider failed."""
    SANDBOX_LOST = "sandbox_lost"
    EXEC_LOST = "exec_lost"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    MODEL_UNREACHABLE = "model_unreachable"
    MODEL_REFUSED = "model_refused"
    """The model's server was reached and refused to serve: its key, the model's name, or the request."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The first request of the attempt does not fit the model's context."""
    MCP_FAILED = "mcp_failed"
    """A tool server of the session answered none of the harness's requests."""
    AGENT_CRASHED = "agent_crashed"
    AGENT_LOST = "agent_lost"
    """The agent server went away with the attempt."""
    VERIFIER_FAILED = "verifier_failed"
    CONTROL_RUN_FAILED = "control_run_failed"
    """The environment itself no longer passes its own gold control run."""
    CONTROLS_WEAK = "controls_weak"
    """The run asks for stronger controls than this row's tests allow."""
    ENVIRONMENT_LOST = "environment_lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    INTERNAL = "internal"


RETRYABLE_FAILURES = frozenset(FailureKind) - {
    FailureKind.CANCELLED,
    FailureKind.CONTEXT_EXCEEDED,
    FailureKind.CONTROL_RUN_FAILED,
    FailureKind.CONTROLS_WEAK,
}


class Finding(BaseModel):
    """An attempt to gain reward by other means than the task, with its evidence."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    """A stable word, for example ``verdict_not_caused_by_tests``."""
    detail: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class Verdict(BaseModel):
    """What ``verify`` decided about one attempt; merged into the result row by its field names."""

    model_config = ConfigDict(extra="forbid")

    valid: bool
    reward: float | None = None
    failure_kind: FailureKind | None = None
    failure_reason: str | None = None
    """One sentence for people; holds no private field of the row."""
    official: dict[str, Any] = Field(default_factory=dict)
    """The verdict as the official harness computes it (for SWE-bench: ``resolved``, ``tests_status``, …)."""
    findings: list[Finding] = Field(default_factory=list)
    details: dict[str, Any] = Field(default_factory=dict)
    reward_reason: str | None = None
    """A few words on why the reward is what it is, for tables (``2 of 4 tests fail``)."""
    evaluation_log: str | None = Field(None, repr=False)
    """What the grading printed, for people. The pipeline keeps the last `MAX_EVALUATION_LOG_CHARS` in a file."""

    @field_validator("evaluation_log")
    @classmethod
    def _end_of_log(cls, log: str | None) -> str | None:
        return log and log[-MAX_EVALUATION_LOG_CHARS:]

    @classmethod
    def of(cls, reward: float, **fields: Any) -> Verdict:
        return cls(valid=True, reward=reward, **fields)

    @classmethod
    def invalid(cls, kind: FailureKind, reason: str, **fields: Any) -> Verdict:
        return cls(valid=False, failure_kind=kind, failure_reason=reason, **fields)

    @model_validator(mode="after")
    def _reward_iff_valid(self) -> Self:
        if self.valid and (self.reward is None or self.failure_kind is not None):
            raise ValueError("a valid verdict has a reward and no failure_kind")
        if not self.valid and (self.reward is not None or self.failure_kind is None):
            raise ValueError("an invalid verdict has a failure_kind and no reward")
        return self

    @property
    def retryable(self) -> bool:
        return not self.valid and self.failure_kind in RETRYABLE_FAILURES


VERDICT_FIELDS: tuple[Literal["valid", "reward", "failure_kind", "failure_reason", "findings"], ...] = (
    "valid",
    "reward",
    "failure_kind",
    "failure_reason",
    "findings",
)
"""Names under which a verdict stands in a result row; ``mask_sample`` is ``not valid``."""
