"""The broker's boxes: their number, and their creation, renewal and destruction.

Requests for boxes are stored sealed in the registry.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import itertools
import os
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import BaseModel

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.box import Box, CreateOrder
from nemo_gym.broker.registry import BoxRecord, BoxState, LeaseRecord
from nemo_gym.broker.stores import BoxStore
from nemo_gym.contract.errors import NemoGymError, SandboxCreateError, SandboxError, SandboxLostError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.telemetry import Counter
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.wire.models import CreateSandbox, DoorModel
from nemo_gym.sandbox.wire.problems import BrokerError, Started

# -- Admission -----------------------------------------------------------------------------------------------------


class Admission:
    """Places for boxes. A box holds one from before its create until it is gone.

    Limits apply in total and per owner, and requests wait in a queue with a deadline that is fair across owners: a
    place that becomes free goes to the waiting owner with the fewest boxes, and among equals to the one served longest
    ago. So an owner who requests five hundred boxes does not keep another owner from its first.

    Args:
        max_boxes: limit for all owners together; ``None`` is no limit.
        max_per_owner: limit for each owner; ``None`` is no limit.
        max_waiting: requests in the queue; a further request is refused at once.
        timeout_s: seconds in the queue after which a request is refused.
    """

    def __init__(
        self, *, max_boxes: int | None, max_per_owner: int | None, max_waiting: int, timeout_s: float
    ) -> None:
        self._max_boxes, self._max_per_owner = max_boxes, max_per_owner
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self.held: collections.Counter[str] = collections.Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        self._turns = itertools.count()

    @property
    def total(self) -> int:
        return self.held.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def has_place(self) -> bool:
        """Whether the total limit leaves room for one more box."""
        return self._max_boxes is None or self.total < self._max_boxes

    def may_have_more(self, owner: str) -> bool:
        """Return whether the limit per owner leaves room for one more box of this owner."""
        return self._max_per_owner is None or self.held[owner] < self._max_per_owner

    def occupy(self, owner: str) -> None:
        """Count a box without checking the limits, such as one adopted after a restart."""
        self.held[owner] += 1

    def swap(self, before: str, after: str) -> None:
        """Move a place from the owner ``before`` to the owner ``after``."""
        self._release(before)
        self._take(after)

    async def enter(self, owner: str) -> None:
        """Wait for a place. Raises `BrokerError` ``quota`` if the owner is at its own limit, else ``no_room``."""
        may_take = self.has_place and self.may_have_more(owner) and not self._waiting.get(owner)
        if may_take and not any(queue and self.may_have_more(other) for other, queue in self._waiting.items()):
            self._take(owner)
            return
        if self.waiting >= self._max_waiting:
            raise self._refused(owner, "the queue for a box is full")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            async with asyncio.timeout(self._timeout_s):
                await place
        except TimeoutError:
            if place.done() and not place.cancelled():
                return
            raise self._refused(owner, f"no box became free within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(owner)
            raise
        finally:
            self._forget(owner, place)

    def leave(self, owner: str) -> None:
        """Give a place back."""
        self._release(owner)
        self._fill_free_places()

    def _release(self, owner: str) -> None:
        self.held[owner] -= 1
        if self.held[owner] <= 0:
            del self.held[owner]

    def _take(self, owner: str) -> None:
        self.held[owner] += 1
        self._served[owner] = next(self._turns)

    def _fill_free_places(self) -> None:
        while self.has_place:
            ready = [owner for owner, queue in self._waiting.items() if queue and self.may_have_more(owner)]
            if not ready:
                return
            owner = min(ready, key=lambda name: (self.held[name], self._served.get(name, -1)))
            place = self._waiting[owner].popleft()
            if not place.done():
                self._take(owner)
                place.set_result(None)

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None:
            if place in queue:
                queue.remove(place)
            if not queue:
                del self._waiting[owner]
        if owner not in self.held and owner not in self._waiting:
            self._served.pop(owner, None)

    def _refused(self, owner: str, why: str) -> BrokerError:
        retry_after_s = max(1.0, min(self._timeout_s, 10.0))
        if not self.may_have_more(owner):
            return BrokerError(
                "quota",
                f"{why}: '{owner}' has {self.held[owner]} boxes of at most {self._max_per_owner}; close some, or raise"
                " the broker's max_boxes_per_owner",
                retry_after_s=retry_after_s,
            )
        return BrokerError(
            "no_room",
            f"{why}: {self.total} boxes of at most {self._max_boxes}, {self.waiting} requests wait; try again, or"
            " raise the broker's max_boxes",
            retry_after_s=retry_after_s,
        )


# -- Boxes ---------------------------------------------------------------------------------------------------------

# -- Sealing -------------------------------------------------------------------------------------------------------

_NONCE_BYTES = 12


class SealError(SandboxError):
    """Sealed data cannot be opened with this broker's key: another stack sealed it, or it was changed."""

    code = "sealed"


