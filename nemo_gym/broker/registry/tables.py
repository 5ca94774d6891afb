"""The tables, in SQL that SQLite and PostgreSQL both read.

A row of ``boxes`` is written before the backend is asked to create, and stays for a while after the box is gone: it
remembers the idempotency key. ``identity`` is the broker that the row belongs to; several may share a database.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Double, Index, Integer, LargeBinary, MetaData, String, Table

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
    Column("idempotency_key", String(256)),
    # Null once the key may be used again: its create failed.
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
    Column("request", LargeBinary, nullable=False),
    # Sealed: the create request, whose doors hold credentials.
    Column("backend_id", String(256)),
    Column("descriptor", LargeBinary),
    # Sealed: what the provider connects by.
    Column("creator_role", String(16)),
    # Null: written by a release that kept none.
    Index("broker_boxes_by_key", "identity", "creator", "idempotency_key", unique=True),
    Index("broker_boxes_by_state", "identity", "state"),
)

images = Table(
    "broker_images",
    metadata,
    Column("identity", String(128), primary_key=True),
    Column("name", String(512), primary_key=True),
    # As the backend has it.
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
    Column("expires_at", Double),
    # Null: with the box.
    Column("revoked", Boolean, nullable=False, default=False),
)

doors = Table(
    "broker_doors",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("door", LargeBinary, nullable=False),
    # Sealed, with its headers.
)

execs = Table(
    "broker_execs",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("exec_id", String(128), primary_key=True),
    Column("body_digest", LargeBinary, nullable=False),
    Column("submitted_at", Double, nullable=False),
    Column("end", LargeBinary),
    # Null until the one end of the exec is known, then `ExecEndModel` as JSON.
)
