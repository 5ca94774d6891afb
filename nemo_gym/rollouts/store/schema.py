"""The tables of the SQLite store, and how its rows become jobs."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.verdict import FailureKind, StageFailure, StageName
from nemo_gym.rollouts.interfaces import Job, JobSpec, JobState

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY CHECK (id = 1), info BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rows (digest BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    sample_index INTEGER NOT NULL,
    task_index INTEGER NOT NULL,
    agent TEXT NOT NULL,
    digest BLOB NOT NULL REFERENCES rows(digest),
    priority INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'queued',
    attempt INTEGER NOT NULL DEFAULT 0,
    eval_tries INTEGER NOT NULL DEFAULT 0,
    failures BLOB,
    run_result BLOB,
    not_before REAL NOT NULL DEFAULT 0,
    lease_owner TEXT,
    lease_epoch INTEGER NOT NULL DEFAULT 0,
    lease_until REAL NOT NULL DEFAULT 0,
    result BLOB,
    claimed_at REAL,
    finished_at REAL
);
CREATE INDEX IF NOT EXISTS jobs_queued ON jobs (priority DESC, seq) WHERE state = 'queued';
CREATE INDEX IF NOT EXISTS jobs_claimed ON jobs (lease_until) WHERE state = 'claimed';
"""
# A result blob stands in the jobs table: it is written once, and the partial indexes keep claims away from it.

SPEC_COLUMNS = "job_id, run_id, task_id, group_id, sample_index, task_index, agent, data, priority"
JOB_COLUMNS = f"{SPEC_COLUMNS}, state, attempt, lease_epoch, eval_tries, failures, run_result"
JOB_SOURCE = "jobs JOIN rows USING (digest)"


def job_of(row: tuple[Any, ...]) -> Job:
    """A job from `JOB_COLUMNS`."""
    run_result: bytes | None = row[14]
    return Job(
        spec=JobSpec(*row[:9]),
        state=JobState(row[9]),
        stage=StageName.INIT if run_result is None else StageName.EVAL,
        attempt=row[10],
        lease_epoch=row[11],
        eval_tries=row[12],
        failures=failures_of(row[13]),
        run_result=run_result,
    )


def failures_of(blob: bytes | None) -> tuple[StageFailure, ...]:
    if not blob:
        return ()
    return tuple(
        StageFailure(**{**item, "stage": StageName(item["stage"]), "kind": FailureKind(item["kind"])})
        for item in orjson.loads(blob)
    )


def failures_blob(failures: tuple[StageFailure, ...]) -> bytes | None:
    if not failures:
        return None
    return orjson.dumps(
        [
            {
                "stage": failure.stage,
                "kind": failure.kind,
                "reason": failure.reason,
                "retryable": failure.retryable,
                "new_attempt": failure.new_attempt,
                "details": dict(failure.details),
            }
            for failure in failures
        ],
        default=str,
    )


def open_database(path: str) -> sqlite3.Connection:
    """A connection in WAL mode whose commits survive power loss. Raises `sqlite3.Error` and `OSError`."""
    if path != ":memory:":
        # Attempts under way have their control tokens here; SQLite gives its other files the same mode.
        Path(path).touch(mode=0o600)
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=5.0, cached_statements=64
    )
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA wal_autocheckpoint=4000")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    connection.executescript(SCHEMA)
    # Of a run that began with an earlier release, whose tables are the same but for these.
    known = {column[1] for column in connection.execute("PRAGMA table_info(jobs)")}
    for column in ("claimed_at", "finished_at"):
        if column not in known:
            connection.execute(f"ALTER TABLE jobs ADD COLUMN {column} REAL")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return connection
