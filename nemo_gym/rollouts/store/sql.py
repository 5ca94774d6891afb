"""The job store in the SQL that its databases share, and the default store, one SQLite file in WAL mode.

Each operation runs on the writer's thread, in one transaction with the operations that wait at the same time. If a
commit is not acknowledged, its operations are called again; they detect whether their first call took effect. SQLite
and PostgreSQL supply connections and group-committing writers.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import orjson

from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.rollouts.interfaces import (
    FailureRenderer,
    Job,
    JobRecord,
    JobSelector,
    JobSpec,
    JobState,
    Offer,
    Room,
    RunCounts,
    StoreError,
    body_digest,
)
from nemo_gym.rollouts.store.schema import (
    COUNT_ON,
    JOB_COLUMNS,
    JOB_SOURCE,
    RECORD_COLUMNS,
    RECORD_COLUMNS_WITHOUT_RESULT,
    SCHEMA_VERSION,
    UPGRADE,
    Dialect,
    statements,
)
from nemo_gym.storage import SqliteWriter

ResultSink = Callable[[list[tuple[str, bytes]]], None]
"""Receives ``(state, row)`` of every committed result, on the writer's thread, before the caller's write returns."""
PAGE_ROWS = 256
LOGS_KEY = "server_logs"
"""The key of a run's description that lists the folders of its servers' logs, one for each start."""
CANCELLED_AT_ONCE = 256
"""How many queued jobs one transaction claims to cancel them."""
CANCEL_LEASE_S = 60.0

_Submitted = tuple[JobSpec, bytes, tuple[JobState, bytes, tuple[Any, ...]] | None]
"""A job, its row's digest, and the record under its id: state, row's digest and identity; ``None`` for a new job."""

T = TypeVar("T")


class Cursor(Protocol):
    """What the cursors of both database drivers have in common."""

    rowcount: int

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...


class Connection(Protocol):
    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, statement: str, values: Iterable[Sequence[Any]], /) -> Any: ...


class Writer(Protocol):
    """Runs operations in order; see `SqliteWriter.call`."""

    def call(self, operation: Callable[[Any], T], *, row: tuple[str, bytes] | None = None) -> asyncio.Future[T]: ...

    async def aclose(self) -> None: ...


class SqlJobStore:
    """The durable record of all jobs. Every awaited write is durable when it returns.

    Writes by a claimer name the job's lease epoch and raise `FencedError` when the claimer no longer holds the job. A
    store that cannot write (disk full, server gone) raises `StoreError`; no acknowledged write is lost, and the run
    can be resumed.
    """

    def __init__(self, writer: Writer, dialect: Dialect) -> None:
        self._writer = writer
        self._dialect = dialect

    def is_shared(self) -> bool:
        """Whether other processes may work on the same jobs."""
        return self._dialect.alone is not None

    async def open_run(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Record the run's description once. Return the recorded one: on a resume this is the first description, with
        the ``server_logs`` of both."""
        blob = orjson.dumps(dict(info), default=str)
        logs = [str(each) for each in info.get(LOGS_KEY) or ()]

        def operation(connection: Connection) -> dict[str, Any]:
            connection.execute("INSERT INTO run (id, info) VALUES (1, ?) ON CONFLICT DO NOTHING", (blob,))
            recorded: dict[str, Any] = orjson.loads(connection.execute("SELECT info FROM run").fetchone()[0])
            if new := [each for each in logs if each not in recorded.setdefault(LOGS_KEY, [])]:
                recorded[LOGS_KEY] += new  # a resumed run may have other servers
                connection.execute("UPDATE run SET info = ?", (orjson.dumps(recorded, default=str),))
            return recorded

        return await self._writer.call(operation)

    async def run_info(self) -> dict[str, Any] | None:
        """Return what `open_run` recorded, or ``None`` if no run was opened."""

        def operation(connection: Connection) -> dict[str, Any] | None:
            row = connection.execute("SELECT info FROM run").fetchone()
            return None if row is None else dict(orjson.loads(row[0]))

        return await self._writer.call(operation)

    # Submitting

    async def submit(self, specs: Sequence[JobSpec]) -> int:
        """Record jobs, and return how many were new. A known ``job_id`` with the same content is the same job; with
        different content it raises `ContractError`."""
        digests = [spec.row_digest for spec in specs]

        def operation(connection: Connection) -> int:
            found = self._with_recorded(connection, specs, digests)
            for spec, digest, recorded in found:
                if recorded is not None and (recorded[1], *recorded[2][:3]) != (digest, *spec.identity[:3]):
                    raise ContractError(
                        f"job '{spec.job_id}' already exists with different content; a job id is permanently bound to"
                        " one row, agent and sample: submit the changed job under another id",
                        job_id=spec.job_id,
                    )
            return self._insert_new(connection, found)

        return await self._writer.call(operation)

    async def offer(self, specs: Sequence[JobSpec]) -> list[Offer]:
        """Like `submit`, but job by job: a job whose id belongs to different content is refused, and the others are
        recorded."""
        digests = [spec.row_digest for spec in specs]

        def operation(connection: Connection) -> list[Offer]:
            found = self._with_recorded(connection, specs, digests)
            self._insert_new(connection, found)
            offers = []
            for spec, digest, recorded in found:
                state, known, identity = recorded or (JobState.QUEUED, digest, spec.identity)
                offers.append(Offer(spec.job_id, recorded is None, state, spec.digest, body_digest(known, identity)))
            return offers

        return await self._writer.call(operation)

    def _with_recorded(
        self, connection: Connection, specs: Sequence[JobSpec], digests: Sequence[bytes]
    ) -> list[_Submitted]:
        """Look up each job's id, among the recorded jobs and those before it in ``specs``."""
        found: list[_Submitted] = []
        fresh: dict[str, tuple[JobSpec, bytes]] = {}
        if self._dialect.alone is not None:
            connection.execute(self._dialect.alone)
        query = (
            "SELECT state, digest, agent, task_index, sample_index, run_id, task_id, group_id, priority, deadline_s"
            " FROM jobs WHERE job_id = ?"
        )
        for spec, digest in zip(specs, digests, strict=True):
            if (duplicate := fresh.get(spec.job_id)) is not None:
                found.append((spec, digest, (JobState.QUEUED, duplicate[1], duplicate[0].identity)))
            elif (row := connection.execute(query, (spec.job_id,)).fetchone()) is None:
                fresh[spec.job_id] = (spec, digest)
                found.append((spec, digest, None))
            else:
                found.append((spec, digest, (JobState(row[0]), bytes(row[1]), tuple(row[2:]))))
        return found

    def _insert_new(self, connection: Connection, found: Sequence[_Submitted]) -> int:
        """Insert the jobs without a record, and return how many they are."""
        new = [(spec, digest) for spec, digest, recorded in found if recorded is None]
        connection.executemany(
            "INSERT INTO rows (digest, data) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(digest, spec.row) for spec, digest in new],
        )
        connection.executemany(
            "INSERT INTO jobs (job_id, run_id, task_id, group_id, sample_index, task_index, agent, digest, priority,"
            f" deadline_s, deadline_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {self._dialect.now} + ?)",
            [
                (
                    *(s.job_id, s.run_id, s.task_id, s.group_id, s.sample_index, s.task_index, s.agent, d),
                    *(s.priority, s.deadline_s, s.deadline_s),
                )
                for s, d in new
            ],
        )
        return len(new)

    # Claiming

    async def claim(self, owner: str, limit: int, lease_s: float, room: Room | None = None) -> list[Job]:
        """Claim up to ``limit`` queued jobs, highest priority first, each with a new lease epoch, and a new attempt
        unless its stage is EVAL. Jobs whose lease has expired are queued again first. With ``room``, claim only jobs
        that fit into it."""

        def best(connection: Connection, now: float) -> list[int]:
            connection.execute(
                "UPDATE jobs SET state = 'queued', lease_owner = NULL WHERE seq IN (SELECT seq FROM jobs"
                f" WHERE state = 'claimed' AND lease_until < ?{self._dialect.locking})",
                (now,),
            )
            return self._best(connection, limit, now, room)

        claimed: list[Job] = []

        def operation(connection: Connection) -> list[Job]:
            return self._claim(connection, claimed, owner, lease_s, best)

        return await self._writer.call(operation)

    def _best(self, connection: Connection, limit: int, now: float, room: Room | None) -> list[int]:
        """Return the places of the queued jobs to claim."""
        ready, order = "state = 'queued' AND not_before <= ?", "ORDER BY priority DESC, seq LIMIT ?"
        if room is None:
            query = f"SELECT seq FROM jobs WHERE {ready} {order}{self._dialect.locking}"
            return [seq for (seq,) in connection.execute(query, (now, limit)).fetchall()]
        candidates: list[tuple[int, int, str]] = []
        query = f"SELECT priority, seq, agent FROM jobs WHERE agent = ? AND {ready} {order}{self._dialect.locking}"
        for agent, free in room.agents.items():
            if free > 0:
                candidates += connection.execute(query, (agent, now, min(free, limit))).fetchall()
        return room.pick(candidates, limit)

    async def claim_overdue(self, owner: str, limit: int, lease_s: float) -> list[Job]:
        """Claim jobs whose deadline has passed or which were cancelled, if they are queued or their lease has expired;
        the claimer records how they ended. Queued ones with a stored result are not claimed before their time, since a
        claimer may leave them to another."""

        def overdue(connection: Connection, now: float) -> list[int]:
            due = "SELECT seq FROM jobs WHERE state = {} LIMIT ?" + self._dialect.locking
            over = due.format("'queued' AND deadline_at <= ? AND (run_result IS NULL OR not_before <= ?)")
            rows = connection.execute(over, (now, now, limit)).fetchall()
            rows += connection.execute(due.format("'queued' AND cancel_reason IS NOT NULL"), (limit,)).fetchall()
            # `claim` would queue these again, but a dispatcher without a free place does not call it.
            left = due.format("'claimed' AND lease_until < ? AND (cancel_reason IS NOT NULL OR deadline_at <= ?)")
            rows += connection.execute(left, (now, now, limit)).fetchall()
            return list(dict.fromkeys(seq for (seq,) in rows))

        claimed: list[Job] = []

        def operation(connection: Connection) -> list[Job]:
            return self._claim(connection, claimed, owner, lease_s, overdue)

        return await self._writer.call(operation)

    def _claim(
        self,
        connection: Connection,
        claimed: list[Job],
        owner: str,
        lease_s: float,
        choose: Callable[[Connection, float], list[int]],
    ) -> list[Job]:
        """Claim the jobs at the places in the queue that ``choose`` returns, given the current time. ``claimed`` keeps
        them for another call of the same claim."""
        now = self._now(connection)
        if still := self._still_claimed(connection, claimed, owner, now + lease_s):
            return still
        places = choose(connection, now)
        connection.executemany(
            "UPDATE jobs SET state = 'claimed', attempt = attempt + CASE WHEN run_result IS NULL THEN 1 ELSE 0 END,"
            " lease_owner = ?, lease_epoch = lease_epoch + 1, lease_until = ?, claimed_at = ? WHERE seq = ?",
            [(owner, now + lease_s, now, seq) for seq in places],
        )
        query = f"SELECT {JOB_COLUMNS} FROM {JOB_SOURCE} WHERE seq = ?"
        claimed[:] = [_job_of(connection.execute(query, (seq,)).fetchone(), now) for seq in places]
        return list(claimed)

    def _still_claimed(self, connection: Connection, jobs: Sequence[Job], owner: str, lease_until: float) -> list[Job]:
        """Return the jobs of an earlier call of the same claim whose commit took effect without an acknowledgement."""
        query = (
            "UPDATE jobs SET lease_until = ? WHERE job_id = ? AND lease_owner = ? AND lease_epoch = ?"
            " AND state = 'claimed'"
        )
        return [
            job
            for job in jobs
            if connection.execute(query, (lease_until, job.job_id, owner, job.lease_epoch)).rowcount
        ]

    async def renew(self, owner: str, lease_s: float, job_ids: Collection[str]) -> frozenset[str]:
        """Extend the leases of ``owner`` on these jobs, and return the ids of those it still holds. Leases of jobs
        not in ``job_ids`` expire, because nobody works on those jobs."""
        held_ids = self._several(sorted(job_ids))

        def operation(connection: Connection) -> frozenset[str]:
            renewed = connection.execute(
                f"UPDATE jobs SET lease_until = {self._dialect.now} + ? WHERE state = 'claimed' AND lease_owner = ?"
                f" AND {self._dialect.one_of.format('job_id')} RETURNING job_id",
                (lease_s, owner, held_ids),
            )
            return frozenset(job_id for (job_id,) in renewed.fetchall())

        return await self._writer.call(operation)

    async def asked_to_end(self, owner: str) -> dict[str, str]:
        """Return the jobs that were cancelled while ``owner`` held them, each with the reason."""

        def operation(connection: Connection) -> dict[str, str]:
            cursor = connection.execute(
                "SELECT job_id, cancel_reason FROM jobs WHERE cancel_reason IS NOT NULL AND state = 'claimed'"
                " AND lease_owner = ?",
                (owner,),
            )
            return dict(cursor.fetchall())

        return await self._writer.call(operation)

    # Recording

    def record_run(self, job: Job, result: bytes) -> Awaitable[None]:
        """Store the result of RUN, so that a later claim starts at EVAL. The write is ordered by the time of the call,
        not of the await."""
        return self._writer.call(
            lambda connection: _update(connection, job, "run_result = ?, eval_tries = 0", (result,))
        )

    async def complete(self, job: Job, result: bytes) -> None:
        """Record the result row, exactly once; the job is then `DONE`."""
        await self._finish(job, JobState.DONE, job.failures, result)

    async def fail(self, job: Job, failure: StageFailure, result: bytes) -> None:
        """Record the failure row; the job is then `FAILED` (or `CANCELLED`, by the failure's kind)."""
        await self._finish(job, JobState.of(failure), (*job.failures, failure), result)

    async def _finish(self, job: Job, state: JobState, failures: tuple[StageFailure, ...], result: bytes) -> None:
        blob = _failures_blob(failures)
        is_again = False

        def operation(connection: Connection) -> None:
            nonlocal is_again
            if is_again and self._is_recorded(connection, job, state):
                return
            is_again = True
            place = _next_result(connection)
            _update(
                connection,
                job,
                "state = ?, failures = ?, result = ?, result_seq = ?, run_result = NULL, lease_owner = NULL,"
                f" cancel_reason = NULL, finished_at = {self._dialect.now}",
                (state.value, blob, result, place),
            )

        await self._writer.call(operation, row=(state.value, result))

    async def record_ended(self, results: Sequence[tuple[str, JobState, bytes]]) -> None:
        """Record how unclaimed jobs ended, as ``(job id, DONE or FAILED, row)``. The caller knows that nobody works
        on these jobs and that the result files hold their rows. A recorded verdict is not replaced."""

        def operation(connection: Connection) -> None:
            for job_id, state, result in results:
                # A verdict replaces a failure; a failure replaces nothing.
                replaced = ("queued", "failed", "cancelled") if state is JobState.DONE else ("queued",)
                connection.execute(
                    "UPDATE jobs SET state = ?, result = ?, result_seq = ?, attempt = attempt + 1, run_result = NULL,"
                    f" lease_epoch = lease_epoch + 1, cancel_reason = NULL, finished_at = {self._dialect.now}"
                    f" WHERE job_id = ? AND {self._dialect.one_of.format('state')}",
                    (state.value, result, _next_result(connection), job_id, self._several(sorted(replaced))),
                )

        if results:
            await self._writer.call(operation)

    def _is_recorded(self, connection: Connection, job: Job, state: JobState) -> bool:
        query = "SELECT 1 FROM jobs WHERE job_id = ? AND lease_epoch = ? AND state = ?"
        return connection.execute(query, (job.job_id, job.lease_epoch, state.value)).fetchone() is not None

    async def requeue(
        self, job: Job, failure: StageFailure | None = None, *, delay_s: float = 0.0, new_attempt: bool = False
    ) -> None:
        """Queue the job again, to be claimed after ``delay_s``. A ``failure`` counts against the retry budget. The job
        resumes at EVAL with its RUN result, if one is stored, unless the failure or ``new_attempt`` asks for another
        attempt."""
        keep = failure is not None and not failure.new_attempt
        failures = job.failures if failure is None else (*job.failures, failure)
        forget = ", run_result = NULL" if new_attempt or (failure is not None and not keep) else ""
        changes = (
            f"state = 'queued', lease_owner = NULL, not_before = {self._dialect.now} + ?, failures = ?,"
            f" eval_tries = eval_tries + ?{forget}",
            (delay_s, _failures_blob(failures), int(keep)),
        )
        await self._writer.call(lambda connection: _update(connection, job, *changes))

    # Ending and restarting jobs

    async def reset(self, selector: JobSelector) -> int:
        """Queue terminal or abandoned jobs again with a fresh retry budget, and remove their results. Attempt numbers
        continue to grow, so older attempts stay fenced."""
        where, values = self._where(selector)

        def operation(connection: Connection) -> int:
            return connection.execute(
                "UPDATE jobs SET state = 'queued', failures = NULL, eval_tries = 0, run_result = NULL, result = NULL,"
                " result_seq = NULL, cancel_reason = NULL, not_before = 0, lease_owner = NULL,"
                f" lease_epoch = lease_epoch + 1, deadline_at = {self._dialect.now} + deadline_s WHERE {where}",
                values,
            ).rowcount

        return await self._writer.call(operation)

    async def cancel(self, selector: JobSelector, failure: StageFailure, render: FailureRenderer) -> list[Job]:
        """Record queued jobs as cancelled and return them. Mark claimed jobs: their dispatcher stops them, or else
        their next claimer does."""
        where, values = self._where(selector)
        cancelled: list[Job] = []

        def mark(connection: Connection) -> int:
            # Also queued jobs that were not taken: one that another process is claiming, which appears as queued until
            # that claim is committed, or one that was claimed then and is queued again. One statement finds both.
            unended = "state = 'claimed'" if taken else "(state = 'claimed' OR state = 'queued')"
            return connection.execute(
                f"UPDATE jobs SET cancel_reason = ? WHERE {unended} AND cancel_reason IS NULL AND {where}",
                (failure.reason, *values),
            ).rowcount

        def take(connection: Connection) -> list[Job]:
            now = self._now(connection)
            query = f"SELECT seq FROM jobs WHERE state = 'queued' AND {where} ORDER BY seq LIMIT {CANCELLED_AT_ONCE}"
            places = connection.execute(query + self._dialect.locking, values).fetchall()
            connection.executemany(
                "UPDATE jobs SET state = 'claimed', lease_owner = NULL, lease_epoch = lease_epoch + 1,"
                " lease_until = ?, cancel_reason = ? WHERE seq = ?",
                [(now + CANCEL_LEASE_S, failure.reason, seq) for (seq,) in places],
            )
            query = f"SELECT {JOB_COLUMNS} FROM {JOB_SOURCE} WHERE seq = ?"
            return [_job_of(connection.execute(query, place).fetchone(), now) for place in places]

        while True:
            taken = await self._writer.call(take)
            cancelled += taken
            writes = [self._finish(j, JobState.CANCELLED, (*j.failures, failure), render(j, failure)) for j in taken]
            await asyncio.gather(*writes)
            # Repeat: jobs may be claimed or queued again between the two transactions.
            if not await self._writer.call(mark) and not taken:
                return cancelled

    async def release(self, owner: str | None = None) -> int:
        """Queue the jobs again that ``owner`` (``None``: any owner) has claimed. For a caller that knows the owner is
        gone; this does not count against a retry budget."""
        whose, values = ("", ()) if owner is None else (" AND lease_owner = ?", (owner,))

        def operation(connection: Connection) -> int:
            return connection.execute(
                "UPDATE jobs SET state = 'queued', lease_owner = NULL, lease_epoch = lease_epoch + 1"
                f" WHERE state = 'claimed'{whose}",
                values,
            ).rowcount

        return await self._writer.call(operation)

    # Queries

    async def next_due_s(self) -> float | None:
        """Return the seconds until a queued job may be claimed: 0 if one may be now, ``None`` if none is queued."""

        def operation(connection: Connection) -> float | None:
            now = self._now(connection)
            (due,) = connection.execute("SELECT min(not_before) FROM jobs WHERE state = 'queued'").fetchone()
            return None if due is None else max(0.0, due - now)

        return await self._writer.call(operation)

    async def counts(self) -> dict[JobState, int]:
        def operation(connection: Connection) -> dict[JobState, int]:
            counts = dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
            return {state: counts.get(state.value, 0) for state in JobState}

        return await self._writer.call(operation)

    async def runs(self, window_s: float, latest: int = 500) -> list[RunCounts]:
        """Return the progress of each run, the latest run first. Recent ends are counted among the ``latest`` results
        only: ``finished_at`` is stored after the result blob, so reading it reads that blob's pages too."""

        def operation(connection: Connection) -> list[RunCounts]:
            now = self._now(connection)
            runs: dict[str, RunCounts] = {}
            for run_id, name, count, retried, waiting, place in connection.execute(
                "SELECT run_id, state, count(*), sum(CASE WHEN failures IS NULL THEN 0 ELSE 1 END),"
                " sum(CASE WHEN not_before > ? THEN 1 ELSE 0 END), max(seq) FROM jobs GROUP BY run_id, state",
                (now,),
            ).fetchall():
                run = runs.setdefault(run_id, RunCounts(run_id, dict.fromkeys(JobState, 0)))
                run.jobs[JobState(name)] = count
                run.place = max(run.place, place)
                if not JobState(name).terminal:
                    run.retried += retried
                    run.waiting_for_retry += waiting
            for run_id, finished_at in connection.execute(
                "SELECT run_id, finished_at FROM jobs WHERE result_seq > (SELECT value FROM counters"
                " WHERE name = 'results') - ?",
                (latest,),
            ).fetchall():
                if (ended := runs.get(run_id)) is not None and finished_at is not None:
                    ended.finished_at = max(ended.finished_at or 0.0, finished_at)
                    if finished_at > now - window_s:
                        ended.recent += 1
                        ended.recent_s = max(ended.recent_s, now - finished_at)
            return sorted(runs.values(), key=lambda run: -run.place)

        return await self._writer.call(operation)

    async def iterate(self, selector: JobSelector) -> AsyncIterator[JobRecord]:
        """Yield every matching job in order of submission, reading a page at a time."""
        last = 0
        while True:
            records = await self.page(selector, last, PAGE_ROWS)
            for record in records:
                yield record
            if len(records) < PAGE_ROWS:
                return
            last = records[-1].place

    async def page(self, selector: JobSelector, after: int, limit: int, *, results: bool = True) -> list[JobRecord]:
        """Return up to ``limit`` matching jobs after place ``after`` in the order of submission; if ``results`` is
        false, without their results."""
        columns = RECORD_COLUMNS if results else RECORD_COLUMNS_WITHOUT_RESULT
        return await self._records(columns, "seq", selector, after, limit)

    async def results(self, selector: JobSelector, after: int, limit: int) -> list[JobRecord]:
        """Return up to ``limit`` matching jobs that have ended, after place ``after`` in the order in which results
        were recorded. A result recorded later has a later place."""
        return await self._records(RECORD_COLUMNS, "result_seq", selector, after, limit)

    async def _records(
        self, columns: str, place: str, selector: JobSelector, after: int, limit: int
    ) -> list[JobRecord]:
        where, values = self._where(selector)
        query = f"SELECT {columns} FROM {JOB_SOURCE} WHERE {place} > ? AND {where} ORDER BY {place} LIMIT ?"

        def operation(connection: Connection) -> list[JobRecord]:
            return [_record_of(row) for row in connection.execute(query, (after, *values, limit)).fetchall()]

        return await self._writer.call(operation)

    async def aclose(self) -> None:
        await self._writer.aclose()

    def _now(self, connection: Connection) -> float:
        return float(connection.execute(f"SELECT {self._dialect.now}").fetchone()[0])

    def _where(self, selector: JobSelector) -> tuple[str, tuple[Any, ...]]:
        clauses, values = ["1 = 1"], []
        for column, chosen in (
            ("job_id", selector.job_ids),
            ("state", None if selector.states is None else [state.value for state in selector.states]),
        ):
            if chosen is not None:
                clauses.append(self._dialect.one_of.format(column))
                values.append(self._several(sorted(chosen)))
        for column, value in (("group_id", selector.group_id), ("run_id", selector.run_id)):
            if value is not None:
                clauses.append(f"{column} = ?")
                values.append(value)
        return " AND ".join(clauses), tuple(values)

    def _several(self, values: list[str]) -> Any:
        """Return the values as the single parameter of ``one_of``."""
        return values


