"""Verdicts (a reward that can be trusted, or the typed reason why there is none), and the rows that carry them.

A verdict is ``valid`` with a reward or ``invalid`` with a failure and no reward. There is no third state, and a
failure of the infrastructure is never a reward of 0. ``invalid`` needs evidence from outside the agent's reach. A
failure that a patch or a box's contents can cause is graded as valid work. Tampering is a finding beside the verdict.

`decide_validity` is the only place that decides whether a reply or a result row holds a reward. Environments apply it
to the reply of a plugin's ``verify``, the pipeline to every verify response, and readers to result rows.

The public part of a dataset row is ``responses_create_params`` without its ``metadata`` (except allow-listed keys, and
those that model servers read), and the keys by which a run numbers its rows. Only the environment sees the rest.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import ModelError, NemoGymError
from nemo_gym.contract.session import IDENTIFIER, AgentOutcome

TASK_INDEX_KEY = "_ng_task_index"
ROLLOUT_INDEX_KEY = "_ng_rollout_index"
ROLLOUT_ID_KEY = "_ng_rollout_id"
ATTEMPT_INDEX_KEY = "_ng_attempt_index"
"""Counted from 0, as in NeMo Gym: the first attempt of a rollout is 0."""
AGENT_REF_KEY = "agent_ref"


_TASK_ID_FIELDS = ("task_id", "instance_id", "id", "uuid")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_TASK_ID = 128


def new_run_id() -> str:
    """``<UTC time>-<6 random hex digits>``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def rollout_id_of(run_id: str, task_index: int, rollout_index: int) -> str:
    """``<run>.<task>-<rollout>``: NeMo Gym's ``<task>-<rollout>``, unique across runs. The same for all attempts."""
    return f"{run_id}.{task_index}-{rollout_index}"


def group_id_of(run_id: str, task_index: int) -> str:
    return f"{run_id}.{task_index}"


def task_id_of(row: dict[str, Any], task_index: int) -> str:
    """The row's own public name if it has one, else its index."""
    for key in _TASK_ID_FIELDS:
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool):
            name = _UNSAFE.sub("-", str(value)).strip("-._")[:MAX_TASK_ID]
            if IDENTIFIER.match(name):
                return name
    return str(task_index)


PARAMS_KEY = "responses_create_params"
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "max_output_tokens", "stop")
"""The request parameters that a model session can enforce, as a run and a row name them."""
RESPONSE_KEY = "response"
SESSION_KEY = "_ng_session"
"""The key under which the pipeline adds data for the servers to a row; never stored."""
NG_FAILURE_CLASS_KEY = "_ng_failure_class"
NG_TERMINAL_KEY = "_ng_failure_terminal"
NG_NO_PERSIST_KEY = "_ng_no_persist"
DECLARING_KEYS = (NG_FAILURE_CLASS_KEY, NG_TERMINAL_KEY, NG_NO_PERSIST_KEY, "mask_sample")
"""NeMo Gym's keys by which a reply declares that it has no verdict."""
DECIDING_FIELDS = frozenset({"valid", "failure_kind", "failure_reason", *DECLARING_KEYS})
"""Fields by which a reply decides that it has no verdict, and says why."""
NO_PROMPT = "the row has no prompt: 'responses_create_params.input' is missing or blank"
PUBLIC_ROW_KEYS = frozenset(
    {"agent_ref", "skills_ref", "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id"}
)
MODEL_METADATA_KEYS = frozenset({"chat_template_kwargs", "extra_body"})
"""Keys of ``responses_create_params.metadata`` with parameters for the model server, as JSON text."""
PUBLIC_VERDICT_KEYS = frozenset({"reward", "valid", "mask_sample", "failure_kind"})

_NAMES = frozenset({AGENT_REF_KEY, TASK_INDEX_KEY, ROLLOUT_INDEX_KEY, ROLLOUT_ID_KEY, ATTEMPT_INDEX_KEY, "task_id"})

