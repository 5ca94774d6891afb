"""Continues runs that NeMo Gym began, from the files that it wrote.

NeMo Gym keeps no database. A rollout is done when a line of the output has its task index and rollout index; the
materialized inputs list all rollouts of the run. This pipeline continues such a run if its inputs match the new run's:
it records the results like its own, and both programs can read the files afterwards. It does the same with lines that
NeMo Gym appends to a run of this pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import orjson

from nemo_gym._util.files import whole_lines
from nemo_gym.config.run import RolloutRunConfig
from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.session import AgentOutcome
from nemo_gym.contract.verdict import (
    AGENT_REF_KEY,
    MAX_REASON_CHARS,
    NG_FAILURE_CLASS_KEY,
    NG_TERMINAL_KEY,
    ROLLOUT_ID_KEY,
    ROLLOUT_INDEX_KEY,
    TASK_INDEX_KEY,
    decide_validity,
    named_agent,
    without,
    without_earlier_verdict,
)
from nemo_gym.rollouts.interfaces import JobRecord, JobSelector, JobState
from nemo_gym.rollouts.results import RunFiles, check_unclaimed
from nemo_gym.rollouts.rows import MaterializedInputs
from nemo_gym.rollouts.store import SqlJobStore

Key = tuple[int, int]
"""Task index and rollout index, which identify a rollout for NeMo Gym."""
RECORDED_AT_ONCE = 64
_RUN_KEYS = "_ng_"
"""The prefix of the fields that a run adds to a row."""


@dataclass(frozen=True, slots=True)
class NemoGymRun:
    """A run that NeMo Gym left at an output."""

    files: RunFiles
    done: int
    """Rollouts with a line in the output; 0 if NeMo Gym only wrote its rows, and perhaps failures."""

    @classmethod
    def of(cls, config: RolloutRunConfig, files: RunFiles) -> Self | None:
        """Return the run to continue, or ``None`` if the output holds no run of NeMo Gym or will be discarded. Raises
        `ConfigError` for a run that must not be continued."""
        if config.overwrite or files.is_begun():
            return None
        keys: set[Key] = set()
        for row in _rows(files.output) if files.output.is_file() else ():
            if row is None or (key := _key_of(row)) is None or _is_from_suite(row, key):
                return None
            keys.add(key)
        if not keys and (not config.resume or config.validation is not None or not has_rows_only(files)):
            return None
        check_unclaimed(files, besides=[*files.of_nemo_gym, files.reverified])
        run = cls(files, len(keys))
        if not config.resume or config.validation is not None:
            how = "leave resume=false out to go on with it" if not config.resume else "leave 'validation' out"
            raise run._refused(f"({len(keys)} rollouts): {how}")
        if not files.materialized_inputs.is_file():
            raise run._refused(
                f"({len(keys)} rollouts), and its rows are not beside it: restore '{files.materialized_inputs.name}'"
            )
        return run

    def require_same(self, inputs: MaterializedInputs) -> None:
        """Raise `ConfigError` if the run's rows differ from ``inputs``. The agents of a row are compared only if
        NeMo Gym's row names one; other fields that a run adds to its rows are ignored."""
        assert inputs.lines is not None
        inputs.lines.seek(0)
        requested = dict(map(_key_and_digest, map(orjson.loads, inputs.lines)))
        problem = None
        begun = 0
        for row in _rows(self.files.materialized_inputs):
            key = None if row is None else _key_of(row)
            if row is None or key is None:
                problem = "a line of its rows cannot be read"
            elif key not in requested:
                problem = f"task {key[0]}, rollout {key[1]} is not part of this run"
            elif not _same_row(requested[key], _key_and_digest(row)[1]):
                problem = f"task {key[0]}, rollout {key[1]} has other fields or another agent"
            begun += 1
            if problem is not None:
                break
        if problem is None and begun != len(requested):
            problem = f"it has {begun} rollouts, this one {len(requested)}"
        if problem is not None:
            if not self.done:  # nothing shows that the files are a run's
                check_unclaimed(self.files)
            raise self._refused(
                f"with other rows, repeats or parameters ({problem}); to go on with what it began, give"
                f" input={self.files.materialized_inputs} without 'num_repeats' and parameters"
            )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"output '{self.files.output}' holds a run of NeMo Gym {why}, choose another 'output', or discard the run"
            " with overwrite=true",
            key="output",
        )


def has_rows_only(files: RunFiles) -> bool:
    """Return whether NeMo Gym began a run of which no rollout has a result: it left rows, and perhaps failures."""
    if files.store.exists() or not files.materialized_inputs.is_file():
        return False
    first = next(_rows(files.materialized_inputs), None)
    failures = _rows(files.failures) if files.failures.exists() else ()
    rows = (first, *failures)
    return all(row and (key := _key_of(row)) is not None and not _is_from_suite(row, key) for row in rows)


