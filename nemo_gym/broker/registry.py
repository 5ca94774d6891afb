"""The broker's registry: its tables and records, and their database with its only writer.

The database is SQLite or PostgreSQL, depending on the URL.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, TypeVar

import structlog
from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Executable,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RootTransaction,
    Row,
    String,
    Table,
    create_engine,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.compiler import SQLCompiler

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.storage import GroupCommitThread, Waiting, resolve

# -- Tables --------------------------------------------------------------------------------------------------------
# The tables, with types that both SQLite and PostgreSQL support.
#
# A row of ``boxes`` is written before the backend creates the box, and is kept for a while after the box is gone,
# because it records the idempotency key. ``identity`` is the row's broker; several brokers may share a database.

SCHEMA_VERSION = 2

metadata = MetaData()

meta = Table(
    "broker_meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", String(256), nullable=False),
)

boxes = Table(
    "broker_boxes",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("identity", String(128), nullable=False),
    Column("creator", String(256), nullable=False),
    Column("owner", String(256), nullable=False),
    # Null once the key may be used again, because its create failed.
    Column("idempotency_key", String(256)),
    Column("body_digest", LargeBinary, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("detail", String(2048)),
    Column("epoch", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("ttl_s", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("gone_at", Double),
    Column("image", String(1024)),
    Column("labels", LargeBinary, nullable=False),
    # The create request, sealed because its doors hold credentials.
    Column("request", LargeBinary, nullable=False),
    Column("backend_id", String(256)),
    # What the provider needs to connect to the box, sealed.
    Column("descriptor", LargeBinary),
    # Null if a release without roles wrote the row.
    Column("creator_role", String(16)),
    Index("broker_boxes_by_key", "identity", "creator", "idempotency_key", unique=True),
    Index("broker_boxes_by_state", "identity", "state"),
)

images = Table(
    "broker_images",
    metadata,
    Column("identity", String(128), primary_key=True),
    # The backend's name of the image.
    Column("name", String(512), primary_key=True),
    Column("owner", String(256), nullable=False),
    Column("owner_role", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
)

leases = Table(
    "broker_leases",
    metadata,
    Column("lease_id", String(64), primary_key=True),
    Column("sandbox_id", String(64), nullable=False, index=True),
    Column("scope", String(16), nullable=False),
    Column("epoch", Integer, nullable=False),
    # Null if the lease ends with the box.
    Column("expires_at", Double),
    Column("revoked", Boolean, nullable=False, default=False),
)

doors = Table(
    "broker_doors",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("name", String(256), primary_key=True),
    # The door with its headers, sealed.
    Column("door", LargeBinary, nullable=False),
)

execs = Table(
    "broker_execs",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("exec_id", String(128), primary_key=True),
    Column("body_digest", LargeBinary, nullable=False),
    Column("submitted_at", Double, nullable=False),
    # `ExecEndModel` as JSON; null until the exec's end is known.
    Column("end", LargeBinary),
)


# -- Records -------------------------------------------------------------------------------------------------------


class BoxState(StrEnum):
    """State of a box. An intent (``creating``, ``closing``) is recorded before the backend is called."""

    CREATING = "creating"
    RUNNING = "running"
    CLOSING = "closing"
    GONE = "gone"


@dataclass(slots=True)
class LeaseRecord:
    """A right to use a box. The box's first lease is its owner's."""

    lease_id: str
    sandbox_id: str
    scope: LeaseScope
    epoch: int
    expires_at: float | None = None
    """Unix seconds; ``None`` if the lease ends with the box."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """One row of ``boxes``."""

    sandbox_id: str
    creator: str
    owner: str
    idempotency_key: str | None
    body_digest: bytes
    state: BoxState
    created_at: float
    ttl_s: float
    expires_at: float
    request: bytes = field(repr=False)
    """The create request, sealed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 1
    image: str | None = None
    reason: str | None = None
    detail: str | None = None
    gone_at: float | None = None
    backend_id: str | None = None
    descriptor: bytes | None = field(default=None, repr=False)
    """What the provider needs to connect to the box, sealed."""
    creator_role: Role | None = None


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One row of ``images``: the owner of an image that was made of a box of this broker."""

    name: str
    """The backend's name of the image."""
    owner: str
    owner_role: Role
    created_at: float


@dataclass(frozen=True, slots=True)
class ExecRecord:
    """One row of ``execs``."""

    sandbox_id: str
    exec_id: str
    body_digest: bytes
    submitted_at: float
    end: bytes | None = None


