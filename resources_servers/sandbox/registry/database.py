"""A connection to the registry's database, SQLite or PostgreSQL by URL."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event, insert, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from nemo_gym.errors import ConfigError, NemoGymError
from resources_servers.sandbox.registry.tables import SCHEMA_VERSION, meta, metadata

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


class Durability(IntEnum):
    """What a committed transaction outlives."""

    PROCESS = 0
    """The broker's death, however it dies. What was committed in the last moments before the database's machine loses
    its power (with PostgreSQL: before its server crashes) may be gone, the latest first and never a part of one."""
    MACHINE = 1
    """That, too: it is on the disk."""


class RegistryError(NemoGymError):
    """The registry's database cannot be read or written now; whether the last write stands is unknown."""

    code = "backend_unreachable"
    status = 503


def open_engine(url: str) -> Engine:
    """An engine for ``sqlite:///<path>`` or ``postgresql://…``; connects to nothing yet.

    Raises:
        ConfigError: the URL is no URL of these two.
    """
    try:
        parsed = make_url(url)
        backend = parsed.drivername.partition("+")[0]
        if backend not in _DRIVERS:
            raise ArgumentError(f"'{backend}' is neither sqlite nor postgresql")
        parsed = parsed.set(drivername=_DRIVERS[backend])
        if backend == "sqlite":
            _private_file(parsed)
        engine = create_engine(parsed, poolclass=NullPool)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise ConfigError(
            f"database_url cannot be used ({error}); give sqlite:////path/to/file or postgresql://user@host/name, and"
            " install the extra 'broker'",
            key="database_url",
        ) from None
    if backend == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
    return engine


def _private_file(url: URL) -> None:
    if url.database and url.database != ":memory:":
        # SQLite gives its other files the same mode.
        Path(url.database).touch(mode=0o600)


def _tune_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000", "wal_autocheckpoint=4000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def begin(connection: Connection, durability: Durability) -> RootTransaction:
    """A transaction that is as durable as said once it is committed. Raises `SQLAlchemyError`."""
    if connection.dialect.name == "sqlite":
        # To SQLite this is the connection's affair, and nothing that can be said within a transaction.
        driver: Any = connection.connection.dbapi_connection
        driver.execute(f"PRAGMA synchronous={'FULL' if durability is Durability.MACHINE else 'NORMAL'}")
        return connection.begin()
    transaction = connection.begin()
    if durability is not Durability.MACHINE:
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    return transaction


def prepare(connection: Connection) -> None:
    """Create what is missing. Raises `ConfigError` for a database of another release."""
    metadata.create_all(connection)
    found = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
    if found is None:
        connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
    elif found != str(SCHEMA_VERSION):
        raise ConfigError(
            f"the broker's database has schema version {found}, this release reads {SCHEMA_VERSION}; use another"
            " database_url",
            key="database_url",
        )


def unreachable(error: SQLAlchemyError) -> RegistryError:
    """What callers are told of a database that failed; its words may quote values, so only the kind is said."""
    cause = getattr(error, "orig", None) or error
    return RegistryError(
        f"the broker's registry cannot be used now ({type(cause).__name__}); try again",
        retryable=True,
        started="unknown",
        retry_after_s=1,
    )