# Who sets the fields of a result row beside the dataset row. What others say under these names is left out.

RUN_FIELDS = _NAMES | {
    *("ng_trajectory", "ng_model_session", "ng_model_call_capture", "artifacts", "artifacts_digest"),
    *("validation", "reward_source", "reverified", "verification_skipped", "replicas", "failures", "failure_stage"),
    "server_logs",
}
"""Fields that only the run and its model server set."""
AGENT_FIELDS = frozenset({"outcome_detail", "ng_agent_observations"})
"""Fields that only the agent sets."""
VERDICT_FIELDS = frozenset(
    {
        *("reward", "valid", "failure_kind", "failure_reason", "reward_components", "reward_reason"),
        *("reward_info", "findings", "official", "details", "evaluation_log", "row_access", *DECLARING_KEYS),
    }
)
"""Fields that only the environment sets; where there is none, the agent."""
_NOT_OF_ROWS = (RUN_FIELDS | AGENT_FIELDS | VERDICT_FIELDS | {RESPONSE_KEY, SESSION_KEY}) - _NAMES


def without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a row or reply whose names are not in ``names``."""
    return {key: value for key, value in fields.items() if key not in names}


def dataset_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataset row that its result row keeps. The others are an earlier run's, if the row is a result
    row, or forged."""
    return without(row, _NOT_OF_ROWS)


def without_earlier_verdict(row: dict[str, Any]) -> dict[str, Any]:
    """A dataset row without the failure and the findings of an earlier run, which tell nothing about this one. Result
    rows have ``mask_sample`` or a key of NeMo Gym's; without these, ``valid`` is a field of the dataset's own."""
    is_result = any(key in row for key in DECLARING_KEYS)
    return without(row, DECIDING_FIELDS | {"findings"}) if is_result else row


class RowAccess(StrEnum):
    """Which part of a row an agent server gets."""

    PUBLIC = "public"
    FULL = "full"
    """The whole row; the results are labelled with it."""
    VALIDATION = "validation"
    """Private fields only in the explicit validation mode (oracle agents)."""


def public_params(params: Any, metadata_keys: Collection[str] = ()) -> Any:
    """The public part of ``responses_create_params``."""
    if not isinstance(params, Mapping) or "metadata" not in params:
        return params
    public = {key: value for key, value in params.items() if key != "metadata"}
    metadata = params["metadata"]
    keys = MODEL_METADATA_KEYS.union(metadata_keys)
    if isinstance(metadata, Mapping) and (allowed := {k: v for k, v in metadata.items() if k in keys}):
        public["metadata"] = allowed
    return public


def public_row(row: Mapping[str, Any], metadata_keys: Collection[str] = ()) -> dict[str, Any]:
    """The public part of a row."""
    public = {key: value for key, value in row.items() if key in PUBLIC_ROW_KEYS}
    if PARAMS_KEY in row:
        public[PARAMS_KEY] = public_params(row[PARAMS_KEY], metadata_keys)
    return public


def named_agent(row: Mapping[str, Any]) -> Any:
    """Return the agent that a row names with ``agent_ref``: an object with ``name``, or the name alone."""
    ref = row.get(AGENT_REF_KEY)
    return ref.get("name") if isinstance(ref, Mapping) else ref


def has_prompt(params: Any) -> bool:
    """Whether ``responses_create_params`` hold a prompt: text that is not blank, an image, or an earlier tool call."""
    return _has_content(params.get("input")) if isinstance(params, Mapping) else False


