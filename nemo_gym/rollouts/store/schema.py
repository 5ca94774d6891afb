"""The tables of a job store, in the SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL that differs between the two databases. Statements mark their values with ``?``."""

    serial: str
    """The column type of an auto-incrementing key."""
    blob: str
    now: str
    """Seconds since 1970; by the database's clock if several processes share the database."""
    locking: str
    """The end of a SELECT whose rows no other process may select at the same time."""
    one_of: str
    """The condition that column ``{}`` equals one of the values in a single parameter."""
    alone: str | None
    """The statement that keeps other processes from submitting until this transaction ends; ``None`` if only one
    process uses the database."""


def statements(dialect: Dialect) -> list[str]:
    """Return the statements that create missing tables."""
    return [
        f"CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY CHECK (id = 1), info {dialect.blob} NOT NULL)",
        f"CREATE TABLE IF NOT EXISTS rows (digest {dialect.blob} PRIMARY KEY, data {dialect.blob} NOT NULL)",
        f"""CREATE TABLE IF NOT EXISTS jobs (
            seq {dialect.serial},
            job_id TEXT NOT NULL UNIQUE,
            run_id TEXT NOT NULL,
            task_id TEXT NOT NULL,
            group_id TEXT NOT NULL,
            sample_index INTEGER NOT NULL,
            task_index INTEGER NOT NULL,
            agent TEXT NOT NULL,
            digest {dialect.blob} NOT NULL REFERENCES rows(digest),
            priority INTEGER NOT NULL DEFAULT 0,
            state TEXT NOT NULL DEFAULT 'queued',
            attempt INTEGER NOT NULL DEFAULT 0,
            eval_tries INTEGER NOT NULL DEFAULT 0,
            failures {dialect.blob},
            run_result {dialect.blob},
            not_before DOUBLE PRECISION NOT NULL DEFAULT 0,
            lease_owner TEXT,
            lease_epoch INTEGER NOT NULL DEFAULT 0,
            lease_until DOUBLE PRECISION NOT NULL DEFAULT 0,
            result {dialect.blob}{"".join(f", {column}" for column in NEW_COLUMNS)}
        )""",
        "CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('results', 0) ON CONFLICT DO NOTHING",
        "CREATE INDEX IF NOT EXISTS jobs_queued ON jobs (priority DESC, seq) WHERE state = 'queued'",
        "CREATE INDEX IF NOT EXISTS jobs_claimed ON jobs (lease_until) WHERE state = 'claimed'",
        "CREATE INDEX IF NOT EXISTS jobs_queued_of_agent ON jobs (agent, priority DESC, seq) WHERE state = 'queued'",
        "CREATE INDEX IF NOT EXISTS jobs_due ON jobs (deadline_at) WHERE state = 'queued' AND deadline_at IS NOT NULL",
        "CREATE INDEX IF NOT EXISTS jobs_to_end ON jobs (seq) WHERE cancel_reason IS NOT NULL",
        "CREATE UNIQUE INDEX IF NOT EXISTS jobs_results ON jobs (result_seq) WHERE result_seq IS NOT NULL",
        "CREATE INDEX IF NOT EXISTS jobs_of_group ON jobs (group_id)",
    ]


# Result blobs are in the jobs table: each is written once, and the partial indexes keep claims from reading it.
NEW_COLUMNS = (
    "deadline_s DOUBLE PRECISION",
    "deadline_at DOUBLE PRECISION",
    "cancel_reason TEXT",
    "result_seq INTEGER",
    "claimed_at DOUBLE PRECISION",
    "finished_at DOUBLE PRECISION",
)
"""The columns that schema version 2 added. ``result_seq`` numbers results in the order of their commits; the last two
are for viewers of a run."""

UPGRADE = [
    *(f"ALTER TABLE jobs ADD COLUMN {column}" for column in NEW_COLUMNS),
    "UPDATE jobs SET result_seq = seq WHERE state IN ('done', 'failed', 'cancelled')",
]
"""Upgrades schema version 1; runs before `statements`."""
COUNT_ON = "UPDATE counters SET value = (SELECT coalesce(max(seq), 0) FROM jobs) WHERE name = 'results'"
"""Upgrades schema version 1; runs after `statements`."""

SPEC_COLUMNS = "job_id, run_id, task_id, group_id, sample_index, task_index, agent, data, priority, deadline_s"
JOB_COLUMNS = (
    f"{SPEC_COLUMNS}, state, attempt, lease_epoch, eval_tries, failures, run_result, cancel_reason, deadline_at"
)
JOB_SOURCE = "jobs JOIN rows USING (digest)"
RECORD_COLUMNS = f"{SPEC_COLUMNS}, state, attempt, failures, result, seq, result_seq"
RECORD_COLUMNS_WITHOUT_RESULT = RECORD_COLUMNS.replace(" result,", " NULL,")
