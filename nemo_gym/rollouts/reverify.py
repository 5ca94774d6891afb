"""Grades the stored work of a run again, and compares the new verdicts with the stored ones.

The task's row comes from the run's materialized inputs and never from a result row, because an agent may have written
into that. Response and artifacts come from the result row; the artifacts must match their digest. The stored verdicts
do not change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from nemo_gym._util.files import finished_lines
from nemo_gym._util.tasks import first_of
from nemo_gym.contract.errors import ConfigError, ContractError, ServerError
from nemo_gym.contract.session import AgentOutcome, Artifact, RolloutIdentity
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    ATTEMPT_INDEX_KEY,
    MAX_REASON_CHARS,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    SESSION_KEY,
    TASK_INDEX_KEY,
    FailureKind,
    StageName,
    failure_of_reply,
    group_id_of,
    task_id_of,
)
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollouts.result_rows import artifacts_digest, is_masked, without_tokens
from nemo_gym.rollouts.results import RunFiles, replaced

UNSUPPORTED = "unsupported"


class Outcome(StrEnum):
    """How one rollout's new verdict compares with the stored one."""

    SAME = "same"
    CHANGED = "changed"
    """The reward or the findings differ."""
    INVALID = "invalid"
    """There is no valid verdict this time."""
    SKIPPED = "skipped"
    """The stored data is not enough to grade the rollout again."""


@dataclass(frozen=True, slots=True)
class StoredWork:
    """The data that a result row holds about one rollout. ``missing`` tells why it cannot be graded again."""

    rollout_id: str
    task_id: str
    task_index: int
    sample_index: int
    attempt: int
    agent: str
    response: Any = field(repr=False)
    artifacts: list[dict[str, Any]] = field(repr=False)
    outcome: str
    verdict: dict[str, Any]
    missing: str | None


def stored_work(output: Path) -> Iterator[StoredWork]:
    """Yield the rollouts of a result file. Raises `ConfigError` naming the line that is no result row."""
    try:
        lines = output.open("rb")
    except OSError as error:
        raise ConfigError(f"result file '{output}' cannot be read: {error.strerror}", key="output") from error
    with lines:
        for number, line in enumerate(finished_lines(lines), 1):
            try:
                yield _stored(orjson.loads(line))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{output}:{number}: not a result row of this suite ({type(error).__name__}: {error})",
                    key="output",
                ) from None