def _next_result(connection: Connection) -> int:
    """Return the next place in the order of results. The transaction locks the counter's row until it ends, so results
    become visible in the order of their places."""
    query = "UPDATE counters SET value = value + 1 WHERE name = 'results' RETURNING value"
    return int(connection.execute(query).fetchone()[0])


def _update(connection: Connection, job: Job, assignments: str, values: tuple[Any, ...]) -> None:
    """Write to a job that the caller still holds, or raise `FencedError`."""
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


SQLITE = Dialect(
    serial="INTEGER PRIMARY KEY",
    blob="BLOB",
    now="ng_now()",
    locking="",
    one_of="{} IN (SELECT value FROM json_each(?))",
    alone=None,
)


class SqliteJobStore(SqlJobStore):
    """See `SqlJobStore`. One process at a time writes; the caller holds the run's lock."""

    def __init__(self, path: Path, *, sink: ResultSink | None = None) -> None:
        self.path = path
        writer = SqliteWriter(
            lambda: open_database(str(path)),
            name="job-store-writer",
            after_commit=sink,
            translate=lambda error: store_error(path, error),
        )
        super().__init__(writer, SQLITE)

    def _several(self, values: list[str]) -> Any:
        return orjson.dumps(values).decode()


def open_database(path: str) -> sqlite3.Connection:
    """Open a connection in WAL mode whose commits survive power loss. Raises `sqlite3.Error` and `OSError`."""
    if path != ":memory:":
        # The file holds control tokens of running attempts; SQLite gives its other files the same mode.
        Path(path).touch(mode=0o600)
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=5.0, cached_statements=64
    )
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA wal_autocheckpoint=4000")
    connection.create_function("ng_now", 0, _steady_clock())
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, 1, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    connection.execute("BEGIN IMMEDIATE")
    for statement in (*(UPGRADE if version == 1 else ()), *statements(SQLITE), *([COUNT_ON] if version == 1 else ())):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")
    return connection


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a database that another process may be writing. Raises `sqlite3.Error`."""
    # Without a WAL file, nobody has the database open. Then ``immutable`` keeps SQLite from making files beside it.
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True, timeout=5.0)


def _steady_clock() -> Callable[[], float]:
    """Return a clock that shows the time of day now, and runs evenly from then on, however the system's clock is set.
    Otherwise a step forward would end leases and deadlines, and a step back would hold up retries."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


