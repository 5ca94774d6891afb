"""What an agent reports about its work: invocations, tool calls, compactions, sandboxes.

This is for people and metrics; no reward is computed from it. Times are Unix seconds; durations are milliseconds
unless the name has another unit; ``None`` means not observed, and an `ObservationGap` tells why.
The module's name is NeMo Gym's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nemo_gym.config_types import ModelServerRef

if TYPE_CHECKING:
    from nemo_gym.openai_types.responses import NeMoGymResponse

Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0)]


class ConversationItem(dict[str, Any]):
    """An item of the Responses API as plain data, whose keys can also be read as attributes. NeMo Gym uses models
    here, but validating them in every rollout would cost more than it is worth."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _readable(items: Any) -> Any:
    if not isinstance(items, list):
        return items
    return [ConversationItem(item) if type(item) is dict else item for item in items]


class ObservationModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelCallRef(ObservationModel):
    """Refers to one model call by its own id, or by its server and the id of its response."""

    model_call_id: str | None = None
    model_ref: ModelServerRef | None = None
    response_id: str | None = None

    @model_validator(mode="after")
    def _can_be_found(self) -> Self:
        if not self.model_call_id and not (self.model_ref and self.response_id):
            raise ValueError("a model call is named by 'model_call_id', or by 'model_ref' and 'response_id' together")
        return self


class ModelCallRecord(BaseModel):
    """One captured model call. ``None`` means not observed."""

    model_config = ConfigDict(extra="allow")

    call_index: Count = 0
    """The call's place among the calls of its rollout, from 0."""
    model_call_id: str | None = None
    model_ref: ModelServerRef | None = None
    client_session_id: str | None = None
    """The session id that the calling harness sent in a header, if any."""
    dialect: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: Milliseconds | None = None
    status_code: int | None = None
    error_category: str | None = None
    """``None`` for a call that succeeded."""
    response_id: str | None = None
    response_status: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    tokens_in: Count | None = None
    tokens_out: Count | None = None
    tokens_reasoning: Count | None = None
    cached_tokens: Count | None = None
    request: Any | None = None
    response: Any | None = None

    @property
    def cache_hit(self) -> bool | None:
        """Whether part of the prompt came from the engine's prefix cache."""
        return None if self.cached_tokens is None else self.cached_tokens > 0


class TrajectoryTokenStats(ObservationModel):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    total_tokens: Count | None = None
    cached_tokens: Count | None = None


class TrajectoryResponseMetadata(ObservationModel):
    response_id: str | None = None
    model_ref: ModelServerRef | None = None
    model: str | None = None
    dialect: str | None = None
    status_code: int | None = None
    response_status: str | None = None
    finish_reason: str | None = None
    error_category: str | None = None
    latency_ttft_ms: Milliseconds | None = None


class TrajectoryModelCall(ObservationModel):
    model_call_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: Milliseconds | None = None
    request: Any | None = None
    response: Any | None = None
    token_stats: TrajectoryTokenStats = Field(default_factory=TrajectoryTokenStats)
    response_metadata: TrajectoryResponseMetadata = Field(default_factory=TrajectoryResponseMetadata)


class TrajectoryTurn(ObservationModel):
    invocation_id: str
    task_id: str
    rollout_id: str
    turn_no: int = Field(ge=1)
    timestamp: float
    question: Any | None = None
    answer: Any | None = None
    reasoning_content: Any | None = None
    resolved: bool | None = None
    step_count: Count
    """Steps of this invocation so far, as its producer counts them."""
    model_calls: list[ModelCallRef] = Field(default_factory=list)


class AgentInvocation(ObservationModel):
    """One run of an agent or sub-agent."""

    kind: Literal["agent_invocation"] = "agent_invocation"
    invocation_id: str
    parent_invocation_id: str | None = None
    spawned_by_tool_call_id: str | None = None
    status: Literal["completed", "failed", "incomplete", "unknown"] = "unknown"
    duration_ms: Milliseconds | None = None
    error_type: str | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    conversation: Annotated[list[Any], BeforeValidator(_readable)] = Field(default_factory=list)
    """Items of the Responses API, as this invocation saw them."""


class ToolCallObservation(ObservationModel):
    kind: Literal["tool_call"] = "tool_call"
    invocation_id: str
    tool_call_id: str
    sandbox_id: str | None = None
    tool_name: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    duration_ms: Milliseconds | None = None
    timing_source: Literal["executor", "artifact", "harness"] | None = None
    status: Literal["completed", "failed", "timeout", "cancelled", "incomplete", "unknown"] = "unknown"
    error_type: str | None = None

    @model_validator(mode="after")
    def _timing_has_a_source(self) -> Self:
        if self.started_at is not None and self.completed_at is not None and self.completed_at < self.started_at:
            raise ValueError("completed_at is before started_at")
        return self


class TrajectoryToolCall(ToolCallObservation):
    output: Any | None = None


class SandboxObservation(ObservationModel):
    kind: Literal["sandbox"] = "sandbox"
    role: Literal["agent", "verifier", "environment"]
    provider: str | None = None
    sandbox_id: str | None = None
    outcome: Literal["completed", "failed", "timeout", "oom", "sandbox_error", "cancelled", "unknown"] = "unknown"
    exit_code: int | None = None
    wall_time_s: float | None = Field(None, ge=0)
    cpu_time_s: float | None = Field(None, ge=0)
    peak_memory_mib: float | None = Field(None, ge=0)
    resource_usage_source: str | None = None
    error_type: str | None = None