def _has_content(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(map(_has_content, value))
    if not isinstance(value, Mapping):
        return False
    if "content" in value or "text" in value:
        return _has_content(value.get("content")) or _has_content(value.get("text"))
    # A message without content is no prompt; an image, a file or a tool call is.
    return bool(value.get("type", "message") != "message")


def public_verdict(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a verdict that an agent server may see: numbers and flags that this suite defines, and reward
    components. Any other field of a plugin's reply may quote the expected answer; the pipeline reads those itself."""
    public = {key: reply[key] for key in PUBLIC_VERDICT_KEYS if key in reply}
    components = reply.get("reward_components")
    if isinstance(components, Mapping):
        public["reward_components"] = {
            str(name): value for name, value in components.items() if isinstance(value, int | float)
        }
    return public


def row_digest(row: Mapping[str, Any]) -> str:
    """A digest that identifies a task's row, without the response, which a verify body has and a seed body lacks."""
    row = {key: value for key, value in row.items() if key != RESPONSE_KEY}
    return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).hexdigest()


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
    """The model's server was reached and refused the key, the model's name, or the request."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """The first request of the attempt does not fit the model's context."""
    MCP_FAILED = "mcp_failed"
    """A tool server of the session failed: an MCP server served none of the harness's requests, or the environment
    declared by status 503 that a tool cannot do its work."""
    AGENT_CRASHED = "agent_crashed"
    AGENT_LOST = "agent_lost"
    """The agent server ended, and the attempt with it."""
    VERIFIER_FAILED = "verifier_failed"
    CONTROL_RUN_FAILED = "control_run_failed"
    """The environment no longer passes its own control run with the gold solution."""
    CONTROLS_WEAK = "controls_weak"
    """The run demands stronger controls than this row's tests allow."""
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
    """A stable identifier, for example ``verdict_not_caused_by_tests``."""
    detail: str
    evidence: dict[str, Any] = Field(default_factory=dict)


class Verdict(BaseModel):
    """The decision of ``verify`` about one attempt; its fields become fields of the result row."""

    model_config = ConfigDict(extra="forbid")

    valid: bool
    reward: float | None = None
    """At most 0 if there are findings."""
    failure_kind: FailureKind | None = None
    failure_reason: str | None = None
    """One sentence for people; holds no private field of the row."""
    official: dict[str, Any] = Field(default_factory=dict)
    """The verdict as the official harness computes it (for SWE-bench: ``resolved``, ``tests_status``, …)."""
    findings: list[Finding] = Field(default_factory=list)
    details: dict[str, Any] = Field(default_factory=dict)
    reward_reason: str | None = None
    """A few words that explain the reward, for tables (``2 of 4 tests fail``)."""
    evaluation_log: str | None = Field(None, repr=False)
    """The output of the grading, for people. The pipeline keeps the last `MAX_EVALUATION_LOG_CHARS` in a file."""

    @field_validator("reward")
    @classmethod
    def _finite(cls, reward: float | None) -> float | None:
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the reward is {reward}, not a finite number")
        return reward

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

    @model_validator(mode="after")
    def _findings_leave_no_reward(self) -> Self:
        if self.findings and self.reward is not None:
            self.reward = min(self.reward, 0.0)  # a penalty stays
        return self

    @property
    def retryable(self) -> bool:
        return not self.valid and self.failure_kind in RETRYABLE_FAILURES

    def as_fields(self) -> dict[str, Any]:
        """The verdict as fields of a result row."""
        optional = {"official", "details", "reward_reason", "evaluation_log"}
        fields = self.model_dump(mode="json", exclude=optional)
        fields["mask_sample"] = not self.valid
        return fields | {name: value for name in sorted(optional) if (value := getattr(self, name))}


def declares_failure(reply: Mapping[str, Any]) -> bool:
    """Whether a reply or a result row declares that it has no verdict, by this suite's fields or NeMo Gym's. A
    ``valid`` that is no boolean declares no verdict either.

    For NeMo Gym a ``failure_kind`` beside ``mask_sample: false`` is a remark about a sample that counts. A
    `FailureKind` of this suite says that there is no reward."""
    valid, failure_name = reply.get("valid"), reply.get("failure_kind")
    return (
        (valid is not None and valid is not True)
        or (bool(failure_name) and (reply.get("mask_sample") is not False or failure_name in [*FailureKind]))
        or bool(reply.get("mask_sample"))
        or bool(reply.get(NG_NO_PERSIST_KEY))
        or reply.get(NG_FAILURE_CLASS_KEY) is not None
    )


def decide_validity(reply: Mapping[str, Any], unnamed: FailureKind = FailureKind.VERIFIER_FAILED) -> Verdict:
    """The verdict in ``reply``: valid with its reward, or invalid with the reason.

    A declared failure is invalid, even if the reply has a reward, and so is a reward that is not a finite number. A
    ``failure_reason`` alone declares nothing; it stays beside the reward.

    Args:
        reply: the reply of ``verify`` or of an agent's ``run``, or a result row.
        unnamed: the kind of a failure for which the reply names no `FailureKind`.
    """
    reason = reply.get("failure_reason") or None
    if declares_failure(reply):
        own_name, valid = reply.get("failure_kind"), reply.get("valid")
        failure_name = own_name or reply.get(NG_FAILURE_CLASS_KEY)
        kind = FailureKind(str(failure_name)) if failure_name in [*FailureKind] else unnamed
        if reason is None and failure_name:
            reason = f"reported as '{failure_name}'"
        elif own_name and own_name != kind:
            reason = f"{own_name}: {reason}"
        if not isinstance(valid, bool | None):
            malformed = f"'valid' must be true, false or absent, not {valid!r}"
            reason = malformed if reason is None else f"{malformed}; {reason}"
        return Verdict.invalid(kind, str(reason or "the sample is masked"))
    reward = reply.get("reward")
    if isinstance(reward, int | float) and abs(reward) <= sys.float_info.max:
        return Verdict.of(float(reward), failure_reason=None if reason is None else str(reason))
    return Verdict.invalid(unnamed, f"verify returned the reward {reward!r}, not a finite number")


_FINDINGS = TypeAdapter(list[Finding])


def verdict_of_reply(reply: Mapping[str, Any]) -> Verdict:
    """The verdict in a reply of ``verify``, with its findings; invalid if they cannot be read."""
    verdict = decide_validity(reply)
    if reply.get("findings") is None:
        return verdict
    try:
        findings = _FINDINGS.validate_python(reply["findings"])
    except ValidationError as error:
        problem = (
            "'findings' must be a list of objects with 'kind', 'detail' and perhaps 'evidence':"
            f" {validation_problems(error)}"
        )
        if verdict.failure_kind is not None:
            return Verdict.invalid(verdict.failure_kind, f"{verdict.failure_reason}; {problem}")
        return Verdict.invalid(FailureKind.VERIFIER_FAILED, problem)
    return Verdict.model_validate({**dict(verdict), "findings": findings})


_KIND_OF_CODE = {
    "sandbox_lost": FailureKind.SANDBOX_LOST,
    "exec_lost": FailureKind.EXEC_LOST,
    "model": FailureKind.MODEL_UNREACHABLE,
}


def verdict_of_error(error: NemoGymError) -> Verdict:
    """The invalid verdict for an error of the grading, whose details may hold ``kind`` and ``evaluation_log``."""
    fallback = FailureKind.SANDBOX_FAILED if error.code.startswith("sandbox") else FailureKind.VERIFIER_FAILED
    kind_name = error.details.get("kind")
    kind = FailureKind(str(kind_name)) if kind_name in [*FailureKind] else _KIND_OF_CODE.get(error.code, fallback)
    return Verdict.invalid(kind, error.message, evaluation_log=error.details.get("evaluation_log"))


# Failures of a rollout's stages

MAX_REASON_CHARS = 500


class StageName(StrEnum):
    INIT = "init"
    RUN = "run"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Why a stage did not produce a result."""

    stage: StageName
    kind: FailureKind
    reason: str
    retryable: bool = True
    new_attempt: bool = True
    """Whether a retry needs a new attempt; ``False`` repeats EVAL with the same attempt and artifacts."""
    details: Mapping[str, Any] = field(default_factory=dict)


class StageError(Exception):
    """Carries a typed failure out of a stage."""

    def __init__(self, failure: StageFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


JOB_OVERDUE = "the job's deadline has passed"
"""How the reason of a `FailureKind.DEADLINE` begins if it is the job's own deadline, not a stage's."""
_REFUSAL_STATUSES = frozenset({400, 401, 403, 404, 405, 413, 422})
_SETTING_REFUSED = re.compile(
    r"refused (its|the) API key|engine_credential|invalid_api_key|has no such model or route"
)
_CONTEXT_WORDS = re.compile(r"context.{0,3}(length|window|size)|too many tokens|prompt is too long", re.IGNORECASE)


def is_context_exceeded(said: str) -> bool:
    """Whether an endpoint's error text says that the request exceeds the model's context."""
    return _CONTEXT_WORDS.search(said) is not None


def outcome_of_refusal(status: int | None, said: str) -> AgentOutcome:
    """Decide whether an endpoint refused the request or could not be reached, by its status and error text. The text
    matters because a gateway answers 502 for an engine that refuses the gateway's key, or lacks its model."""
    refused = status in _REFUSAL_STATUSES or _SETTING_REFUSED.search(said) is not None
    return AgentOutcome.MODEL_REFUSED if refused else AgentOutcome.MODEL_UNREACHABLE


def outcome_of_model_error(error: ModelError) -> AgentOutcome:
    """The outcome of an attempt that ended with ``error``, whose ``details['status']`` is the endpoint's status, if
    there was a response."""
    return outcome_of_refusal(error.details.get("status"), error.message)


INFRASTRUCTURE_OUTCOMES = {
    AgentOutcome.CRASHED: FailureKind.AGENT_CRASHED,
    AgentOutcome.MODEL_UNREACHABLE: FailureKind.MODEL_UNREACHABLE,
    AgentOutcome.MODEL_REFUSED: FailureKind.MODEL_REFUSED,
    AgentOutcome.CONTEXT_EXCEEDED: FailureKind.CONTEXT_EXCEEDED,
    AgentOutcome.MCP_FAILED: FailureKind.MCP_FAILED,
    AgentOutcome.ENVIRONMENT_LOST: FailureKind.ENVIRONMENT_LOST,
    # A lost box leaves nothing to grade.
    AgentOutcome.SANDBOX_LOST: FailureKind.SANDBOX_LOST,
}
"""Outcomes of an act that are not the policy's doing; work with any other outcome is graded."""


def failure_of_outcome(outcome: AgentOutcome, detail: Any) -> StageFailure | None:
    """The failure that an act's outcome stands for; ``None`` if the work must be graded."""
    kind = INFRASTRUCTURE_OUTCOMES.get(outcome)
    if kind is None:
        return None
    reason = str(detail or f"the agent reported '{outcome}'")[:MAX_REASON_CHARS]
    return StageFailure(StageName.RUN, kind, reason, retryable=kind in RETRYABLE_FAILURES)


def failure_of_reply(stage: StageName, reply: Mapping[str, Any]) -> StageFailure | None:
    """The failure in a verify response (in RUN: the reply of an agent's ``run``); ``None`` if its verdict is valid."""
    unnamed = FailureKind.AGENT_CRASHED if stage is StageName.RUN else FailureKind.VERIFIER_FAILED
    verdict = decide_validity(reply, unnamed)
    if verdict.failure_kind is None:
        return None
    legacy_class = reply.get(NG_FAILURE_CLASS_KEY)
    return StageFailure(
        stage=stage,
        kind=verdict.failure_kind,
        reason=str(verdict.failure_reason)[:MAX_REASON_CHARS],
        retryable=verdict.retryable and not reply.get(NG_TERMINAL_KEY),
        new_attempt=stage is not StageName.EVAL,
        details={"failure_class": legacy_class} if legacy_class else {},
    )
