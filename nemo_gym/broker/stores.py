"""Access to the registry's records: boxes, leases, doors, images and execs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from sqlalchemy import Connection, Executable, Row, bindparam, delete, exists, insert, select, update

from nemo_gym.broker.registry import (
    BoxRecord,
    BoxState,
    Durability,
    ExecRecord,
    ImageRecord,
    LeaseRecord,
    Prepared,
    RegistryWriter,
    boxes,
    doors,
    execs,
    images,
    leases,
)
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import LeaseScope

# -- Boxes and leases ----------------------------------------------------------------------------------------------

_LIVE = (BoxState.CREATING.value, BoxState.RUNNING.value, BoxState.CLOSING.value)
_COLUMNS = [column for column in boxes.c if column.name != "identity"]
_IMAGE_COLUMNS = [column for column in images.c if column.name != "identity"]


class BoxStore:
    """Boxes of one broker, named by ``identity``."""

    def __init__(self, writer: RegistryWriter, identity: str) -> None:
        self._writer = writer
        self._identity = identity

    async def ping(self) -> None:
        """Raise `RegistryError` unless the database responds."""
        await self._writer.run(select(1))

    async def insert(self, box: BoxRecord, lease: LeaseRecord, sealed_doors: Mapping[str, bytes]) -> None:
        """Record the intent to create a box, before the backend is called. If an earlier create with the same key
        failed, the new record takes over the key."""
        values = {**asdict(box), "labels": orjson.dumps(dict(box.labels)), "identity": self._identity}
        await self._writer.run(
            self._free_failed(box.creator, box.idempotency_key),
            insert(boxes).values(**values),
            insert(leases).values(**asdict(lease)),
            *(_insert_door(box.sandbox_id, name, door) for name, door in sealed_doors.items()),
        )

    async def spend_key(self, creator: str, key: str) -> None:
        """Mark a key as used, because its create was undone before it arrived. Does nothing if the key is known."""
        now = time.time()
        sandbox_id = f"sb-{uuid.uuid4().hex}"
        spent = BoxRecord(sandbox_id, creator, creator, key, b"", BoxState.GONE, now, 0.0, now, b"", gone_at=now)
        values = {**asdict(spent), "labels": b"{}", "reason": "closed", "identity": self._identity}

        def operation(connection: Connection) -> None:
            of_key = (self._mine(), boxes.c.creator == creator, boxes.c.idempotency_key == key)
            if connection.execute(select(boxes.c.sandbox_id).where(*of_key)).first() is None:
                connection.execute(insert(boxes).values(**values))

        await self._writer.call(operation)

    async def hand_over(
        self, sandbox_id: str, lease: LeaseRecord, sealed_doors: Mapping[str, bytes], **changes: Any
    ) -> None:
        """Give a box to another owner, whose lease replaces all others. ``changes`` are columns of the box. If an
        earlier create with the same key failed, the box takes over the key."""
        changes["labels"] = orjson.dumps(changes["labels"])
        await self._writer.run(
            self._free_failed(changes["creator"], changes["idempotency_key"]),
            delete(leases).where(leases.c.sandbox_id == sandbox_id),
            insert(leases).values(**asdict(lease)),
            update(boxes).where(boxes.c.sandbox_id == sandbox_id).values(**changes),
            *(_insert_door(sandbox_id, name, door) for name, door in sealed_doors.items()),
        )

    async def forget_key(self, sandbox_id: str) -> None:
        """Free the idempotency key of a box that its caller never received, so that the caller can use it again."""
        await self._writer.run(update(boxes).where(boxes.c.sandbox_id == sandbox_id).values(idempotency_key=None))

    async def confirm(self, sandbox_id: str, *, backend_id: str, descriptor: bytes | None, expires_at: float) -> None:
        """Record that the backend has created the box."""
        await self._update(
            sandbox_id,
            BoxState.CREATING,
            state=BoxState.RUNNING.value,
            backend_id=backend_id,
            descriptor=descriptor,
            expires_at=expires_at,
        )

    async def renew(self, sandbox_id: str, ttl_s: float, expires_at: float) -> None:
        await self._update(sandbox_id, BoxState.RUNNING, ttl_s=ttl_s, expires_at=expires_at)

    async def closing(self, sandbox_id: str, reason: str) -> None:
        """Record the intent to destroy a box, before the backend is called."""
        await self._update(
            sandbox_id, BoxState.CREATING, BoxState.RUNNING, state=BoxState.CLOSING.value, reason=reason
        )

    async def gone(self, sandbox_id: str, reason: str, detail: str | None = None) -> None:
        """Record that the backend no longer has the box, and delete its doors."""
        await self._writer.run(
            update(boxes)
            .where(boxes.c.sandbox_id == sandbox_id, boxes.c.state != BoxState.GONE.value)
            .values(state=BoxState.GONE.value, reason=reason, detail=(detail or "")[:2000], gone_at=time.time()),
            delete(doors).where(doors.c.sandbox_id == sandbox_id),
        )

    async def find(self, sandbox_id: str) -> BoxRecord | None:
        return await self._find_one(boxes.c.sandbox_id == sandbox_id)

    async def find_by_key(self, creator: str, idempotency_key: str) -> BoxRecord | None:
        return await self._find_one(boxes.c.creator == creator, boxes.c.idempotency_key == idempotency_key)

    async def live(self) -> list[tuple[BoxRecord, list[LeaseRecord]]]:
        """Return every box that is not gone, with its leases; oldest first."""

        def operation(connection: Connection) -> list[tuple[BoxRecord, list[LeaseRecord]]]:
            conditions = (self._mine(), boxes.c.state.in_(_LIVE))
            rows = connection.execute(select(*_COLUMNS).where(*conditions).order_by(boxes.c.created_at)).all()
            query = select(leases).join(boxes, leases.c.sandbox_id == boxes.c.sandbox_id).where(*conditions)
            leases_by_box: dict[str, list[LeaseRecord]] = {}
            for row in connection.execute(query):
                leases_by_box.setdefault(row.sandbox_id, []).append(_lease(row))
            return [(_box(row), leases_by_box.get(row.sandbox_id, [])) for row in rows]

        return await self._writer.call(operation)

    # -- leases --------------------------------------------------------------------------------------------------

    async def leases_of(self, sandbox_id: str) -> list[LeaseRecord]:
        return await self._writer.rows(select(leases).where(leases.c.sandbox_id == sandbox_id), _lease)

    async def mint(self, lease: LeaseRecord) -> None:
        await self._writer.run(insert(leases).values(**asdict(lease)))

    async def revoke(self, lease_id: str) -> None:
        await self._writer.run(update(leases).where(leases.c.lease_id == lease_id).values(revoked=True))

    async def fence(self, sandbox_id: str, epoch: int) -> None:
        """Begin the lease epoch ``epoch``. Of the existing leases, only the owner's stays valid."""
        await self._writer.run(
            update(boxes).where(boxes.c.sandbox_id == sandbox_id).values(epoch=epoch),
            update(leases)
            .where(leases.c.sandbox_id == sandbox_id, leases.c.scope == LeaseScope.OWNER.value)
            .values(epoch=epoch),
        )

    # -- doors ---------------------------------------------------------------------------------------------------

    async def add_door(self, sandbox_id: str, name: str, door: bytes) -> None:
        await self._writer.run(_delete_door(sandbox_id, name), _insert_door(sandbox_id, name, door))

    async def remove_door(self, sandbox_id: str, name: str) -> None:
        await self._writer.run(_delete_door(sandbox_id, name))

    async def doors_of(self, sandbox_id: str) -> list[bytes]:
        """Return the sealed doors that should be open on a box, ordered by name."""
        query = select(doors.c.door).where(doors.c.sandbox_id == sandbox_id).order_by(doors.c.name)
        return await self._writer.rows(query, lambda row: bytes(row.door))

    # -- upkeep --------------------------------------------------------------------------------------------------

    async def forget(self, gone_before: float) -> list[str]:
        """Delete all records of up to 1000 boxes that were gone before ``gone_before`` (Unix seconds); return their
        ids."""

        def operation(connection: Connection) -> list[str]:
            query = select(boxes.c.sandbox_id).where(self._mine(), boxes.c.state == BoxState.GONE.value)
            ids = list(connection.execute(query.where(boxes.c.gone_at < gone_before).limit(1000)).scalars())
            for table in (execs, leases, doors, boxes):
                connection.execute(delete(table).where(table.c.sandbox_id.in_(ids)))
            return ids

        return await self._writer.call(operation)

    def _mine(self) -> Any:
        return boxes.c.identity == self._identity

    def _free_failed(self, creator: str, key: str | None) -> Executable:
        """Free a key for another box, if its create failed."""
        return (
            update(boxes)
            .where(self._mine(), boxes.c.creator == creator, boxes.c.state == BoxState.GONE.value)
            .where(boxes.c.idempotency_key == key, boxes.c.reason == "create_failed")
            .values(idempotency_key=None)
        )

    async def _find_one(self, *conditions: Any) -> BoxRecord | None:
        found = await self._writer.rows(select(*_COLUMNS).where(self._mine(), *conditions), _box)
        return found[0] if found else None

    async def _update(self, sandbox_id: str, *states: BoxState, **values: Any) -> None:
        await self._writer.run(
            update(boxes)
            .where(boxes.c.sandbox_id == sandbox_id, boxes.c.state.in_([state.value for state in states]))
            .values(**values)
        )


