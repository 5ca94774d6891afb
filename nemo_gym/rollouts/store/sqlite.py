"""The default job store: one SQLite file in WAL mode behind a group-committing writer thread."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.contract.verdict import FailureKind, StageFailure
from nemo_gym.rollouts.interfaces import (
    FailureRenderer,
    Job,
    JobRecord,
    JobSelector,
    JobSpec,
    JobState,
    StageResult,
    StoreError,
)
from nemo_gym.rollouts.store.schema import (
    JOB_COLUMNS,
    JOB_SOURCE,
    failures_blob,
    failures_of,
    job_of,
    open_database,
)
from nemo_gym.storage.group_commit import SqliteWriter

ResultSink = Callable[[list[tuple[str, bytes]]], None]
"""Gets ``(state, row)`` of every committed result, on the writer's thread, before its caller is told."""
PAGE_ROWS = 256
LOGS_KEY = "server_logs"
"""Of a run's description: the folders with the logs of the servers that it used, one for each start."""


class SqliteJobStore:
    """See `JobStore`. One process at a time writes; the caller holds the run's lock."""

    def __init__(self, path: Path, *, sink: ResultSink | None = None) -> None:
        self.path = path
        self._writer = SqliteWriter(
            lambda: open_database(str(path)),
            name="job-store-writer",
            after_commit=sink,
            translate=lambda error: store_error(path, error),
        )

    async def open_run(self, info: Mapping[str, Any]) -> dict[str, Any]:
        blob = orjson.dumps(dict(info), default=str)
        logs = [str(each) for each in info.get(LOGS_KEY) or ()]

        def operation(connection: sqlite3.Connection) -> dict[str, Any]:
            connection.execute("INSERT INTO run (id, info) VALUES (1, ?) ON CONFLICT DO NOTHING", (blob,))
            recorded: dict[str, Any] = orjson.loads(connection.execute("SELECT info FROM run").fetchone()[0])
            if new := [each for each in logs if each not in recorded.setdefault(LOGS_KEY, [])]:
                recorded[LOGS_KEY] += new  # a resumed run may have other servers
                connection.execute("UPDATE run SET info = ?", (orjson.dumps(recorded, default=str),))
            return recorded

        return await self._writer.call(operation)

    async def run_info(self) -> dict[str, Any] | None:
        """What `open_run` recorded; ``None`` where no run was opened."""

        def operation(connection: sqlite3.Connection) -> dict[str, Any] | None:
            found = connection.execute("SELECT info FROM run").fetchone()
            return None if found is None else dict(orjson.loads(found[0]))

        return await self._writer.call(operation)

    async def submit(self, specs: Sequence[JobSpec]) -> int:
        digests = [hashlib.blake2b(spec.row, digest_size=16).digest() for spec in specs]

        def operation(connection: sqlite3.Connection) -> int:
            known = "SELECT digest, agent, task_index, sample_index FROM jobs WHERE job_id = ?"
            fresh: dict[str, tuple[JobSpec, bytes]] = {}
            for spec, digest in zip(specs, digests, strict=True):
                there = connection.execute(known, (spec.job_id,)).fetchone()
                if there is None and spec.job_id in fresh:
                    other, other_digest = fresh[spec.job_id]
                    there = (other_digest, other.agent, other.task_index, other.sample_index)
                if there is None:
                    fresh[spec.job_id] = (spec, digest)
                elif there != (digest, spec.agent, spec.task_index, spec.sample_index):
                    raise ContractError(
                        f"job '{spec.job_id}' is already known with another content; a job id names one row, agent and"
                        " sample for good: submit the changed job under another id",
                        job_id=spec.job_id,
                    )
            connection.executemany(
                "INSERT INTO rows (digest, data) VALUES (?, ?) ON CONFLICT DO NOTHING",
                ((digest, spec.row) for spec, digest in fresh.values()),
            )
            connection.executemany(
                "INSERT INTO jobs (job_id, run_id, task_id, group_id, sample_index, task_index, agent, digest,"
                " priority) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (s.job_id, s.run_id, s.task_id, s.group_id, s.sample_index, s.task_index, s.agent, d, s.priority)
                    for s, d in fresh.values()
                ),
            )
            return len(fresh)

        return await self._writer.call(operation)

    async def claim(self, owner: str, limit: int, lease_s: float) -> list[Job]:
        def operation(connection: sqlite3.Connection) -> list[Job]:
            now = time.time()
            connection.execute(
                "UPDATE jobs SET state = 'queued', lease_owner = NULL WHERE state = 'claimed' AND lease_until < ?",
                (now,),
            )
            ids = connection.execute(
                "SELECT seq FROM jobs WHERE state = 'queued' AND not_before <= ? ORDER BY priority DESC, seq LIMIT ?",
                (now, limit),
            ).fetchall()
            connection.executemany(
                "UPDATE jobs SET state = 'claimed', attempt = attempt + (run_result IS NULL), lease_owner = ?,"
                " lease_epoch = lease_epoch + 1, lease_until = ?, claimed_at = ? WHERE seq = ?",
                ((owner, now + lease_s, now, seq) for (seq,) in ids),
            )
            query = f"SELECT {JOB_COLUMNS} FROM {JOB_SOURCE} WHERE seq = ?"
            return [job_of(connection.execute(query, seq).fetchone()) for seq in ids]

        return await self._writer.call(operation)

    async def renew(self, owner: str, lease_s: float) -> frozenset[str]:
        def operation(connection: sqlite3.Connection) -> frozenset[str]:
            held = connection.execute(
                "UPDATE jobs SET lease_until = ? WHERE state = 'claimed' AND lease_owner = ? RETURNING job_id",
                (time.time() + lease_s, owner),
            )
            return frozenset(job_id for (job_id,) in held)

        return await self._writer.call(operation)

    def record_stage(self, job: Job, result: StageResult) -> Awaitable[None]:
        return self._writer.call(
            lambda connection: _update(connection, job, "run_result = ?, eval_tries = 0", (result.payload,))
        )

    async def complete(self, job: Job, result: bytes) -> None:
        await self._finish(job, JobState.DONE, job.failures, result)

    async def fail(self, job: Job, failure: StageFailure, result: bytes) -> None:
        await self._finish(job, _failed_state(failure), (*job.failures, failure), result)

    async def _finish(self, job: Job, state: JobState, failures: tuple[StageFailure, ...], result: bytes) -> None:
        changes = (
            "state = ?, failures = ?, result = ?, run_result = NULL, lease_owner = NULL, finished_at = ?",
            (state.value, failures_blob(failures), result, time.time()),
        )
        await self._writer.call(lambda connection: _update(connection, job, *changes), row=(state.value, result))

    async def requeue(self, job: Job, failure: StageFailure | None = None, *, delay_s: float = 0.0) -> None:
        keep = failure is not None and not failure.new_attempt
        failures = job.failures if failure is None else (*job.failures, failure)
        # A job given back without a failure keeps its RUN result, if it has one: nothing says that it is bad.
        forget = "" if keep or failure is None else ", run_result = NULL"
        changes = (
            f"state = 'queued', lease_owner = NULL, not_before = ?, failures = ?, eval_tries = eval_tries + ?{forget}",
            (time.time() + delay_s, failures_blob(failures), int(keep)),
        )
        await self._writer.call(lambda connection: _update(connection, job, *changes))

    async def reset(self, selector: JobSelector) -> int:
        where, values = _where(selector)

        def operation(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "UPDATE jobs SET state = 'queued', failures = NULL, eval_tries = 0, run_result = NULL, result = NULL,"
                f" not_before = 0, lease_owner = NULL, lease_epoch = lease_epoch + 1 WHERE {where}",
                values,
            ).rowcount

        return await self._writer.call(operation)

    async def cancel(self, selector: JobSelector, failure: StageFailure, render: FailureRenderer) -> list[Job]:
        where, values = _where(selector)
        query = f"SELECT {JOB_COLUMNS} FROM {JOB_SOURCE} WHERE state = 'queued' AND {where} ORDER BY seq LIMIT 1"
        cancelled: list[Job] = []

        def take(connection: sqlite3.Connection) -> Job | None:
            found = connection.execute(query, values).fetchone()
            if found is None:
                return None
            connection.execute(
                "UPDATE jobs SET state = 'claimed', lease_epoch = lease_epoch + 1, lease_until = ? WHERE job_id = ?",
                (time.time() + 60.0, found[0]),
            )
            job = job_of(found)
            job.lease_epoch += 1
            return job

        while (job := await self._writer.call(take)) is not None:
            await self._finish(job, JobState.CANCELLED, (*job.failures, failure), render(job, failure))
            cancelled.append(job)
        return cancelled

    async def release(self, owner: str | None = None) -> int:
        def operation(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "UPDATE jobs SET state = 'queued', lease_owner = NULL, lease_epoch = lease_epoch + 1"
                " WHERE state = 'claimed' AND (?1 IS NULL OR lease_owner = ?1)",
                (owner,),
            ).rowcount

        return await self._writer.call(operation)

    async def next_due_s(self) -> float | None:
        def operation(connection: sqlite3.Connection) -> float | None:
            (due,) = connection.execute("SELECT min(not_before) FROM jobs WHERE state = 'queued'").fetchone()
            return None if due is None else max(0.0, due - time.time())

        return await self._writer.call(operation)

    async def counts(self) -> dict[JobState, int]:
        def operation(connection: sqlite3.Connection) -> dict[JobState, int]:
            found = dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
            return {state: found.get(state.value, 0) for state in JobState}

        return await self._writer.call(operation)

    async def iterate(self, selector: JobSelector) -> AsyncIterator[JobRecord]:
        where, values = _where(selector)
        columns = f"{JOB_COLUMNS}, result, seq"
        query = f"SELECT {columns} FROM {JOB_SOURCE} WHERE seq > ? AND {where} ORDER BY seq LIMIT {PAGE_ROWS}"
        last = 0
        while True:
            at = last

            def page(connection: sqlite3.Connection, at: int = at) -> list[tuple[Any, ...]]:
                return connection.execute(query, (at, *values)).fetchall()

            rows = await self._writer.call(page)
            for row in rows:
                job = job_of(row)
                yield JobRecord(job.spec, job.state, job.attempt, failures_of(row[13]), row[15])
            if len(rows) < PAGE_ROWS:
                return
            last = rows[-1][16]

    async def aclose(self) -> None:
        await self._writer.aclose()


