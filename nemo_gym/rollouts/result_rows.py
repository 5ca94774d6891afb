"""Result rows and failure rows (one line of the output or of the failures file per rollout), and a run's totals.

A row's ``response`` holds the exact tokens that trainers of NeMo Gym read. `Tally` counts rows by agent, and
`RunProgress` shows the counts during the run.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from nemo_gym._util.files import Outlasting
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    ATTEMPT_INDEX_KEY,
    MAX_REASON_CHARS,
    NG_FAILURE_CLASS_KEY,
    NG_TERMINAL_KEY,
    PARAMS_KEY,
    RESPONSE_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    SESSION_KEY,
    TASK_INDEX_KEY,
    StageFailure,
    decide_validity,
    public_params,
)
from nemo_gym.openai_types import TOKEN_FIELDS
from nemo_gym.rollouts.interfaces import Job, JobAttempt, JobEvent
from nemo_gym.rollouts.trajectories import TRAJECTORY_KEY

_VARIABLE = re.compile(r"(?i)0x[0-9a-f]+|\b(?=[a-f]*\d)[0-9a-f]{8,}\b|(?<![\d.])(?![1-5]\d\d(?![\d.]))\d+(\.\d+)?")
"""Addresses, digests, counts and durations, but not a three-digit number that may be an HTTP status."""

_UNDERSCORES = re.compile("__+")


def same_way(kind: str, reason: str | None, names: Iterable[str] = ()) -> str:
    """Return a text that is equal for failures of the same cause: the kind and the reason, without ``names`` (of the
    task or rollout, also as image names spell them) and without numbers that vary between failures."""
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
    """Return a line of the failures file: NeMo Gym's keys, the verdict's keys, every earlier failure, the ``kept``
    fields of the attempt, and the folder of the servers' logs, but no private field of the row. The response is
    complete and masked, so that a trainer can read it like any other."""
    row: dict[str, Any] = {
        **(kept or {}),
        PARAMS_KEY: public_params(orjson.loads(job.spec.row).get(PARAMS_KEY) or {"input": []}),
        TASK_INDEX_KEY: job.spec.task_index,
        ROLLOUT_INDEX_KEY: job.spec.sample_index,
        AGENT_REF_KEY: {"type": "responses_api_agents", "name": job.spec.agent},
        ROLLOUT_ID_KEY: job.job_id,
        ATTEMPT_INDEX_KEY: max(0, job.attempt - 1),
        "task_id": job.spec.task_id,
        **masked_fields(failure.kind, failure.reason),
        "failure_stage": failure.stage,
        "findings": [],
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


def result_row(attempt: JobAttempt, verified: dict[str, Any], *, validation: str | None) -> bytes:
    """Return one line of the output, for an attempt with a valid verdict."""
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
        # The dataset row has no request parameters: the environment wrote the prompt, and trainers read it here.
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
    """Return the SHA-256 over the artifacts' names and digests, in order. It binds a verdict to its artifacts."""
    digest = hashlib.sha256()
    for artifact in artifacts:
        digest.update(f"{artifact.get('name')}\0{artifact.get('sha256')}\n".encode())
    return digest.hexdigest()


def _topology(attempt: JobAttempt) -> str | None:
    placement = attempt.descriptor.get("placement") or {}
    topology = placement.get("topology")
    return str(topology) if topology is not None else None


# The tokens of each model call are stored in the last item of its output.
#
# An item with ``generation_token_ids`` is one turn to train on. Its ``prompt_token_ids`` begin with all prompt and
# sampled tokens of the earlier turns, so the items of a response form one conversation: the rollout's trajectory with
# the most sampled tokens. The other trajectories are only in ``ng_trajectory``.

_SAMPLED = frozenset({"reasoning", "function_call", "local_shell_call", "custom_tool_call"})
"""Types of output items that the model generates, besides its messages."""
_MISSING_TURN = "msg_untold_turn_"
"""Prefix of the ids of items for turns that are missing from the harness's output."""
MASKED = "masked"
"""The metadata key of a placeholder response, for a rollout that has none."""