class Sealer:
    """Authenticated encryption with one key of 32 bytes. ``context`` (the row's id) binds the data to its row."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def seal(self, data: bytes | BaseModel, context: str) -> bytes:
        plain = data if isinstance(data, bytes) else data.model_dump_json().encode()
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, plain, context.encode())

    def seal_doors(self, doors: Iterable[DoorModel], context: str) -> dict[str, bytes]:
        return {door.name: self.seal(door, context) for door in doors}

    def open(self, sealed: bytes, context: str) -> bytes:
        """Decrypt and authenticate. Raises `SealError`."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], context.encode())
        except (InvalidTag, ValueError) as error:
            raise SealError("the stored data of this box was sealed with another key, or changed") from error


# -- Boxes ---------------------------------------------------------------------------------------------------------
# `Boxes` holds every live box of this broker, and implements the operations on boxes.
#
# Every call to the backend is recorded in the registry before, and confirmed after. If the write or the call is
# interrupted, the box stays in a state between the two, and `Reconciler` completes the operation.

log = structlog.get_logger(__name__)

RENEWALS = Counter("sandbox_broker_renewals", "Leases renewed")

_RENEW_AFTER_S = 1.0
"""After a create that took longer than this, the lease is renewed, because the backend already counts from its start.
"""


class Boxes:
    """The live boxes, their registry and their backend."""

    def __init__(self, store: BoxStore, backend: Backend, admission: Admission, sealer: Sealer) -> None:
        self.store, self.backend, self.admission, self.sealer = store, backend, admission, sealer
        self.live: dict[str, Box] = {}
        self._adopted = False
        """Whether `live` has the boxes of this broker's earlier processes."""
        self._tasks = BackgroundTasks(_log_failure)

    def get(self, sandbox_id: str) -> Box | None:
        return self.live.get(sandbox_id)

    def ready(self, box: Box) -> SandboxHandle:
        """Return the handle of a running box. Raises `BrokerError` ``sandbox_gone`` or ``sandbox_not_ready``."""
        if box.state is BoxState.RUNNING and box.left_s <= 0:
            raise gone(box.sandbox_id, "its lease has ended")
        if box.handle is not None and box.state is BoxState.RUNNING:
            return box.handle
        if box.state in (BoxState.CLOSING, BoxState.GONE):
            raise gone(box.sandbox_id, box.reason or "closed")
        if box.adopting:
            raise not_adopted(f"box '{box.sandbox_id}'")
        raise BrokerError("sandbox_not_ready", f"box '{box.sandbox_id}' is not ready yet; try again", retry_after_s=1)

    def select(self, labels: Mapping[str, str], creator: str | None) -> list[Box]:
        """Return the boxes with all the labels, of one creator (``None``: of all), oldest first. Raises `BrokerError`
        ``backend_unreachable`` while those of an earlier process are not known."""
        self._require_adopted()
        found = [
            box
            for box in self.live.values()
            if box.state is not BoxState.GONE
            and creator in (None, box.creator)
            and labels.items() <= box.labels.items()
        ]
        return sorted(found, key=lambda box: (box.created_at, box.sandbox_id))

    def by_key(self, creator: str, key: str) -> Box | None:
        """Return the live box that a creator's idempotency key created, if any. Raises like `select`."""
        self._require_adopted()
        return next((b for b in self.live.values() if b.idempotency_key == key and b.creator == creator), None)

    # -- create --------------------------------------------------------------------------------------------------

    async def create(self, order: CreateOrder) -> Box:
        """Create a box; the caller must already hold a place in `admission`. Raises what the provider raises."""
        now, body = time.time(), order.body
        sandbox_id = f"sb-{uuid.uuid4().hex}"
        record = BoxRecord(
            sandbox_id=sandbox_id,
            creator=order.creator,
            creator_role=order.creator_role,
            owner=order.owner,
            idempotency_key=order.key,
            body_digest=order.digest,
            state=BoxState.CREATING,
            created_at=now,
            ttl_s=order.ttl_s,
            expires_at=now + order.ttl_s,
            request=self.sealer.seal(body, sandbox_id),
            labels=body.labels,
            image=body.spec.image,
        )
        lease = LeaseRecord(f"le-{uuid.uuid4().hex}", sandbox_id, LeaseScope.OWNER, 1)
        box = Box.of(record, [lease])
        box.doors = {door.name: door_digest(door) for door in body.spec.doors}
        self.live[sandbox_id] = box
        try:
            await self.store.insert(record, lease, self.sealer.seal_doors(body.spec.doors, sandbox_id))
        except BaseException:
            # The write may still have succeeded; the next reconciliation then finds the unfinished create.
            del self.live[sandbox_id]
            self.admission.leave(order.owner)
            raise
        await self.bring_up(box, body)
        return box

    async def bring_up(self, box: Box, body: CreateSandbox, *, interrupted: bool = False) -> None:
        """Have the backend create a box that the registry already records. ``interrupted``: an earlier attempt was
        interrupted, and this one repeats it."""
        if box.state is not BoxState.CREATING:
            raise gone(box.sandbox_id, "it was closed before it was ready")
        creating = box.creating
        if creating is None or creating.done():
            box.interrupted |= interrupted
            work = self._bring_up(box, body, interrupted)
            creating = box.creating = self._tasks.start(work, name=f"create {box.sandbox_id}")
        await asyncio.wait({creating})
        if creating.cancelled():
            raise gone(box.sandbox_id, "it was closed before it was ready")
        creating.result()

    async def _bring_up(self, box: Box, body: CreateSandbox, interrupted: bool) -> None:
        try:
            handle = box.handle or await self._obtain(box, body, interrupted)
        except NemoGymError as error:
            await self._not_created(box, error)
            if type(error) is SandboxError:
                raise SandboxCreateError(error.message, retryable=error.retryable, **error.details) from error
            raise
        except Exception as error:
            # A provider's own code may raise anything; the box is then not usable.
            await self._not_created(box, error)
            detail = f"the backend failed: {type(error).__name__}: {error}"
            raise SandboxCreateError(detail, retryable=isinstance(error, OSError)) from error
        box.handle = handle
        descriptor = await self.backend.describe(handle)
        await self.store.confirm(
            box.sandbox_id,
            backend_id=handle.sandbox_id,
            descriptor=None if descriptor is None else self.sealer.seal(descriptor, box.sandbox_id),
            expires_at=box.expires_at,
        )
        if box.state is BoxState.CREATING:
            # Nothing of it is left to take over, even if an earlier process began to create it.
            box.state, box.adopting = BoxState.RUNNING, False

    async def _obtain(self, box: Box, body: CreateSandbox, interrupted: bool) -> SandboxHandle:
        started = time.monotonic()
        spec = body.to_spec().replace(ttl_s=max(box.left_s, 1.0))
        handle = await self.backend.create(box.sandbox_id, spec)
        # The lease begins when its owner can use the box.
        if not interrupted:
            box.deadline = time.monotonic() + box.ttl_s
        if interrupted or time.monotonic() - started > _RENEW_AFTER_S:
            await self.backend.provider.renew(handle, max(box.left_s, 1.0))
        return handle

    async def _not_created(self, box: Box, error: Exception) -> None:
        detail = error.message if isinstance(error, NemoGymError) else type(error).__name__
        log.info("sandbox_create_failed", sandbox_id=box.sandbox_id, error=detail[:500])
        try:
            await self.backend.destroy(box.sandbox_id, None)
        except SandboxError as left:
            # The reconciler tries again: it reaps boxes that the registry does not record as live.
            log.warning("sandbox_destroy_failed", sandbox_id=box.sandbox_id, error=str(left))
        await self._ended(box, "create_failed", detail)

    # -- leases --------------------------------------------------------------------------------------------------

    async def renew(self, box: Box, ttl_s: float) -> None:
        """Extend the box's lease to ``ttl_s`` seconds from now."""
        handle = self.ready(box)
        deadline = time.monotonic() + ttl_s
        await self.store.renew(box.sandbox_id, ttl_s, time.time() + ttl_s)
        try:
            await self.backend.provider.renew(handle, ttl_s)
        except SandboxLostError:
            await self.lost(box)
            raise gone(box.sandbox_id, "the backend has lost it") from None
        box.ttl_s, box.deadline = ttl_s, deadline
        RENEWALS.add()

    # -- destroy -------------------------------------------------------------------------------------------------

    async def destroy(self, box: Box, reason: str) -> None:
        """Destroy the box, and return once the backend no longer has it. Idempotent; continues if the caller is
        cancelled. Raises `SandboxError` if the backend cannot be reached; the reconciler then tries again."""
        if box.state is BoxState.GONE:
            return
        if box.closing is None or box.closing.done():
            box.closing = self._tasks.start(self._destroy(box, reason), name=f"destroy {box.sandbox_id}")
        closing = box.closing
        await asyncio.wait({closing})
        closing.result()

    async def _destroy(self, box: Box, reason: str) -> None:
        if box.state is not BoxState.CLOSING:
            await self.store.closing(box.sandbox_id, reason)
            if box.state is BoxState.GONE:
                return
            box.state, box.reason = BoxState.CLOSING, reason
        await self._end_creation(box)
        if box.state is BoxState.GONE:
            return
        await self.backend.destroy(box.sandbox_id, box.handle, by_label=box.interrupted)
        await self._ended(box, box.reason or reason)

    async def _end_creation(self, box: Box) -> None:
        creating = box.creating
        if creating is not None and not creating.done():
            # A create that an earlier process began is not undone by cancelling its repetition, so wait for that.
            if not box.interrupted:
                creating.cancel()
            await asyncio.wait({creating})

    async def look(self, box: Box) -> None:
        """Record the end of a running box now if the backend has ended it."""
        if box.ready and box.handle is not None and await self.backend.has_ended(box.handle):
            await self.lost(box)

    async def lost(self, box: Box, reason: str = "lost") -> None:
        """Record that the backend ended or lost the box without a request to close it."""
        if box.state is BoxState.GONE:
            return
        handle = box.handle
        if handle is not None and (overrun := await self.backend.overrun(handle)) is not None:
            box.overrun, reason = overrun, "overrun"
        elif box.left_s <= 0:
            reason = "expired"
        try:
            # If the box still exists after all, it must not outlive its record. Its doors are open here.
            await self.backend.destroy(box.sandbox_id, handle)
        except SandboxError as error:
            log.warning("sandbox_destroy_failed", sandbox_id=box.sandbox_id, error=str(error)[:500])
        box.reason = reason
        await self._ended(box, reason, box.overrun)

    async def _ended(self, box: Box, reason: str, detail: str | None = None) -> None:
        for run in [*box.execs.values()]:
            await run.box_ended()
        await self.store.gone(box.sandbox_id, reason, detail)
        if box.state is not BoxState.GONE:
            box.state, box.reason, box.handle = BoxState.GONE, reason, None
            self.live.pop(box.sandbox_id, None)
            self.admission.leave(box.owner)

    # -- life ----------------------------------------------------------------------------------------------------

    def adopt(self, entries: Iterable[tuple[BoxRecord, list[LeaseRecord]]]) -> None:
        """Take over the boxes of an earlier process of this broker. They are not ready until they are reconciled."""
        for record, leases in entries:
            box = Box.of(record, leases)
            box.adopting = True
            self.live[box.sandbox_id] = box
            self.admission.occupy(box.owner)
        self._adopted = True

    def _require_adopted(self) -> None:
        if not self._adopted:
            raise not_adopted("the registry")

    def opened(self, sealed: bytes, sandbox_id: str) -> CreateSandbox:
        """Open a stored create request. Raises `SealError`."""
        return CreateSandbox.model_validate_json(self.sealer.open(sealed, sandbox_id))

    async def aclose(self) -> None:
        """Wait at most 10 s for creates and destroys in progress. Boxes live on until their leases end."""
        await self._tasks.join(timeout_s=10)


def _log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    """Log a failed task. Waiting callers also get the error; if there are none, the log is its only trace."""
    log.info("sandbox_task_failed", task=task.get_name(), error=repr(error)[:500])


def door_digest(door: DoorModel) -> bytes:
    return hashlib.sha256(door.model_dump_json().encode()).digest()


def too_many_of_box(sandbox_id: str, limit: int, what: str) -> BrokerError:
    return BrokerError(
        "too_many_of_box",
        f"box '{sandbox_id}' has reached its limit of {limit} {what}",
        sandbox_id=sandbox_id,
        limit=limit,
    )


def not_adopted(what: str, *, started: Started = "no") -> BrokerError:
    """Return the error for a request that needs a box or the registry of an earlier process, which reconciliation has
    not taken over yet. Clients wait for it: most boxes still run. ``started`` tells whether an earlier request of the
    same key had an effect."""
    detail = f"{what} was not taken over yet after the broker's restart; try again"
    return BrokerError("backend_unreachable", detail, started=started, retry_after_s=1)


def gone(sandbox_id: str, why: str) -> BrokerError:
    return BrokerError("sandbox_gone", f"box '{sandbox_id}' is gone: {why}", sandbox_id=sandbox_id)