# -- Prepared statements -------------------------------------------------------------------------------------------
# Statements that every command needs, executed directly by the database driver.
#
# SQLAlchemy compiles them for either database. Its overhead per execution is larger than SQLite's execution time.


class Prepared:
    """A statement whose parameters and results need no conversion by SQLAlchemy: only text, numbers and bytes."""

    def __init__(self, statement: Executable) -> None:
        self._statement = statement
        self._compiled: dict[str, tuple[str, list[str] | None]] = {}

    def first(self, connection: Connection, values: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Execute the statement in the connection's transaction and return its first row. Raises `DBAPIError`."""
        dialect = connection.dialect
        text, parameter_names = self._compiled.get(dialect.name) or self._compile(connection)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(text, values if parameter_names is None else [values[name] for name in parameter_names])
            row: tuple[Any, ...] | None = cursor.fetchone()
        except dialect.loaded_dbapi.Error as error:
            raise DBAPIError(text, None, error) from error
        finally:
            cursor.close()
        return row

    def _compile(self, connection: Connection) -> tuple[str, list[str] | None]:
        compiled = self._statement.compile(dialect=connection.dialect)  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        parameter_names = None if compiled.positiontup is None else [*compiled.positiontup]
        self._compiled[connection.dialect.name] = (compiled.string, parameter_names)
        return self._compiled[connection.dialect.name]


# -- Database ------------------------------------------------------------------------------------------------------

_DRIVERS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "sqlite": "sqlite"}


_PATIENCE_MS = 5000
"""How long a transaction waits for another program that writes to the same SQLite file."""
_PREPARING = 0x6E67_7362
"""Number of PostgreSQL's advisory lock under which tables are created."""
_CHECKPOINT_PAGES = 4000
"""Size of SQLite's write-ahead log beyond which a commit also runs a checkpoint, which waits for the disk."""


class Durability(IntEnum):
    """The crashes that a committed transaction survives."""

    PROCESS = 0
    """Any crash of the broker. If the database's machine loses power (with PostgreSQL: if its server crashes), the
    last transactions before that may be lost, the latest first; each is kept or lost as a whole."""
    MACHINE = 1
    """Those crashes too: the transaction is on the disk."""


class RegistryError(NemoGymError):
    """The registry's database cannot be read or written now. Whether the last write was committed is unknown."""

    code = "backend_unreachable"
    status = 503


def open_engine(url: str) -> Engine:
    """Create an engine for ``sqlite:///<path>`` or ``postgresql://…``, without connecting yet.

    Raises:
        ConfigError: the URL has neither form, or the database driver is not installed.
    """
    try:
        parsed = make_url(url)
        backend = parsed.drivername.partition("+")[0]
        if backend not in _DRIVERS:
            raise ArgumentError(f"'{backend}' is neither sqlite nor postgresql")
        parsed = parsed.set(drivername=_DRIVERS[backend])
        if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
            Path(parsed.database).touch(mode=0o600)  # SQLite gives its log and lock files the same mode
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
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA journal_mode=WAL").close())
    return engine


def is_local(connection: Connection) -> bool:
    """Return whether the database is a local file, so that a transaction that needs no sync does not wait at all."""
    return connection.dialect.name == "sqlite"


def begin(connection: Connection, durability: Durability, *, at_once: bool = False) -> RootTransaction:
    """Begin a transaction with the given durability.

    Args:
        at_once: for SQLite only: do not wait for a lock, and do not run a checkpoint at the commit. Some transactions
            must not set this, or the write-ahead log grows without end.

    Raises:
        SQLAlchemyError: the database cannot be used.
    """
    if is_local(connection):
        # In SQLite these are settings of the connection, which cannot change within a transaction.
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
    """Create missing tables, and migrate a database of an earlier release. Raises `ConfigError` for a database of a
    later release."""
    # If several brokers start on one database, the first one migrates it and the others wait.
    lock_statement = "BEGIN IMMEDIATE" if is_local(connection) else f"SELECT pg_advisory_xact_lock({_PREPARING})"
    connection.exec_driver_sql(lock_statement)
    metadata.create_all(connection)
    is_version = meta.c.key == "schema_version"
    version = connection.execute(select(meta.c.value).where(is_version)).scalar()
    if version is None:
        connection.execute(insert(meta).values(key="schema_version", value=str(SCHEMA_VERSION)))
    elif version == "1":
        connection.exec_driver_sql("ALTER TABLE broker_boxes ADD COLUMN creator_role VARCHAR(16)")
        connection.execute(update(meta).where(is_version).values(value=str(SCHEMA_VERSION)))
    elif version != str(SCHEMA_VERSION):
        raise ConfigError(
            f"the broker's database has schema version {version}, this release reads {SCHEMA_VERSION}; use another"
            " database_url",
            key="database_url",
        )


