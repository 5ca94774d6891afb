"""What is asked of the registry about execs. Every call is durable when it returns."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, exists, insert, select, update

from resources_servers.sandbox.registry.records import ExecRecord
from resources_servers.sandbox.registry.tables import execs
from resources_servers.sandbox.registry.writer import GroupCommitWriter

# Made once: every command takes two of them.
_IS = (execs.c.sandbox_id == bindparam("of_box")) & (execs.c.exec_id == bindparam("of_exec"))
_FIND = select(execs).where(_IS)
_NEW = ("sandbox_id", "exec_id", "body_digest", "submitted_at")
_INSERT = (
    insert(execs)
    .from_select(
        _NEW, select(*(bindparam(name, type_=execs.c[name].type) for name in _NEW)).where(~exists().where(_IS))
    )
    .returning(execs.c.exec_id)
)
_END = update(execs).where(_IS, execs.c.end.is_(None)).values(end=bindparam("said"))
_DISCARD = delete(execs).where(_IS, execs.c.end.is_(None))


class ExecStore:
    """Execs, by box and the id their client chose."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer

    async def insert(self, sandbox_id: str, exec_id: str, body_digest: bytes) -> ExecRecord | None:
        """The intent to run, before the backend is asked; the record of this id where there is one already, and
        nothing is written then."""

        key = {"of_box": sandbox_id, "of_exec": exec_id}
        values = {
            "sandbox_id": sandbox_id,
            "exec_id": exec_id,
            "body_digest": body_digest,
            "submitted_at": time.time(),
        }

        def operation(connection: Connection) -> ExecRecord | None:
            # What it returns says whether it wrote; the count of rows is not told by every driver.
            if connection.execute(_INSERT, {**key, **values}).first() is not None:
                return None
            row = connection.execute(_FIND, key).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation)

    async def end(self, sandbox_id: str, exec_id: str, end: bytes) -> None:
        """The one end of an exec; what was written first stays."""
        values = {"of_box": sandbox_id, "of_exec": exec_id, "said": end}
        await self._writer.call(lambda connection: connection.execute(_END, values) and None)

    async def discard(self, sandbox_id: str, exec_id: str) -> None:
        """Forget an exec that surely never started."""
        values = {"of_box": sandbox_id, "of_exec": exec_id}
        await self._writer.call(lambda connection: connection.execute(_DISCARD, values) and None)

    async def find(self, sandbox_id: str, exec_id: str) -> ExecRecord | None:
        def operation(connection: Connection) -> ExecRecord | None:
            row = connection.execute(_FIND, {"of_box": sandbox_id, "of_exec": exec_id}).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation)

    async def unfinished(self, sandbox_id: str) -> list[ExecRecord]:
        """Execs of a box without an end."""

        def operation(connection: Connection) -> list[ExecRecord]:
            query = select(execs).where(execs.c.sandbox_id == sandbox_id, execs.c.end.is_(None))
            return [_exec(row) for row in connection.execute(query)]

        return await self._writer.call(operation)


def _exec(row: Row[Any]) -> ExecRecord:
    return ExecRecord(**row._mapping)
