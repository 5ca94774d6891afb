"""The default job store: one SQLite file in WAL mode behind a group-committing writer thread."""

from __future__ import annotations

import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.rollouts.interfaces import StoreError
from nemo_gym.rollouts.store.schema import COUNT_ON, SCHEMA_VERSION, UPGRADE, Dialect, statements
from nemo_gym.rollouts.store.sql import ResultSink, SqlJobStore
from nemo_gym.storage.group_commit import SqliteWriter

SQLITE = Dialect(
    serial="INTEGER PRIMARY KEY",
    blob="BLOB",
    now="ng_now()",
    locking="",
    one_of="{} IN (SELECT value FROM json_each(?))",
    alone=None,
)


class SqliteJobStore(SqlJobStore):
    """See `JobStore`. One process at a time writes; the caller holds the run's lock."""

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
    connection.create_function("ng_now", 0, time.time)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, 1, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    connection.execute("BEGIN IMMEDIATE")
    for statement in (*(UPGRADE if version == 1 else ()), *statements(SQLITE), *([COUNT_ON] if version == 1 else ())):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    connection.execute("COMMIT")
    return connection


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
