"""Runs that NeMo Gym began: what stands in its files counts here.

NeMo Gym keeps no database. A rollout is done when a line of the output has its task's and its own index; what there
was to do stands in the materialized inputs. Such a run goes on here when these describe the run that is asked for: its
results are recorded like this pipeline's own, and both programs read the files afterwards. The same happens to lines
that NeMo Gym appends to a run of this pipeline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
)
from nemo_gym.rollouts.interfaces import JobRecord, JobSelector, JobState, JobStore
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.rollouts.rows import MaterializedInputs

Key = tuple[int, int]
"""Task index and rollout index: how NeMo Gym tells rollouts apart."""
RECORDED_AT_ONCE = 64
_RUN_KEYS = "_ng_"
"""What the fields begin with that a run adds to a row."""


@dataclass(frozen=True, slots=True)
class NemoGymRun:
    """A run that NeMo Gym left at an output."""

    files: RunFiles
    done: int
    """Rollouts with a line in the output."""

    @classmethod
    def of(cls, config: RolloutRunConfig, files: RunFiles) -> Self | None:
        """The run to go on with; ``None`` where the output holds none of NeMo Gym's, or is to be discarded. Raises
        `ConfigError` for one that must not be continued."""
        if config.overwrite or files.store.exists() or not files.output.is_file():
            return None
        keys: set[Key] = set()
        for row in _rows(files.output):
            if row is None or (key := _key_of(row)) is None or _is_ours(row, key):
                return None
            keys.add(key)
        if not keys:
            return None
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
        """Raise `ConfigError` where its rows are not these. Which agent does a row is compared where both say it; what
        else a run adds to its rows is its own affair."""
        assert inputs.lines is not None
        inputs.lines.seek(0)
        asked = dict(map(_key_and_digest, map(orjson.loads, inputs.lines)))
        problem = None
        begun = 0
        for row in _rows(self.files.materialized_inputs):
            key = None if row is None else _key_of(row)
            if row is None or key is None:
                problem = "a line of its rows cannot be read"
            elif key not in asked:
                problem = f"task {key[0]}, rollout {key[1]} is no part of this run"
            elif not _same(asked[key], _key_and_digest(row)[1]):
                problem = f"task {key[0]}, rollout {key[1]} has other fields or another agent"
            begun += 1
            if problem is not None:
                break
        if problem is None and begun != len(asked):
            problem = f"it has {begun} rollouts, this one {len(asked)}"
        if problem is not None:
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


async def take_over(files: RunFiles, store: JobStore, *, failures: bool = True) -> int:
    """Record the rollouts that NeMo Gym wrote to a run's files, and return how many lines there were of them.

    A rollout with a line in the output is not run again: with a reward it is done, without one it has failed. Of
    those in the failures file the ones that NeMo Gym calls terminal have failed, unless ``failures`` is false; the
    others are queued, as they are for NeMo Gym. The caller mends the files afterwards, from the store."""
    output = [key for _, key in _foreign(files.output)]
    if not output and next(_foreign(files.failures), None) is None:
        return 0
    jobs = {
        (record.spec.task_index, record.spec.sample_index): record async for record in store.iterate(JobSelector())
    }
    found = 0
    batch: list[tuple[str, JobState, bytes]] = []
    for path in (files.output, files.failures):
        for row, key in _foreign(path):
            found += 1
            if (job := jobs.get(key)) is None:
                continue
            state = JobState.DONE if path == files.output and decide_validity(row).valid else JobState.FAILED
            if path == files.failures and not (failures and row.get(NG_TERMINAL_KEY)):
                continue
            batch.append((job.job_id, state, _as_ours(row, job, state)))
            if len(batch) == RECORDED_AT_ONCE:
                await store.record_ended(batch)
                batch = []
    await store.record_ended(batch)
    return found


def _as_ours(row: dict[str, Any], job: JobRecord, state: JobState) -> bytes:
    """A line of NeMo Gym's with what readers here look for; what it says itself stays."""
    row = {**row, ROLLOUT_ID_KEY: job.job_id}
    row.setdefault(AGENT_REF_KEY, {"type": "responses_api_agents", "name": job.spec.agent})
    row.setdefault("task_id", job.spec.task_id)
    if state is JobState.DONE:
        ours: dict[str, Any] = {"valid": True, "mask_sample": False, "outcome": AgentOutcome.COMPLETED.value}
        return orjson.dumps(ours | {"findings": []} | row)
    verdict = decide_validity({**row, "valid": False})
    said = row.get("failure_reason") or row.get("_ng_failure_message") or row.get("error") or verdict.failure_reason
    row |= {
        "reward": None,
        "valid": False,
        "mask_sample": True,
        "failure_kind": verdict.failure_kind,
        "failure_reason": str(said)[:MAX_REASON_CHARS],
        # Nobody tries it again unasked: not here, and not there.
        NG_TERMINAL_KEY: True,
    }
    row.setdefault(NG_FAILURE_CLASS_KEY, verdict.failure_kind)
    return orjson.dumps({"findings": []} | row)


def _foreign(path: Path) -> Iterator[tuple[dict[str, Any], Key]]:
    """Lines of a result file that NeMo Gym wrote."""
    for row in _rows(path) if path.exists() else ():
        if row is not None and (key := _key_of(row)) is not None and not _is_ours(row, key):
            yield row, key


def _rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each whole line that is not blank; ``None`` for one that is no JSON object."""
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


def _is_ours(row: Mapping[str, Any], key: Key) -> bool:
    """NeMo Gym's rows have a rollout id only where their data set gave one; ours end in the two indices."""
    return str(row.get(ROLLOUT_ID_KEY, "")).endswith(f".{key[0]}-{key[1]}")


_Digest = tuple[str | None, bytes]


def _key_and_digest(row: dict[str, Any]) -> tuple[Key, _Digest]:
    """A materialized row's key, agent, and a digest of what its data set and the run's parameters say."""
    ref = row.get(AGENT_REF_KEY)
    agent = ref.get("name") if isinstance(ref, dict) else None
    said = {key: value for key, value in row.items() if key != AGENT_REF_KEY and not key.startswith(_RUN_KEYS)}
    digest = hashlib.blake2b(orjson.dumps(said, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
    return (row[TASK_INDEX_KEY], row[ROLLOUT_INDEX_KEY]), (agent, digest)


def _same(asked: _Digest, begun: _Digest) -> bool:
    return asked[1] == begun[1] and (begun[0] is None or asked[0] == begun[0])