def with_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the tokens of its trajectory in ``response.output``; unchanged if it has no trajectory, or
    if the model server has already written the tokens of one conversation there."""
    response = row.get(RESPONSE_KEY)
    trajectory = _longest(row.get(TRAJECTORY_KEY))
    if trajectory is None or not isinstance(response, Mapping):
        return row
    if has_tokens(response):
        if _is_one_conversation(response["output"]):
            return row
        response = without_tokens(response)
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    return {**row, RESPONSE_KEY: {**response, "output": _with_turns(items, _turns(trajectory))}}


def has_tokens(response: Any) -> bool:
    """Whether a response holds tokens to train on."""
    output = response.get("output") if isinstance(response, Mapping) else None
    items = output if isinstance(output, list) else []
    return any(isinstance(item, dict) and item.get("generation_token_ids") for item in items)


def _is_one_conversation(output: Sequence[Any]) -> bool:
    """Whether each prompt begins with the prompt and tokens of the turn before: NeMo RL fails where it does not."""
    seen: list[int] = []
    for item in output:
        if isinstance(item, dict) and (generated := item.get("generation_token_ids")):
            prompt = item.get("prompt_token_ids") or []
            if prompt[: len(seen)] != seen:
                return False
            seen = [*prompt, *generated]
    return True


def masked_fields(failure: str, reason: str | None) -> dict[str, Any]:
    """Return the fields of a row that has no reward, for a trainer: masked, with the kind and the reason."""
    return {
        RESPONSE_KEY: masked_response(failure),
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "instance_config": {"mask_sample": True},  # where NeMo RL reads it
        "failure_kind": failure,
        "failure_reason": reason,
        NG_FAILURE_CLASS_KEY: failure,
    }


def masked_response(failure: str) -> dict[str, Any]:
    """Return a placeholder response for a rollout that has none. It is complete, so that a trainer can read it, and
    has one token, which stays out of the loss because the row is masked. ``failure`` is the kind of failure."""
    return {
        "id": "resp_masked",
        "object": "response",
        "created_at": 0.0,
        "model": "",
        "status": "incomplete",
        "metadata": {MASKED: failure},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [_message_of_tokens("msg_masked", [0], [0], [0.0])],
    }


def is_masked(response: Any) -> bool:
    """Return whether `masked_response` made this response."""
    metadata = response.get("metadata") if isinstance(response, Mapping) else None
    return isinstance(metadata, Mapping) and MASKED in metadata and response.get("id") == "resp_masked"


def without_tokens(response: Any) -> Any:
    """Return the agent's original response, without what `with_tokens` added."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list):
        return response
    items = [
        {key: value for key, value in item.items() if key not in TOKEN_FIELDS} if isinstance(item, dict) else item
        for item in output
        if not (isinstance(item, dict) and str(item.get("id", "")).startswith(_MISSING_TURN))
    ]
    return {**response, "output": items}


def _longest(trajectories: Any) -> Mapping[str, Any] | None:
    """Return the trajectory with the most sampled tokens, the latest of equal ones. Trajectories without tokens or
    logprobs do not count."""
    candidates = [
        each
        for each in (trajectories if isinstance(trajectories, list) else ())
        if isinstance(each, Mapping) and each.get("prompt_ids") and each.get("logprobs") is not None
    ]
    return max(candidates, key=lambda each: (sum(each["response_mask"]), each["index"]), default=None)


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


def _with_turns(
    items: Sequence[dict[str, Any]], turns: Sequence[tuple[list[int], list[int], list[float]]]
) -> list[dict[str, Any]]:
    """Put the tokens of each turn into the last item that the model generated in it, matching turns from the end. Each
    turn that is missing from the harness's output gets an empty message before the other items."""
    last_items = [
        number
        for number, item in enumerate(items)
        if _is_sampled(item) and not (number + 1 < len(items) and _is_sampled(items[number + 1]))
    ]
    places = last_items[-len(turns) :] if turns else []
    missing_turns = turns[: len(turns) - len(places)]
    turn_of_item = dict(zip(places, turns[len(missing_turns) :], strict=True))
    output = [_message_of_tokens(f"{_MISSING_TURN}{number}", *turn) for number, turn in enumerate(missing_turns)]
    for number, item in enumerate(items):
        if (turn := turn_of_item.get(number)) is not None:
            output.append({**item, **_token_fields(*turn)})
        else:
            output.append(item)
    return output