def _insert_door(sandbox_id: str, name: str, door: bytes) -> Executable:
    return insert(doors).values(sandbox_id=sandbox_id, name=name, door=door)


def _delete_door(sandbox_id: str, name: str) -> Executable:
    return delete(doors).where(doors.c.sandbox_id == sandbox_id, doors.c.name == name)


class ImageStore:
    """Owners of the images that were made of one broker's boxes."""

    def __init__(self, writer: RegistryWriter, identity: str) -> None:
        self._writer, self._identity = writer, identity

    async def find(self, name: str) -> ImageRecord | None:
        query = select(*_IMAGE_COLUMNS).where(self._mine(), images.c.name == name)
        found = await self._writer.rows(query, _image)
        return found[0] if found else None

    async def all(self) -> list[ImageRecord]:
        query = select(*_IMAGE_COLUMNS).where(self._mine()).order_by(images.c.name)
        return await self._writer.rows(query, _image)

    async def claim(self, image: ImageRecord) -> None:
        """Record the owner of an image name, before the backend is called."""
        await self._writer.run(insert(images).values(**asdict(image), identity=self._identity))

    async def forget(self, name: str) -> None:
        await self._writer.run(delete(images).where(self._mine(), images.c.name == name))

    def _mine(self) -> Any:
        return images.c.identity == self._identity


