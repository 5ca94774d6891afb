"""A sampler's record of its groups, in a SQLite file beside the job store: enough to resume after ``kill -9``."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.rollouts.store.sql import store_error
from nemo_gym.sampling.groups import WeightsSpan
from nemo_gym.storage import SqliteWriter

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS sampler (
    id INTEGER PRIMARY KEY CHECK (id = 1), run_id TEXT NOT NULL, batch INTEGER NOT NULL DEFAULT 0,
    weights_version INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS groups (
    serial INTEGER PRIMARY KEY,
    row BLOB NOT NULL,
    agent TEXT NOT NULL,
    samples BLOB NOT NULL,
    size INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    reruns INTEGER NOT NULL,
    weights_version INTEGER NOT NULL,
    taken INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    batch INTEGER
);
CREATE INDEX IF NOT EXISTS groups_live ON groups (serial) WHERE state IN ('open', 'effective');
CREATE TABLE IF NOT EXISTS spans (job_id TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER) WITHOUT ROWID;
"""
COLUMNS = "serial, row, agent, samples, size, rank, reruns, weights_version, taken"


class GroupState(StrEnum):
    OPEN = "open"
    EFFECTIVE = "effective"
    """Ready, or handed out in batch ``batch``."""
    LEFT_OUT = "left_out"


@dataclass(slots=True)
class GroupRecord:
    """A group that is open or ready."""

    serial: int
    """The group's number in the run; its jobs use it as task index."""
    row: bytes
    agent: str
    samples: list[int]
    """The indices of its samples; a sample that is run again gets a new index."""
    size: int
    rank: int
    """The priority of its jobs: minus the number of batches handed out before, so that older groups go first."""
    reruns: int
    weights_version: int
    """The weights version when the group was submitted."""
    taken: int
    """The number of rows taken from the loader, including this one."""
    ended: set[int] = field(default_factory=set)
    """Sample indices that have ended."""

    @property
    def unfinished(self) -> list[int]:
        return [sample for sample in self.samples if sample not in self.ended]

    def values(self) -> tuple[Any, ...]:
        samples = orjson.dumps(self.samples)
        counters = (self.size, self.rank, self.reruns, self.weights_version, self.taken)
        return (self.serial, self.row, self.agent, samples, *counters)

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> GroupRecord:
        serial, data, agent, samples, *counters = row
        return cls(serial, bytes(data), agent, orjson.loads(samples), *counters)


@dataclass(frozen=True, slots=True)
class Remembered:
    """Everything that a sampler needs to resume."""

    run_id: str
    weights_version: int
    batch: int
    taken: int
    next_serial: int
    open: list[GroupRecord]
    ready: list[GroupRecord]
    outcomes: list[bool]
    """Whether the latest groups were effective, oldest first."""