def _is_sampled(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in _SAMPLED or (kind == "message" and item.get("role") == "assistant")


def _message_of_tokens(item_id: str, prompt: list[int], generated: list[int], logprobs: list[float]) -> dict[str, Any]:
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


WHY_CHARS = 48


@dataclass(frozen=True, slots=True)
class Reason:
    """The common reason of several rollouts that ended the same way."""

    label: str
    text: str
    """The full reason of the first rollout."""
    rollouts: tuple[str, ...]
    log: str | None
    """The log of the first rollout that has one."""

    @classmethod
    def distinct(cls, summaries: Iterable[RolloutSummary]) -> list[Reason]:
        """Return the distinct reasons of rollouts that failed, ordered by `RolloutSummary.rank` and then by the number
        of rollouts."""
        found: dict[tuple[int, str], list[RolloutSummary]] = {}
        for item in summaries:
            if item.label and item.rank < 3:
                key = same_way(item.label, item.reason, (item.task_id,))
                found.setdefault((item.rank, key), []).append(item)
        ordered = sorted(found.items(), key=lambda pair: (pair[0][0], -len(pair[1])))
        return [
            cls(
                items[0].label,
                items[0].reason or "",
                tuple(f"{item.task_id} #{item.sample_index}" for item in items),
                next((item.log for item in items if item.log), None),
            )
            for _, items in ordered
        ]


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One line of the result table."""

    task_id: str
    task_index: int
    sample_index: int
    agent: str
    reward: float | None
    """``None`` if the rollout has no verdict."""
    outcome: str
    findings: int
    turns: int | None
    seconds: float | None
    """The time of the three stages together, without time in queues."""
    attempts: int
    reason: str | None = None
    """Why the rollout has no verdict or no reward, or how its harness ended."""
    kinds: tuple[str, ...] = ()
    """The kinds of the findings."""
    log: str | None = None
    """The file with the output of grading, as the row names it."""

    @property
    def rank(self) -> int:
        """The order in tables, most urgent first: no verdict, findings, no reward, all others."""
        if self.reward is None:
            return 0
        if self.findings:
            return 1
        return 2 if self.reward <= 0 else 3

    @property
    def label(self) -> str:
        """The result that needs an explanation; empty if none does."""
        if self.reward is None:
            return f"no verdict, {self.outcome}"
        if self.kinds:
            return f"findings {', '.join(self.kinds)}"
        outcome_note = "" if self.outcome == AgentOutcome.COMPLETED else f", {self.outcome}"
        return f"reward {self.reward:g}{outcome_note}" if outcome_note or self.reward <= 0 else ""

    @property
    def why(self) -> str:
        """A short reason, for a table."""
        if self.kinds:
            return self.kinds[0] + (f" +{len(self.kinds) - 1}" if len(self.kinds) > 1 else "")
        if not self.label or not self.reason:
            return ""
        return self.reason if len(self.reason) <= WHY_CHARS else f"{self.reason[: WHY_CHARS - 1]}…"

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> RolloutSummary:
        """Return the summary of a line of the output or of the failures file."""
        timings = row.get("timings") or {}
        reward, kind = _reward_and_kind(row)
        valid = reward is not None
        findings = row.get("findings") or ()
        beside_reward = ("reward_reason", "failure_reason", "outcome_detail")
        reasons = [row.get(name) for name in (beside_reward if valid else ("failure_reason",))]
        return cls(
            task_id=str(row.get("task_id", row["_ng_task_index"])),
            task_index=row["_ng_task_index"],
            sample_index=row["_ng_rollout_index"],
            agent=(row.get("agent_ref") or {}).get("name", ""),
            reward=reward,
            outcome=str((row.get("outcome") or AgentOutcome.COMPLETED.value) if valid else kind),
            findings=len(findings),
            turns=_turns_of_row(row),
            seconds=sum(timings.values()) if timings else None,
            attempts=int(row.get("_ng_attempt_index", 0)) + 1,
            reason="; ".join(dict.fromkeys(str(text) for text in reasons if text))[:MAX_REASON_CHARS] or None,
            kinds=tuple(dict.fromkeys(str(each.get("kind")) for each in findings if isinstance(each, Mapping))),
            log=log if isinstance(log := row.get("evaluation_log"), str) else None,
        )


def _reward_and_kind(row: Mapping[str, Any]) -> tuple[float | None, Any]:
    """Return a row's reward and, if it has none, its kind of failure, for which NeMo Gym has another field."""
    verdict = decide_validity(row)
    return verdict.reward, row.get("failure_kind") or verdict.failure_kind


def _turns_of_row(row: Mapping[str, Any]) -> int | None:
    for source in (row.get("ng_agent_observations"), row.get("ng_model_session")):
        turns = source.get("turns") if isinstance(source, Mapping) else None
        if isinstance(turns, int):
            return turns
    return None


@dataclass(slots=True)
class AgentTally:
    """Running sums of one agent. Invalid rollouts are counted but do not enter any average."""

    rewards: float = 0.0
    valid: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    findings: int = 0

    @property
    def mean_reward(self) -> float | None:
        return self.rewards / self.valid if self.valid else None

    @property
    def invalid(self) -> int:
        return sum(self.failures.values())


class Tally:
    """Counts by agent."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentTally] = {}
        self.finished = 0

    def add_row(self, agent: str, row: Mapping[str, Any]) -> None:
        tally = self.agents.setdefault(agent, AgentTally())
        self.finished += 1
        reward, kind = _reward_and_kind(row)
        if reward is not None:
            tally.valid += 1
            tally.rewards += reward
        else:
            tally.failures[str(kind)] += 1
        tally.findings += bool(row.get("findings"))

    def describe(self) -> str:
        """``<agent>: reward 0.417 (12), 1 without verdict; …``"""
        parts = []
        for name, tally in self.agents.items():
            mean = "–" if tally.mean_reward is None else f"{tally.mean_reward:.3f}"
            extra = f", {tally.invalid} without verdict" if tally.invalid else ""
            extra += f", {tally.findings} with findings" if tally.findings else ""
            parts.append(f"{name}: reward {mean} ({tally.valid}){extra}")
        return "; ".join(parts)


class RunProgress:
    """A `JobListener` that shows a run's progress on ``console``; with ``None`` it only counts."""

    def __init__(self, total: int, tally: Tally, console: Console | None) -> None:
        self._total = max(total, 1)
        self._tally = tally
        self._console = console
        self._percent = 100 * tally.finished // self._total
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("rollouts"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[averages]}"),
                console=console,
                refresh_per_second=4,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=self._total, completed=self._tally.finished, averages=self._tally.describe()
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: JobEvent) -> None:
        failure = event.failure
        row = event.result if failure is None else {"reward": None, "failure_kind": failure.kind}
        self.add_row(event.job.spec.agent, row or {})

    def add_row(self, agent: str, row: Mapping[str, Any]) -> None:
        """Count a result that did not arrive as an event."""
        self._tally.add_row(agent, row)
        self._show()

    def _show(self) -> None:
        percent = 100 * self._tally.finished // self._total
        if self._console is None or percent == self._percent:
            return
        self._percent = percent
        if self._bar is not None:
            self._bar.update(self._task, completed=self._tally.finished, averages=self._tally.describe())
        else:
            line = f"{percent:3d}% ({self._tally.finished}/{self._total})  {self._tally.describe()}"
            print(line, file=Outlasting(self._console.file), flush=True)
