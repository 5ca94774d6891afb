"""Keeps every trajectory written for a trainer on disk, so that it can be written again if its storage dies."""

from __future__ import annotations

import contextlib
import pickle
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import ConfigError, NemoGymError, ServerError
from nemo_gym.framework.samples import TrajectoryRow
from nemo_gym.storage.group_commit import SqliteWriter

_SCHEMA = """
create table if not exists rows (
    partition text not null,
    key text not null,
    tag blob not null,
    fields blob not null,
    primary key (partition, key)
) without rowid;
"""


class TrajectoryArchive:
    """A SQLite file of rows. One process writes it, and reads only its own rows."""

    def __init__(self, path: Path) -> None:
        """Create the file if necessary. Raises `ConfigError` if that fails."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._connect().close()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"archive '{path}' cannot be written: {error}", key="archive") from error
        self._writer: SqliteWriter | None = None

    async def add(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        """Store rows; once this returns, they survive a crash of the process."""
        packed = [(partition, row.key, _packed(row.tag), _packed(row.fields)) for row in rows]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("insert or replace into rows values (?, ?, ?, ?)", packed)

        await self._started().call(write)

    def keys(self, partition: str) -> list[str]:
        with self._reading() as connection:
            found = connection.execute("select key from rows where partition = ? order by key", (partition,))
            return [key for (key,) in found]

    def partitions(self) -> list[str]:
        with self._reading() as connection:
            return [name for (name,) in connection.execute("select distinct partition from rows order by 1")]

    def rows(self, partition: str, keys: Iterable[str]) -> Iterator[TrajectoryRow]:
        """Yield the rows of these keys, in order."""
        with self._reading() as connection:
            for key in keys:
                query = "select tag, fields from rows where partition = ? and key = ?"
                for tag, fields in connection.execute(query, (partition, key)):
                    yield TrajectoryRow(key, pickle.loads(fields), pickle.loads(tag))

    async def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Delete rows that a trainer has consumed."""
        gone = [(partition, key) for key in keys]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("delete from rows where partition = ? and key = ?", gone)

        await self._started().call(write)

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
            self._writer = None

    def _started(self) -> SqliteWriter:
        if self._writer is None:
            self._writer = SqliteWriter(
                self._connect, name="trajectory-archive", translate=self._failed, stops_when_broken=False
            )
        return self._writer

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        connection.executescript(_SCHEMA)
        return connection

    def _reading(self) -> contextlib.closing[sqlite3.Connection]:
        return contextlib.closing(self._connect())

    def _failed(self, error: Exception) -> NemoGymError:
        return ServerError(f"archive '{self.path}' cannot be written: {type(error).__name__}: {error}")


def _packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
