"""What is asked of the registry about execs. Every call is durable when it returns."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from resources_servers.sandbox.registry.records import ExecRecord
from resources_servers.sandbox.registry.tables import execs
from resources_servers.sandbox.registry.writer import GroupCommitWriter


class ExecStore:
    """Execs, by box and the id their client chose."""

    def __init__(self, writer: GroupCommitWriter) -> None:
        self._writer = writer

    async def insert(self, sandbox_id: str, exec_id: str, body_digest: bytes) -> ExecRecord | None:
        """The intent to run, before the backend is asked; the record of this id where there is one already, and
        nothing is written then."""

        def operation(connection: Connection) -> ExecRecord | None:
            row = connection.execute(select(execs).where(_is(sandbox_id, exec_id))).first()
            if row is not None:
                return _exec(row)
            values = {"sandbox_id": sandbox_id, "exec_id": exec_id, "body_digest": body_digest}
            connection.execute(insert(execs).values(**values, submitted_at=time.time()))
            return None

        return await self._writer.call(operation)

    async def end(self, sandbox_id: str, exec_id: str, end: bytes) -> None:
        """The one end of an exec; what was written first stays."""
        statement = update(execs).where(_is(sandbox_id, exec_id), execs.c.end.is_(None)).values(end=end)
        await self._writer.call(lambda connection: connection.execute(statement) and None)

    async def discard(self, sandbox_id: str, exec_id: str) -> None:
        """Forget an exec that surely never started."""
        statement = delete(execs).where(_is(sandbox_id, exec_id), execs.c.end.is_(None))
        await self._writer.call(lambda connection: connection.execute(statement) and None)

    async def find(self, sandbox_id: str, exec_id: str) -> ExecRecord | None:
        def operation(connection: Connection) -> ExecRecord | None:
            row = connection.execute(select(execs).where(_is(sandbox_id, exec_id))).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation)

    async def unfinished(self, sandbox_id: str) -> list[ExecRecord]:
        """Execs of a box without an end."""

        def operation(connection: Connection) -> list[ExecRecord]:
            query = select(execs).where(execs.c.sandbox_id == sandbox_id, execs.c.end.is_(None))
            return [_exec(row) for row in connection.execute(query)]

        return await self._writer.call(operation)


def _is(sandbox_id: str, exec_id: str) -> Any:
    return (execs.c.sandbox_id == sandbox_id) & (execs.c.exec_id == exec_id)


def _exec(row: Row[Any]) -> ExecRecord:
    return ExecRecord(**row._mapping)