def store_error(path: Path, error: Exception) -> StoreError:
    """The one clear error for a database or file that cannot be written."""
    text = str(error)
    if "full" in text or "No space left" in text or "disk I/O" in text:
        try:
            free_mib = shutil.disk_usage(path.parent).free / 2**20
        except OSError:
            free_mib = 0.0
        return StoreError(
            f"no space left to write '{path}' ({free_mib:.0f} MiB free on its file system): free some space, or move"
            " the run's files to a larger disk, then start the same command again; nothing recorded is lost",
            retryable=True,
            path=str(path),
        )
    if isinstance(error, sqlite3.DatabaseError) and "not a database" in text:
        return StoreError(f"'{path}' is not a run database: move it away or choose another 'output'", path=str(path))
    return StoreError(
        f"cannot write '{path}': {text}; mend that and start the same command again (the store needs a local, writable"
        " file system)",
        path=str(path),
    )


def _failed_state(failure: StageFailure) -> JobState:
    return JobState.CANCELLED if failure.kind is FailureKind.CANCELLED else JobState.FAILED


def _update(connection: sqlite3.Connection, job: Job, assignments: str, values: tuple[Any, ...]) -> None:
    """Write to a job its caller still holds, or raise `FencedError`."""
    changed = connection.execute(
        f"UPDATE jobs SET {assignments} WHERE job_id = ? AND lease_epoch = ? AND state = 'claimed'",
        (*values, job.job_id, job.lease_epoch),
    ).rowcount
    if not changed:
        raise FencedError(
            f"job '{job.job_id}' is no longer held under lease epoch {job.lease_epoch}: it was finished or claimed"
            " again",
            job_id=job.job_id,
            lease_epoch=job.lease_epoch,
        )


def _where(selector: JobSelector) -> tuple[str, tuple[Any, ...]]:
    clauses, values = ["1"], []
    if selector.job_ids is not None:
        clauses.append("job_id IN (SELECT value FROM json_each(?))")
        values.append(orjson.dumps(sorted(selector.job_ids)).decode())
    if selector.group_id is not None:
        clauses.append("group_id = ?")
        values.append(selector.group_id)
    if selector.run_id is not None:
        clauses.append("run_id = ?")
        values.append(selector.run_id)
    if selector.states is not None:
        clauses.append("state IN (SELECT value FROM json_each(?))")
        values.append(orjson.dumps(sorted(state.value for state in selector.states)).decode())
    return " AND ".join(clauses), tuple(values)