def _image(row: Row[Any]) -> ImageRecord:
    return ImageRecord(**{**row._mapping, "owner_role": Role(row.owner_role)})


def _box(row: Row[Any]) -> BoxRecord:
    values = dict(row._mapping)
    role = values["creator_role"]
    values |= {"state": BoxState(values["state"]), "creator_role": None if role is None else Role(role)}
    return BoxRecord(**{**values, "labels": orjson.loads(values["labels"])})


def _lease(row: Row[Any]) -> LeaseRecord:
    return LeaseRecord(**{**row._mapping, "scope": LeaseScope(row.scope)})


# -- Execs ---------------------------------------------------------------------------------------------------------

# Compiled once, because every command needs two of these statements.
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


class ExecStore:
    """Execs, by box and the id their client chose.

    Args:
        durability: durability of their records. A sync to disk takes longer than everything else that the broker does
            for a short command.
    """

    def __init__(self, writer: RegistryWriter, durability: Durability = Durability.PROCESS) -> None:
        self._writer, self._durability = writer, durability

    async def insert(self, record: ExecRecord) -> ExecRecord | None:
        """Record the intent to run a command, before the backend is called. If the id already has a record, write
        nothing and return that record."""
        values = _new(record)

        def operation(connection: Connection) -> ExecRecord | None:
            # A returned row shows that it wrote one; not every driver reports the row count.
            if _INSERT.first(connection, values) is not None:
                return None
            row = connection.execute(_FIND, values).first()
            return None if row is None else _exec(row)

        return await self._writer.call(operation, self._durability)

    async def end(self, record: ExecRecord) -> None:
        """Record the end of an exec, unless it already has one. If the database has lost the intent in a crash, the
        intent is written again."""
        values = {**_new(record), "said": record.end}

        def operation(connection: Connection) -> None:
            if _END.first(connection, values) is None:
                _INSERT.first(connection, values)
                _END.first(connection, values)

        await self._writer.call(operation, self._durability)

    async def discard(self, sandbox_id: str, exec_id: str) -> None:
        """Forget an exec that never started."""
        of_exec = execs.c.sandbox_id == sandbox_id, execs.c.exec_id == exec_id, execs.c.end.is_(None)
        await self._writer.run(delete(execs).where(*of_exec), durability=self._durability)

    async def find(self, sandbox_id: str, exec_id: str) -> ExecRecord | None:
        values = {"of_box": sandbox_id, "of_exec": exec_id}
        found = await self._writer.rows(_FIND.params(values), _exec, self._durability)
        return found[0] if found else None

    async def unfinished(self, sandbox_id: str) -> list[ExecRecord]:
        """Return the execs of a box that have no end."""
        query = select(execs).where(execs.c.sandbox_id == sandbox_id, execs.c.end.is_(None))
        return await self._writer.rows(query, _exec, self._durability)


def _new(record: ExecRecord) -> dict[str, Any]:
    key = {"of_box": record.sandbox_id, "of_exec": record.exec_id}
    return {**key, **{name: getattr(record, name) for name in _NEW}}


def _exec(row: Row[Any]) -> ExecRecord:
    return ExecRecord(**row._mapping)