def _stored(row: dict[str, Any]) -> StoredWork:
    artifacts = row.get("artifacts") or []
    return StoredWork(
        # NeMo Gym's rows have no rollout id: task index and rollout index identify the rollout.
        rollout_id=_text(row.get(ROLLOUT_ID_KEY) or f"{int(row[TASK_INDEX_KEY])}-{int(row[ROLLOUT_INDEX_KEY])}"),
        task_id=str(row.get("task_id", "")),
        task_index=int(row[TASK_INDEX_KEY]),
        sample_index=int(row[ROLLOUT_INDEX_KEY]),
        attempt=int(row.get(ATTEMPT_INDEX_KEY) or 0) + 1,
        agent=_text(row[AGENT_REF_KEY]["name"]),
        response=without_tokens(row.get("response")),
        artifacts=artifacts,
        outcome=str(row.get("outcome", AgentOutcome.COMPLETED)),
        verdict=_verdict(row),
        missing=_missing(row, artifacts),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is text, not {type(value).__name__}")
    return value


def _missing(row: Mapping[str, Any], artifacts: list[dict[str, Any]]) -> str | None:
    if row.get("verification_skipped"):
        return "its agent skips verification: there never was a verdict"
    if row.get("reward_source") == "agent":
        return "it has no environment: its agent reported the reward"
    if not isinstance(row.get("response"), dict) or is_masked(row["response"]):
        return "it holds no response"
    if artifacts and artifacts_digest(artifacts) != row.get("artifacts_digest"):
        return "its artifacts are not those of its artifacts_digest"
    for artifact in artifacts:
        try:
            read = Artifact.model_validate(artifact)
            if read.sha256 and not read.truncated:
                read.content()
        except (ValueError, ContractError) as error:
            return f"its artifact '{artifact.get('name')}' is damaged: {str(error)[:200]}"
    return None


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compared fields of a verdict, and the official result if there is one."""
    findings = row.get("findings") or ()
    official = row.get("official")
    resolved = official.get("resolved") if isinstance(official, Mapping) else None
    return {
        "reward": row.get("reward"),
        "findings": sorted(str(each.get("kind")) for each in findings if isinstance(each, Mapping)),
        **({"resolved": resolved} if resolved is not None else {}),
    }


class Inputs:
    """The rows of a run, looked up in their file by task and sample; only their offsets are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[tuple[int, int], int] = {}
        at = 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    row = orjson.loads(line)
                    self._places[row[TASK_INDEX_KEY], row[ROLLOUT_INDEX_KEY]] = at
                    at += len(line)
        except OSError as error:
            raise ConfigError(
                f"the run's rows are not there: {path} cannot be read ({error.strerror}); it belongs beside the"
                " output",
                key="output",
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} was not written by a run: {error}", key="output") from error

    def row(self, task_index: int, sample_index: int) -> dict[str, Any] | None:
        """Return the row of one rollout, or ``None`` if the run has no such row."""
        at = self._places.get((task_index, sample_index))
        if at is None:
            return None
        with self._path.open("rb") as lines:
            lines.seek(at)
            row: dict[str, Any] = orjson.loads(lines.readline())
            return row


@dataclass(slots=True)
class Reverification:
    """The totals of one reverification."""

    path: Path
    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    """How many rollouts had each outcome, by environment."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why rollouts were skipped or have no verdict, with their numbers."""

    @property
    def total(self) -> Counter[Outcome]:
        return sum(self.counts.values(), Counter[Outcome]())

    @property
    def is_same(self) -> bool:
        total = self.total
        return not total[Outcome.CHANGED] and not total[Outcome.INVALID]


async def require_reverifiable(peers: Peers, environments: list[str]) -> list[str]:
    """Return the environments that do not declare whether their grading needs a live session. Raises `ConfigError`
    naming those that declare that it does, and `ServerError` if an environment does not answer."""
    try:
        modes = {name: (await peers.get(name, "/reverify_mode")).json() for name in environments}
    except PeerError as error:
        raise ServerError(str(error)) from error
    refused = [name for name, mode in modes.items() if mode == UNSUPPORTED]
    if refused:
        raise ConfigError(
            f"environment {', '.join(repr(name) for name in refused)} cannot verify again (reverify: unsupported): its"
            " reward needs state of the live session",
            key="environment",
        )
    return [name for name, mode in modes.items() if mode == "unknown"]


async def reverify(
    peers: Peers,
    files: RunFiles,
    environment_of: Callable[[str], str],
    *,
    concurrency: int,
    timeout_s: float,
) -> Reverification:
    """Grade every rollout of ``files.output`` again and write one line for each to ``files.reverified``.

    ``peers`` call in the role ``operator``; ``environment_of`` names the environment of an agent.
    """
    inputs = Inputs(files.materialized_inputs)
    result = Reverification(files.reverified)
    works = stored_work(files.output)
    with replaced(files.reverified) as out:

        async def worker() -> None:
            for work in works:
                environment = environment_of(work.agent)
                line = await _grade(peers, work, inputs, environment, timeout_s)
                result.counts.setdefault(environment, Counter())[line["status"]] += 1
                if reason := line.get("reason"):
                    result.reasons[reason] += 1
                out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(worker())
        except ExceptionGroup as errors:
            raise first_of(errors, ConfigError) from None
    return result


async def _grade(peers: Peers, work: StoredWork, inputs: Inputs, environment: str, timeout_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        ROLLOUT_ID_KEY: work.rollout_id,
        "task_id": work.task_id,
        TASK_INDEX_KEY: work.task_index,
        ROLLOUT_INDEX_KEY: work.sample_index,
        "environment": environment,
        "stored": work.verdict,
    }
    row = inputs.row(work.task_index, work.sample_index) if work.missing is None else None
    if row is None:
        return {**line, "status": Outcome.SKIPPED, "reason": work.missing or "its row is not among the run's inputs"}
    try:
        async with asyncio.timeout(timeout_s):
            reply = (await peers.post(environment, "/verify", _body(work, row), idempotent=True)).json()
    except PeerError as error:
        if error.status in (401, 403):
            raise ConfigError(
                f"{error}; this environment does not let operators verify again", key="output"
            ) from error
        kind, reason = FailureKind.VERIFIER_FAILED, str(error)[:MAX_REASON_CHARS]
        return {**line, "status": Outcome.INVALID, "failure_kind": kind, "reason": reason}
    except TimeoutError:
        reason = f"no verdict within {timeout_s:g} s"
        return {**line, "status": Outcome.INVALID, "failure_kind": FailureKind.DEADLINE, "reason": reason}
    failure = failure_of_reply(StageName.EVAL, reply)
    if failure is not None:
        return {**line, "status": Outcome.INVALID, "failure_kind": failure.kind, "reason": failure.reason}
    new = _verdict(reply)
    compared = ("reward", "findings")
    is_same = all(new[key] == work.verdict[key] for key in compared)
    return {**line, "status": Outcome.SAME if is_same else Outcome.CHANGED, "new": new}


def _body(work: StoredWork, row: dict[str, Any]) -> dict[str, Any]:
    suffix = f".{work.task_index}-{work.sample_index}"
    run_id = work.rollout_id.removesuffix(suffix) if work.rollout_id.endswith(suffix) else "reverify"
    without_sample = {key: value for key, value in row.items() if key != ROLLOUT_INDEX_KEY}
    rollout = RolloutIdentity(
        rollout_id=work.rollout_id,
        task_id=task_id_of(without_sample, work.task_index),
        group_id=group_id_of(run_id, work.task_index),
        sample_index=work.sample_index,
        attempt=work.attempt,
        run_id=run_id,
    )
    session = {
        "rollout": rollout.model_dump(),
        "artifacts": work.artifacts,
        "outcome": work.outcome,
        "reverify": True,
    }
    return {**row, "response": work.response, SESSION_KEY: session}
