"""Result rows and failure rows: one line of the output, or of the failures file, per rollout; and in its ``response``
the exact tokens that trainers of NeMo Gym read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
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
from nemo_gym.openai_types.tokens import TOKEN_FIELDS
from nemo_gym.rollouts.interfaces import Job, JobAttempt
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY

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


# The tokens of each model call stand on the last item of its output.
#
# An item with ``generation_token_ids`` is one turn to train on. Its ``prompt_token_ids`` begin with everything that
# the turns before it were given and sampled, so the items of a response are one conversation: of a rollout's
# trajectories the one with the most sampled tokens. The others stand in ``ng_trajectory`` alone.

_SAMPLED = frozenset({"reasoning", "function_call", "local_shell_call", "custom_tool_call"})
"""Kinds of output items that the model writes, beside its messages."""
_UNTOLD = "msg_untold_turn_"
"""Ids of items for turns of which the harness tells nothing."""
MASKED = "masked"
"""Among the metadata of a response that stands for none."""


def with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the tokens of its trajectory in ``response.output``; unchanged where it has none, or where the
    model server wrote them there itself."""
    response = row.get(RESPONSE_KEY)
    trajectory = _longest(row.get(TRAJECTORY_KEY))
    if trajectory is None or not isinstance(response, Mapping):
        return row
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    if any(item.get("generation_token_ids") for item in items):
        return row
    return {**row, RESPONSE_KEY: {**response, "output": _attached(items, _turns(trajectory))}}


def masked_response(failure: str, *, created_at: float = 0.0) -> dict[str, Any]:
    """A response for a rollout that has none: complete, so that a trainer can read it, and of one token, which it
    leaves out of the loss because the row is masked. ``failure``: why."""
    return {
        "id": "resp_masked",
        "object": "response",
        "created_at": created_at,
        "model": "",
        "status": "incomplete",
        "metadata": {MASKED: failure},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [_said("msg_masked", [0], [0], [0.0])],
    }


def is_masked(response: Any) -> bool:
    """Whether a response is one of `masked_response`."""
    metadata = response.get("metadata") if isinstance(response, Mapping) else None
    return isinstance(metadata, Mapping) and MASKED in metadata and response.get("id") == "resp_masked"


def without_tokens(response: Any) -> Any:
    """The response as its agent answered it: without what `with_tokens` added."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list):
        return response
    items = [
        {key: value for key, value in item.items() if key not in TOKEN_FIELDS} if isinstance(item, dict) else item
        for item in output
        if not (isinstance(item, dict) and str(item.get("id", "")).startswith(_UNTOLD))
    ]
    return {**response, "output": items}


def _longest(trajectories: Any) -> Mapping[str, Any] | None:
    """The trajectory with the most sampled tokens, the latest of equal ones; nothing without tokens or logprobs."""
    found = [
        each
        for each in (trajectories if isinstance(trajectories, list) else ())
        if isinstance(each, Mapping) and each.get("prompt_ids") and each.get("logprobs") is not None
    ]
    return max(found, key=lambda each: (sum(each["response_mask"]), each["index"]), default=None)


def _turns(trajectory: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    prompt, response, logprobs = trajectory["prompt_ids"], trajectory["response_ids"], trajectory["logprobs"]
    return [
        (
            [*prompt, *response[: turn["start"]]],
            response[turn["start"] : turn["end"]],
            logprobs[turn["start"] : turn["end"]],
        )
        for turn in trajectory["turns"]
        if turn["end"] > turn["start"]
    ]


def _attached(
    items: Sequence[dict[str, Any]], turns: Sequence[tuple[list[int], list[int], list[float]]]
) -> list[dict[str, Any]]:
    """Each turn on the last item of what the model wrote in it, counted from the end. Turns of which the harness tells
    nothing get an empty message of their own before the others."""
    last_items = [
        number
        for number, item in enumerate(items)
        if _is_sampled(item) and not (number + 1 < len(items) and _is_sampled(items[number + 1]))
    ]
    places = last_items[-len(turns) :] if turns else []
    untold = turns[: len(turns) - len(places)]
    told = dict(zip(places, turns[len(untold) :], strict=True))
    found = [_said(f"{_UNTOLD}{number}", *turn) for number, turn in enumerate(untold)]
    for number, item in enumerate(items):
        if (turn := told.get(number)) is not None:
            found.append({**item, **_token_fields(*turn)})
        else:
            found.append(item)
    return found


def _is_sampled(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in _SAMPLED or (kind == "message" and item.get("role") == "assistant")


def _said(item_id: str, prompt: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "", "annotations": []}],
        **_token_fields(prompt, generated, logprobs),
    }


def _token_fields(prompt: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "generation_token_ids": generated, "generation_log_probs": logprobs}
