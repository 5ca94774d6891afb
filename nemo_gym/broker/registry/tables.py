"""Tables and records of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Boolean, Column, Connection, Double, Index, Integer, LargeBinary, MetaData, String, Table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import LeaseScope

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
