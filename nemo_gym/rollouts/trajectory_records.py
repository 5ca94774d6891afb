"""A rollout's trajectory record: what its agent recorded and observed, and the captured model calls.

The record is for people and metrics. Training uses the gateway's chains (`nemo_gym.rollouts.trajectories`), which a
row holds under the same key if a gateway served it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_gym.contract.verdict import TASK_INDEX_KEY, task_id_of
from nemo_gym.gateway.model_calls import CAPTURE_KEY, OBSERVATIONS_KEY
from nemo_gym.http.telemetry import maybe_rollout_id_from_run_body
from nemo_gym.rollout_observability import (
    AgentInvocation,
    AgentObservationBundle,
    ModelCallRecord,
    ObservationGap,
    ToolCallObservation,
    TrajectoryModelCall,
    TrajectoryRecord,
    TrajectoryResponseMetadata,
    TrajectoryTokenStats,
    TrajectoryToolCall,
)
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY


def attach_trajectory_record(row: Mapping[str, Any], result: dict[str, Any]) -> None:
    """Put the trajectory record of a rollout into its result row, unless the row holds a gateway's chains."""
    if not isinstance(result.get(TRAJECTORY_KEY), list):
        result[TRAJECTORY_KEY] = build_trajectory_record(row, result).model_dump(mode="json")


def trajectory_identity(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the ids of a row's task and rollout for its trajectory. The task id is the row's ``task_id``, or else
    derived from its index. Raises ``ValueError`` for a row that names no rollout."""
    rollout_id = maybe_rollout_id_from_run_body(row)
    if rollout_id is None:
        raise ValueError(f"the row names no rollout: it needs '{TASK_INDEX_KEY}' and '_ng_rollout_index'")
    named = row.get("task_id")
    if isinstance(named, str) and named:
        return named, rollout_id
    return task_id_of(dict(row), int(row.get(TASK_INDEX_KEY) or 0)), rollout_id


def build_trajectory_record(row: Mapping[str, Any], result: Mapping[str, Any]) -> TrajectoryRecord:
    """Return the agent's own record, joined with its separate observations and the captured model calls."""
    recorded = result.get(TRAJECTORY_KEY)
    if recorded is None:
        task_id, rollout_id = trajectory_identity(row)
        record = TrajectoryRecord(task_id=task_id, rollout_id=rollout_id)
    else:
        record = TrajectoryRecord.model_validate(recorded)
    observed = result.get(OBSERVATIONS_KEY)
    bundle = None if observed is None else AgentObservationBundle.model_validate(observed)
    captured = (result.get(CAPTURE_KEY) or {}).get("calls") or ()
    calls = [ModelCallRecord.model_validate(call) for call in captured]
    gaps = [*record.gaps, *(bundle.gaps if bundle is not None else ())]
    if not record.turns:
        gaps.append(ObservationGap(code="turns_unavailable"))
    return TrajectoryRecord(
        task_id=record.task_id,
        rollout_id=record.rollout_id,
        invocations=_invocations(record, bundle),
        turns=record.turns,
        model_calls=[_trajectory_call(call) for call in calls] or record.model_calls,
        tool_calls=_tool_calls(record, bundle),
        gaps=[gap for index, gap in enumerate(gaps) if gap not in gaps[:index]],
    )


def _invocations(record: TrajectoryRecord, bundle: AgentObservationBundle | None) -> list[AgentInvocation]:
    """Merge recorded and observed invocations. The observed one of a pair wins, with the recorded conversation and
    model calls if it has none of its own."""
    merged = {invocation.invocation_id: invocation for invocation in record.invocations}
    for observed in bundle.records if bundle is not None else ():
        if isinstance(observed, AgentInvocation):
            recorded = merged.get(observed.invocation_id)
            items = observed.conversation or (recorded.conversation if recorded is not None else [])
            calls = observed.model_calls or (recorded.model_calls if recorded is not None else [])
            merged[observed.invocation_id] = observed.model_copy(update={"conversation": items, "model_calls": calls})
    return list(merged.values())


def _tool_calls(record: TrajectoryRecord, bundle: AgentObservationBundle | None) -> list[TrajectoryToolCall]:
    """Return the recorded tool calls, then those that were only observed, with their outputs if a conversation holds
    them."""
    merged = {(call.invocation_id, call.tool_call_id): call for call in record.tool_calls}
    outputs = {
        (invocation.invocation_id, item.get("call_id")): item.get("output")
        for invocation in _invocations(record, bundle)
        for item in invocation.conversation
        if isinstance(item, Mapping) and item.get("type") == "function_call_output"
    }
    for observed in bundle.records if bundle is not None else ():
        if isinstance(observed, ToolCallObservation):
            key = (observed.invocation_id, observed.tool_call_id)
            merged.setdefault(key, TrajectoryToolCall(**observed.model_dump(), output=outputs.get(key)))
    return list(merged.values())


def _trajectory_call(call: ModelCallRecord) -> TrajectoryModelCall:
    status = call.response.get("status") if isinstance(call.response, Mapping) else None
    has_tokens = call.tokens_in is not None and call.tokens_out is not None
    return TrajectoryModelCall(
        model_call_id=call.model_call_id,
        started_at=call.started_at,
        completed_at=call.completed_at,
        duration_ms=call.duration_ms,
        request=call.request,
        response=call.response,
        response_metadata=TrajectoryResponseMetadata(
            response_id=call.response_id,
            model_ref=call.model_ref,
            model=call.model,
            dialect=call.dialect,
            status_code=call.status_code,
            response_status=call.response_status or (status if isinstance(status, str) else None),
            finish_reason=call.finish_reason,
            error_category=call.error_category,
        ),
        token_stats=TrajectoryTokenStats(
            prompt_tokens=call.tokens_in,
            completion_tokens=call.tokens_out,
            reasoning_tokens=call.tokens_reasoning,
            total_tokens=(call.tokens_in or 0) + (call.tokens_out or 0) if has_tokens else None,
            cached_tokens=call.cached_tokens,
        ),
    )
