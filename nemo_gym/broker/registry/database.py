"""A connection to the registry's database, SQLite or PostgreSQL by URL."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from nemo_gym.broker.registry.tables import SCHEMA_VERSION, meta, metadata
from nemo_gym.contract.errors import ConfigError, NemoGymError

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


_PATIENCE_MS = 5000
"""How long a transaction waits for another program that writes to the same file."""
_PREPARING = 0x6E67_7362
"""PostgreSQL's number of the lock under which tables are made."""
_CHECKPOINT_PAGES = 4000
"""Of SQLite's log, after which a commit also brings its pages to their places and waits until the disk has them."""


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
        # A connection has one user at a time, not always the same thread.
        arguments = {"check_same_thread": False} if backend == "sqlite" else {}
        engine = create_engine(parsed, poolclass=NullPool, connect_args=arguments)
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
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def is_local(connection: Connection) -> bool:
    """Whether a transaction that waits for no disk waits for nothing else either."""
    return connection.dialect.name == "sqlite"


def begin(connection: Connection, durability: Durability, *, at_once: bool = False) -> RootTransaction:
    """A transaction that is as durable as said once it is committed.

    Args:
        at_once: that it waits for nobody, and nothing else is done at its commit. Every now and then there must be one
            that is not so.

    Raises:
        SQLAlchemyError: the database cannot be used.
    """
    if is_local(connection):
        # To SQLite these are the connection's affair, and nothing that can be said within a transaction.
        driver: Any = connection.connection.dbapi_connection
        driver.execute(f"PRAGMA synchronous={'FULL' if durability is Durability.MACHINE else 'NORMAL'}")
        driver.execute(f"PRAGMA wal_autocheckpoint={0 if at_once else _CHECKPOINT_PAGES}")
        driver.execute(f"PRAGMA busy_timeout={0 if at_once else _PATIENCE_MS}")
        return connection.begin()
    transaction = connection.begin()
    if durability is not Durability.MACHINE:
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    return transaction


def prepare(connection: Connection) -> None:
    """Create what is missing, and bring a database of an earlier release up to date. Raises `ConfigError` for one of
    a later release."""
    # Of several brokers that start on one database, the first does it and the others wait.
    alone = "BEGIN IMMEDIATE" if is_local(connection) else f"SELECT pg_advisory_xact_lock({_PREPARING})"
    connection.exec_driver_sql(alone)
    metadata.create_all(connection)
    is_version = meta.c.key == "schema_version"
    found = connection.execute(select(meta.c.value).where(is_version)).scalar()
    if found is None:
        connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
    elif found == "1":
        connection.exec_driver_sql("ALTER TABLE broker_boxes ADD COLUMN creator_role VARCHAR(16)")
        connection.execute(update(meta).where(is_version).values(value=str(SCHEMA_VERSION)))
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