async def take_over(files: RunFiles, store: SqlJobStore, *, failures: bool = True) -> None:
    """Record the rollouts that NeMo Gym wrote to a run's files.

    A rollout with a line in the output is not run again: with a valid verdict it is done, without one it has failed.
    A rollout in the failures file has failed if NeMo Gym marks it terminal and ``failures`` is true; the others stay
    queued, as they do for NeMo Gym. The caller then repairs the files from the store."""
    if all(next(_nemo_gym_rows(path), None) is None for path in (files.output, files.failures)):
        return
    jobs = {
        (record.spec.task_index, record.spec.sample_index): record async for record in store.iterate(JobSelector())
    }

    def ended() -> Iterator[tuple[str, JobState, bytes]]:
        for path in (files.output, files.failures):
            for row, key in _nemo_gym_rows(path):
                if (job := jobs.get(key)) is None:
                    continue
                state = JobState.DONE if path == files.output and decide_validity(row).valid else JobState.FAILED
                if path == files.output or (failures and row.get(NG_TERMINAL_KEY)):
                    yield job.job_id, state, _as_result_row(row, job, state)

    rows = ended()
    while batch := list(islice(rows, RECORDED_AT_ONCE)):
        await store.record_ended(batch)


def _as_result_row(row: dict[str, Any], job: JobRecord, state: JobState) -> bytes:
    """Return NeMo Gym's row with the fields that this suite's readers need. The row's own fields are kept, but a
    failed row is marked as a terminal failure without a reward."""
    row = {**row, ROLLOUT_ID_KEY: job.job_id}
    row.setdefault(AGENT_REF_KEY, {"type": "responses_api_agents", "name": job.spec.agent})
    row.setdefault("task_id", job.spec.task_id)
    if state is JobState.DONE:
        defaults: dict[str, Any] = {"valid": True, "mask_sample": False, "outcome": AgentOutcome.COMPLETED.value}
        return orjson.dumps(defaults | {"findings": []} | row)
    verdict = decide_validity({**row, "valid": False})
    reason = row.get("failure_reason") or row.get("_ng_failure_message") or row.get("error") or verdict.failure_reason
    row |= {
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "failure_kind": verdict.failure_kind,
        "failure_reason": str(reason)[:MAX_REASON_CHARS],
        # Neither this pipeline nor NeMo Gym retries it unless asked to.
        NG_TERMINAL_KEY: True,
    }
    row.setdefault(NG_FAILURE_CLASS_KEY, verdict.failure_kind)
    return orjson.dumps({"findings": []} | row)


def _nemo_gym_rows(path: Path) -> Iterator[tuple[dict[str, Any], Key]]:
    """Yield the lines of a result file that NeMo Gym wrote."""
    for row in _rows(path) if path.exists() else ():
        if row is not None and (key := _key_of(row)) is not None and not _is_from_suite(row, key):
            yield row, key


def _rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield each complete, non-blank line; ``None`` for a line that is no JSON object."""
    for line in whole_lines(path):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = None
        yield row if isinstance(row, dict) else None


def _key_of(row: Mapping[str, Any]) -> Key | None:
    task, rollout = row.get(TASK_INDEX_KEY), row.get(ROLLOUT_INDEX_KEY)
    return (task, rollout) if isinstance(task, int) and isinstance(rollout, int) else None


def _is_from_suite(row: Mapping[str, Any], key: Key) -> bool:
    """Return whether this suite wrote the row: its rollout ids end in the two indices. NeMo Gym's rows have a rollout
    id only if their dataset set one."""
    return str(row.get(ROLLOUT_ID_KEY, "")).endswith(f".{key[0]}-{key[1]}")


_Digest = tuple[str | None, bytes]


def _key_and_digest(row: dict[str, Any]) -> tuple[Key, _Digest]:
    """Return a materialized row's key, its agent, and a digest of the fields from the dataset and the run's
    parameters."""
    dataset_row = without(without_earlier_verdict(row), (AGENT_REF_KEY,))
    content = {key: value for key, value in dataset_row.items() if not key.startswith(_RUN_KEYS)}
    digest = hashlib.blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
    return (row[TASK_INDEX_KEY], row[ROLLOUT_INDEX_KEY]), (named_agent(row), digest)


def _same_row(requested: _Digest, recorded: _Digest) -> bool:
    return requested[1] == recorded[1] and (recorded[0] is None or requested[0] == recorded[0])
