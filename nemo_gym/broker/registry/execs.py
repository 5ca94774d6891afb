"""What is asked of the registry about execs. When a call returns, what it wrote outlives the broker's process."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, exists, insert, select, update

from nemo_gym.broker.registry.database import Durability
from nemo_gym.broker.registry.prepared import Prepared
from nemo_gym.broker.registry.records import ExecRecord
from nemo_gym.broker.registry.tables import execs
from nemo_gym.broker.registry.writer import GroupCommitWriter

# Made once: every command takes two of them.
_IS = (execs.c.sandbox_id == bindparam("of_box")) & (execs.c.exec_id == bindparam("of_exec"))
_FIND = select(execs).where(_IS)
_NEW = ("sandbox_id", "exec_id", "body_digest", "submitted_at")
_INSERT = Prepared(
    insert(execs)
    .from_select(
        _NEW, select(*(bindparam(name, type_=execs.c[name].type) for name in _NEW)).where(~exists().where(_IS))
    )
    .returning(execs.c.exec_id)
)
_END = Prepared(
    update(execs).where(_IS, execs.c.end.is_(None)).values(end=bindparam("said")).returning(execs.c.exec_id)
)
_DISCARD = delete(execs).where(_IS, execs.c.end.is_(None))


class ExecStore:
    """Execs, by box and the id their client chose.

    Args:
        durability: of what is written down of them. A sync to disk takes longer than everything else that the broker
            does for a short command.
    """

    def __init__(self, writer: GroupCommitWriter, durability: Durability = Durability.PROCESS) -> None:
        self._writer, self._durability = writer, durability

    async def insert(self, sandbox_id: str, exec_id: str, body_digest: bytes) -> ExecRecord | None:
        """The intent to run, before the backend is asked; the record of this id where there is one already, and
        nothing is written then."""
        values = _new(ExecRecord(sandbox_id, exec_id, body_digest, time.time()))

        def operation(connection: Connection) -> ExecRecord | None:
            # What it returns says whether it wrote; the count of rows is not told by every driver.
            if _INSERT.first(connection, values) is not None:
                return None
            row = connection.execute(_FIND, values).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation, self._durability)

    async def end(self, record: ExecRecord) -> None:
        """The one end of an exec; what was written first stays. A database that crashed since and forgot the intent
        hears of it again."""
        values = {**_new(record), "said": record.end}

        def operation(connection: Connection) -> None:
            if _END.first(connection, values) is None:
                _INSERT.first(connection, values)
                _END.first(connection, values)

        await self._writer.call(operation, self._durability)

    async def discard(self, sandbox_id: str, exec_id: str) -> None:
        """Forget an exec that surely never started."""
        values = {"of_box": sandbox_id, "of_exec": exec_id}
        await self._writer.call(lambda connection: connection.execute(_DISCARD, values) and None, self._durability)

    async def find(self, sandbox_id: str, exec_id: str) -> ExecRecord | None:
        def operation(connection: Connection) -> ExecRecord | None:
            row = connection.execute(_FIND, {"of_box": sandbox_id, "of_exec": exec_id}).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation, self._durability)

    async def unfinished(self, sandbox_id: str) -> list[ExecRecord]:
        """Execs of a box without an end."""

        def operation(connection: Connection) -> list[ExecRecord]:
            query = select(execs).where(execs.c.sandbox_id == sandbox_id, execs.c.end.is_(None))
            return [_exec(row) for row in connection.execute(query)]

        return await self._writer.call(operation, self._durability)


def _new(record: ExecRecord) -> dict[str, Any]:
    key = {"of_box": record.sandbox_id, "of_exec": record.exec_id}
    return {**key, **{name: getattr(record, name) for name in _NEW}}


def _exec(row: Row[Any]) -> ExecRecord:
    return ExecRecord(**row._mapping)