def store_error(path: Path, error: Exception) -> StoreError:
    """Return the error that tells a user what to do about a database or file that cannot be written."""
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
        f"cannot write '{path}': {text}; fix that and start the same command again (the store needs a local, writable"
        " file system)",
        path=str(path),
    )


# -- Rows of the tables ----------------------------------------------------------------------------------------------


def _job_of(row: tuple[Any, ...], now: float) -> Job:
    """Return the job of a row of `JOB_COLUMNS`. ``now`` is the time by the clock that set its deadline."""
    _, attempt, lease_epoch, eval_tries, failures, run_result, cancel_reason, deadline_at = row[10:18]
    return Job(
        spec=JobSpec(*row[:10]),
        state=JobState(row[10]),
        stage=StageName.INIT if run_result is None else StageName.EVAL,
        attempt=attempt,
        lease_epoch=lease_epoch,
        eval_tries=eval_tries,
        failures=_failures_of(failures),
        run_result=run_result,
        left_s=None if deadline_at is None else deadline_at - now,
        cancel_reason=cancel_reason,
    )


def _record_of(row: tuple[Any, ...]) -> JobRecord:
    """Return the record of a row of `RECORD_COLUMNS`."""
    state, attempt, failures, result, place, result_place = row[10:16]
    return JobRecord(JobSpec(*row[:10]), JobState(state), attempt, _failures_of(failures), result, place, result_place)


def _failures_of(blob: bytes | None) -> tuple[StageFailure, ...]:
    if not blob:
        return ()
    return tuple(
        StageFailure(**{**item, "stage": StageName(item["stage"]), "kind": FailureKind(item["kind"])})
        for item in orjson.loads(blob)
    )


def _failures_blob(failures: tuple[StageFailure, ...]) -> bytes | None:
    return orjson.dumps(failures, default=_plain) if failures else None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
