"""Statements that every command needs, on a short way to the driver.

SQLAlchemy words them, for either database; what it does around each execution takes longer than SQLite needs for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler


class Prepared:
    """A statement whose values and results are what the driver itself takes and gives: text, numbers and bytes."""

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        self._worded: dict[str, tuple[str, list[str] | None]] = {}

    def first(self, connection: Connection, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Execute it in the connection's transaction; its first row. Raises `DBAPIError`."""
        dialect = connection.dialect
        text, places = self._worded.get(dialect.name) or self._word(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(text, values if places is None else [values[name] for name in places])
            row: tuple[Any, ...] | None = cursor.fetchone()
        except dialect.loaded_dbapi.Error as error:
            raise DBAPIError(text, None, error) from error
        finally:
            cursor.close()
        return row

    def _word(self, connection: Connection) -> tuple[str, list[str] | None]:
        compiled = self._statement.compile(dialect=connection.dialect)  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        places = None if compiled.positiontup is None else [*compiled.positiontup]
        self._worded[connection.dialect.name] = (compiled.string, places)
        return self._worded[connection.dialect.name]
