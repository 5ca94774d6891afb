"""A job store in PostgreSQL. Several pipelines may share it; each job is claimed by one of them."""

from __future__ import annotations

import hashlib
from typing import Any

from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.interfaces import StoreError
from nemo_gym.rollouts.store.schema import SCHEMA_VERSION, Dialect, statements
from nemo_gym.rollouts.store.sql import ResultSink, SqlJobStore
from nemo_gym.storage import PATIENCE_S, PostgresConnection, PostgresWriter

SUBMITTING = 0x6E67_6A73
"""The number of the advisory lock that a transaction takes to submit jobs."""

POSTGRES = Dialect(
    serial="BIGSERIAL PRIMARY KEY",
    blob="BYTEA",
    now="extract(epoch from clock_timestamp())::double precision",
    locking=" FOR UPDATE SKIP LOCKED",
    one_of="{} = ANY(?)",
    alone=f"SELECT pg_advisory_xact_lock({SUBMITTING})",
)


class PostgresJobStore(SqlJobStore):
    """See `SqlJobStore`.

    Args:
        url: ``postgresql://user@host/database``.
        pipeline: names this process among those that share the store. Two processes of the same name cannot run at
            once, so a process may `release` the jobs that its predecessor of the same name held.
    """

    def __init__(
        self, url: str, *, pipeline: str | None = None, sink: ResultSink | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        lock_numbers = [] if pipeline is None else [lock_number(pipeline)]
        writer = PostgresWriter(
            url,
            name="job-store-writer",
            prepare=prepare,
            translate=lambda error: _store_error(error, pipeline),
            after_commit=sink,
            patience_s=patience_s,
            held=lock_numbers,
        )
        super().__init__(writer, POSTGRES)


def lock_number(pipeline: str) -> int:
    return int.from_bytes(hashlib.blake2b(pipeline.encode(), digest_size=8).digest(), "big", signed=True)


def prepare(connection: PostgresConnection) -> None:
    """Create missing tables. Raises `ConfigError` if the existing ones have another schema version."""
    connection.execute("CREATE TABLE IF NOT EXISTS store_version (version INTEGER NOT NULL)")
    row: Any = connection.execute("SELECT version FROM store_version").fetchone()
    if row is None:
        connection.execute("INSERT INTO store_version (version) VALUES (?)", (SCHEMA_VERSION,))
    elif row[0] != SCHEMA_VERSION:
        raise ConfigError(
            f"the store has schema version {row[0]}, this release reads {SCHEMA_VERSION}; use another database",
            key="store",
        )
    for statement in statements(POSTGRES):
        connection.execute(statement)


def _store_error(error: Exception, pipeline: str | None) -> StoreError:
    # The error's text may quote rows, so it is left out, except for a failed connection.
    if "pipeline's lock" in str(error):
        return StoreError(
            f"another process runs as pipeline '{pipeline}' on this store; stop it, or choose another name with"
            " pipeline="
        )
    detail = str(error).strip().splitlines()[:1] if type(error).__name__ == "OperationalError" else []
    return StoreError(
        f"the store's database cannot be used ({': '.join([type(error).__name__, *detail])}); fix that and start the"
        " same command again: nothing recorded is lost",
        retryable=True,
    )