def unreachable(error: SQLAlchemyError) -> RegistryError:
    """Return the error that callers get when the database fails. It names only the type of the database's error, whose
    message may quote values."""
    cause = getattr(error, "orig", None) or error
    return RegistryError(
        f"the broker's registry cannot be used now ({type(cause).__name__}); try again",
        retryable=True,
        started="unknown",
        retry_after_s=1,
    )


# -- Writer --------------------------------------------------------------------------------------------------------
# The writer of the registry: one thread, one connection, one transaction for all waiting operations.
#
# A transaction is as durable as the most demanding of its operations requires. If it fails, its operations are retried
# one by one, so that none fails because of another. If the database is unreachable, all waiting operations fail, and
# the next one connects again.
#
# An operation that needs no sync to disk is committed at once, on the event loop's own thread, if none is waiting and
# the database is a local file: two thread switches take longer than such a commit.

T = TypeVar("T")
Operation = Callable[[Connection], T]
log = structlog.get_logger(__name__)
MAX_AT_ONCE = 1000
"""Every commit of this number goes to the writer's thread instead of the loop's, so that it can run a checkpoint."""


@dataclass(slots=True, kw_only=True)
class _Request(Waiting):
    operation: Operation[Any]
    durability: Durability


class RegistryWriter(GroupCommitThread[_Request]):
    """Runs operations in order on its own thread. An operation may raise `NemoGymError` only before it writes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._at_once = 0
        super().__init__(name="registry-writer")

    def call(self, operation: Operation[T], durability: Durability = Durability.MACHINE) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction, with at least the given durability. The future raises
        `RegistryError` if the database cannot be used."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RegistryError("the broker is stopping", retryable=True, started="no"))
            return future
        request = _Request(future, operation=operation, durability=durability)
        if not self._settled_at_once(request):
            self._put(request)
        return future

    async def run(self, *statements: Executable, durability: Durability = Durability.MACHINE) -> None:
        """Execute statements in order in one transaction; errors as for `call`."""

        def operation(connection: Connection) -> None:
            for statement in statements:
                connection.execute(statement)

        await self.call(operation, durability)

    async def rows(
        self, query: Executable, convert: Callable[[Row[Any]], T], durability: Durability = Durability.MACHINE
    ) -> list[T]:
        """Return the converted rows of a query; errors as for `call`."""
        return await self.call(lambda connection: [convert(row) for row in connection.execute(query)], durability)

    def _settled_at_once(self, request: _Request) -> bool:
        """Commit the request on this thread, if that needs no waiting; return whether that was done."""
        connection = self._connection if self._idle and request.durability is Durability.PROCESS else None
        if connection is None or not is_local(connection):
            return False
        self._at_once += 1
        if self._at_once % MAX_AT_ONCE == 0 or not self._commit([request]):
            request.error = None
            return False
        resolve([request])
        return True

    def _settle(self, batch: list[_Request]) -> None:
        if not self._commit(batch) and len(batch) > 1:
            for request in batch:
                request.error = None
                self._commit([request])

    def _commit(self, batch: list[_Request]) -> bool:
        """Commit what the operations write. Return ``False`` if certainly nothing was written, so that the batch can
        be retried. A failure of the commit itself is final, because its outcome is unknown."""
        committing = False
        try:
            connection = self._connected()
            on_loop = threading.get_ident() != self._thread.ident
            transaction = begin(connection, max(request.durability for request in batch), at_once=on_loop)
            try:
                for request in batch:
                    try:
                        request.outcome = request.operation(connection)
                    except NemoGymError as error:  # raised before it wrote anything, so only its own caller gets it
                        request.error = error
                committing = True
                transaction.commit()
            finally:
                transaction.close()
            return True
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
            log.warning("registry_write_failed", error=repr(error)[:500], operations=len(batch))
            failure = unreachable(error) if isinstance(error, SQLAlchemyError) else error
            for request in batch:
                request.error = request.error or failure
            if isinstance(error, SQLAlchemyError):
                self._disconnect()
            return committing

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                with connection.begin():
                    prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except SQLAlchemyError as error:
                log.info("registry_close_failed", error=repr(error)[:200])