class ContextCompactionObservation(ObservationModel):
    kind: Literal["context_compaction"] = "context_compaction"
    invocation_id: str
    observed_at: float | None = None
    trigger: str | None = None
    tokens_before: Count | None = None
    tokens_after: Count | None = None
    outcome: Literal["completed", "failed", "aborted", "unknown"] = "unknown"
    summary: str | None = None
    first_kept_item_id: str | None = None
    before_model_call: ModelCallRef | None = None
    model_calls: list[ModelCallRef] = Field(default_factory=list)
    after_model_call: ModelCallRef | None = None


class ObservationGap(ObservationModel):
    """Something an integration could not observe."""

    code: str
    invocation_id: str | None = None
    detail: str | None = None


AgentObservationRecord = Annotated[
    AgentInvocation | ToolCallObservation | ContextCompactionObservation | SandboxObservation,
    Field(discriminator="kind"),
]


class AgentObservationBundle(ObservationModel):
    """Everything that one agent server observed of one rollout, in no particular order."""

    source: str
    records: list[AgentObservationRecord] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def _invocations_are_a_forest(self) -> Self:
        invocations = [record for record in self.records if isinstance(record, AgentInvocation)]
        parents = {item.invocation_id: item.parent_invocation_id for item in invocations}
        if len(parents) != len(invocations):
            raise ValueError("two invocations have the same invocation_id")
        rooted: set[str] = set()
        for start in parents:
            path: set[str] = set()
            current: str | None = start
            # A parent that was not observed ends the walk, as does one whose own walk ended.
            while current is not None and current in parents and current not in rooted:
                if current in path:
                    raise ValueError(f"invocation '{current}' is its own ancestor")
                path.add(current)
                current = parents[current]
            rooted |= path
        return self


class TrajectoryRecord(ObservationModel):
    """One rollout as its agent recorded it."""

    schema_version: Literal["1.0"] = "1.0"
    task_id: str
    rollout_id: str
    turns: list[TrajectoryTurn] = Field(default_factory=list)
    invocations: list[AgentInvocation] = Field(default_factory=list)
    tool_calls: list[TrajectoryToolCall] = Field(default_factory=list)
    model_calls: list[TrajectoryModelCall] = Field(default_factory=list)
    gaps: list[ObservationGap] = Field(default_factory=list)

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Self:
        for name, ids in (
            ("invocation_id", [item.invocation_id for item in self.invocations]),
            ("model_call_id", [call.model_call_id for call in self.model_calls if call.model_call_id]),
            ("turn_no", [(turn.invocation_id, turn.turn_no) for turn in self.turns]),
        ):
            if len(set(ids)) != len(ids):
                raise ValueError(f"{name} is not unique in the trajectory")
        if any((turn.task_id, turn.rollout_id) != (self.task_id, self.rollout_id) for turn in self.turns):
            raise ValueError("a turn belongs to another task or rollout")
        return self


def join_model_call_observations(
    observations: AgentObservationBundle, calls: Sequence[ModelCallRecord]
) -> AgentObservationBundle:
    """Return the observations with the id of the call in every reference to one of ``calls``. A call without a
    reference is added to the invocation whose id the harness sent as its session id."""
    by_response = {(_name(call.model_ref), call.response_id): call for call in reversed(calls)}
    by_id = {call.model_call_id: call for call in calls if call.model_call_id}

    def complete(reference: ModelCallRef | None) -> ModelCallRef | None:
        if reference is None or reference.model_call_id or not reference.response_id:
            return reference
        call = by_response.get((_name(reference.model_ref), reference.response_id))
        return reference if call is None else _reference_to(call)

    records: list[AgentObservationRecord] = []
    for record in observations.records:
        changed: dict[str, Any] = {}
        if isinstance(record, AgentInvocation | ContextCompactionObservation):
            changed["model_calls"] = [complete(reference) for reference in record.model_calls]
        if isinstance(record, ContextCompactionObservation):
            changed["before_model_call"] = complete(record.before_model_call)
            changed["after_model_call"] = complete(record.after_model_call)
        records.append(record.model_copy(update=changed))

    invocations = {record.invocation_id: record for record in records if isinstance(record, AgentInvocation)}
    owned = {reference.model_call_id for record in invocations.values() for reference in record.model_calls}
    for call in calls:
        invocation = invocations.get(call.client_session_id or "")
        if invocation is not None and call.model_call_id and call.model_call_id not in owned:
            invocation.model_calls.append(_reference_to(call))
    for invocation in invocations.values():
        referenced = [by_id.get(reference.model_call_id or "") for reference in invocation.model_calls]
        if None not in referenced:
            invocation.model_calls.sort(key=lambda reference: by_id[str(reference.model_call_id)].call_index)
    return observations.model_copy(update={"records": records, "gaps": list(observations.gaps)})


def _name(server: ModelServerRef | None) -> str | None:
    return server.name if server is not None else None


def _reference_to(call: ModelCallRecord) -> ModelCallRef:
    return ModelCallRef(model_call_id=call.model_call_id, model_ref=call.model_ref, response_id=call.response_id)


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """A response, and the observations made while it was produced."""

    response: NeMoGymResponse
    observations: AgentObservationBundle