class SamplerLedger:
    """Every awaited write is durable when it returns."""

    def __init__(self, path: Path) -> None:
        self._writer = SqliteWriter(
            lambda: _open(path), name="sampler-ledger-writer", translate=lambda error: store_error(path, error)
        )

    async def recall(self, run_id: str, outcomes: int) -> Remembered:
        """Return what is recorded, with the latest ``outcomes`` outcomes; an empty file is assigned to ``run_id``.
        Raises `ConfigError` if the file belongs to another run."""

        def operation(connection: sqlite3.Connection) -> Remembered:
            connection.execute("INSERT INTO sampler (id, run_id) VALUES (1, ?) ON CONFLICT DO NOTHING", (run_id,))
            recorded, batch, version = connection.execute(
                "SELECT run_id, batch, weights_version FROM sampler"
            ).fetchone()
            taken, serial = connection.execute(
                "SELECT coalesce(max(taken), 0), coalesce(max(serial) + 1, 0) FROM groups"
            ).fetchone()
            live = {
                state: [
                    GroupRecord.of(row)
                    for row in connection.execute(
                        f"SELECT {COLUMNS} FROM groups WHERE state = ? AND batch IS NULL ORDER BY serial", (state,)
                    )
                ]
                for state in (GroupState.OPEN.value, GroupState.EFFECTIVE.value)
            }
            latest = connection.execute(
                "SELECT state FROM groups WHERE state != 'open' ORDER BY serial DESC LIMIT ?", (outcomes,)
            ).fetchall()
            ended = [state == GroupState.EFFECTIVE for (state,) in reversed(latest)]
            return Remembered(recorded, version, batch, taken, serial, live["open"], live["effective"], ended)

        remembered = await self._writer.call(operation)
        if remembered.run_id != run_id:
            raise ConfigError(
                f"the sampler's file belongs to run '{remembered.run_id}', the job store to '{run_id}': keep the two"
                " together, or discard both with overwrite=true",
                key="output",
            )
        return remembered

    async def keep(self, group: GroupRecord) -> None:
        """Record a new group, or the changed samples of an open group."""
        await self._writer.call(
            lambda connection: connection.execute(
                f"INSERT OR REPLACE INTO groups ({COLUMNS}, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'open')",
                group.values(),
            )
        )

    async def settle(self, group: GroupRecord, state: GroupState, reason: str | None = None) -> None:
        """Record how a group ended."""
        await self._writer.call(
            lambda connection: connection.execute(
                "UPDATE groups SET state = ?, reason = ?, samples = ? WHERE serial = ?",
                (state.value, reason, orjson.dumps(group.samples), group.serial),
            )
        )

    async def hand_out(self, groups: Sequence[GroupRecord], batch: int) -> None:
        """Record that a batch holds these groups."""

        def operation(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "UPDATE groups SET batch = ? WHERE serial = ?", ((batch, group.serial) for group in groups)
            )
            connection.execute("UPDATE sampler SET batch = ?", (batch,))

        await self._writer.call(operation)

    async def go_back(self, batch: int, weights_version: int) -> None:
        """Return to an earlier batch: the groups of later batches, which were not trained on, become ready again."""

        def operation(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE groups SET batch = NULL WHERE batch > ?", (batch,))
            connection.execute("UPDATE sampler SET batch = ?, weights_version = ?", (batch, weights_version))

        await self._writer.call(operation)

    async def use_weights(self, version: int) -> None:
        await self._writer.call(
            lambda connection: connection.execute("UPDATE sampler SET weights_version = ?", (version,))
        )

    def started(self, job_id: str, version: int) -> None:
        """Record the weights version with which an attempt starts. The write is not awaited: if a crash loses it, the
        version of the group's submission is used instead."""
        self._writer.call(
            lambda connection: connection.execute(
                "INSERT INTO spans (job_id, first) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET first = ?2, last = NULL",
                (job_id, version),
            )
        )

    def ended(self, job_id: str, version: int) -> None:
        """Record the weights version with which a rollout ends, without waiting for the write."""
        self._writer.call(
            lambda connection: connection.execute("UPDATE spans SET last = ? WHERE job_id = ?", (version, job_id))
        )

    async def spans(self, job_ids: Iterable[str]) -> dict[str, WeightsSpan]:
        """Return the spans of the rollouts that started; one without a recorded end ends with its first version."""
        ids_json = orjson.dumps(list(job_ids)).decode()

        def operation(connection: sqlite3.Connection) -> dict[str, WeightsSpan]:
            rows = connection.execute(
                "SELECT job_id, first, coalesce(last, first) FROM spans"
                " WHERE job_id IN (SELECT value FROM json_each(?))",
                (ids_json,),
            )
            return {job_id: WeightsSpan(first, last) for job_id, first, last in rows}

        return await self._writer.call(operation)

    async def aclose(self) -> None:
        await self._writer.aclose()


def _open(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"schema version {version}, this release reads {SCHEMA_VERSION}")
    connection.executescript(SCHEMA)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return connection
