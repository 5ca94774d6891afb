"""Creation of boxes, once per idempotency key, and pools of boxes that are created in advance."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.broker.box import Box, CreateOrder
from nemo_gym.broker.boxes import Boxes, door_digest, gone, not_adopted
from nemo_gym.broker.config import WarmPool
from nemo_gym.broker.registry import BoxState, LeaseRecord
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import NemoGymError, SandboxError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.http.telemetry import Counter, Histogram
from nemo_gym.sandbox.base import ExecOutcome
from nemo_gym.sandbox.wire.models import BoxSpec, CreateSandbox
from nemo_gym.sandbox.wire.problems import BrokerError

# -- Warm pools ----------------------------------------------------------------------------------------------------
# Boxes that wait for a create with the same spec, and images that are fetched in advance.
#
# A warm box is a box like any other, with a record and a lease that the pool renews. To hand it out, the pool checks
# that it is alive and changes its owner in one transaction. If a create needs the place of a warm box, the pool
# destroys the box.

log = structlog.get_logger(__name__)

OWNER = "(warm pool)"
"""Owner and creator of warm boxes in the registry. Its characters cannot appear in a caller's name."""
_LEASE_S = 120.0
_TICK_S = 0.5
_RETRY_S = 10.0
_PROBE_TIMEOUT_S = 10.0


class _Pool(NamedTuple):
    spec: BoxSpec
    size: int
    idle: list[Box]
    renewed: list[Box]
    """Boxes whose lease is being renewed: a renewal must not end after the box has a new owner."""


class WarmPools:
    """The pools of one broker."""

    def __init__(self, boxes: Boxes, pools: list[WarmPool], prefetch: list[str]) -> None:
        self._boxes, self._prefetch = boxes, prefetch
        self._pools = [_Pool(_poolable(pool.spec), pool.size, [], []) for pool in pools]
        self._tasks = BackgroundTasks()

    async def start(self) -> None:
        """Destroy the warm boxes of an earlier process, and keep the pools filled from now on. The reconciler destroys
        later what cannot be destroyed now."""
        # All at once: each takes long when the backend does not respond, and nothing is served until they have ended.
        await asyncio.gather(*(self._drop(box) for box in self._boxes.live.values() if box.creator == OWNER))
        # A pool whose boxes are slow to make, or cannot be made, holds up no other pool and no renewal.
        for pool in self._pools:
            self._tasks.start(self._keep_filled(pool), name="broker warm pool")
        if self._pools:
            self._tasks.start(self._keep_alive(), name="broker warm leases")
        if self._prefetch:
            self._tasks.start(self._fetch(), name="broker prefetch")

    async def aclose(self) -> None:
        await self._tasks.cancel()

    async def take(self, order: CreateOrder) -> Box | None:
        """Hand over a live warm box with the order's spec to the order's creator; ``None`` if there is none."""
        requested_spec = _poolable(order.body.spec)
        for pool in self._pools:
            idle = pool.idle
            if pool.spec != requested_spec:
                continue
            while idle and self._boxes.admission.may_have_more(order.owner):
                box = idle.pop(0)
                if box.state is not BoxState.RUNNING:
                    continue  # it has given back its place
                # Its place changes hands before anything is awaited, so that concurrent creates respect the limit.
                self._boxes.admission.swap(box.owner, order.owner)
                box.owner = order.owner
                handed_over = False
                try:
                    handed_over = await self._is_alive(box) and await self._hand_over(box, order)
                finally:
                    if not handed_over:
                        # The registry may name the caller's key; a box of this reason lets the key be used again.
                        box.idempotency_key = None
                        await self._drop(box, "create_failed")
                if handed_over:
                    return box
        return None

    async def give_way(self) -> None:
        """Destroy one warm box, if there is any, to free its place."""
        for pool in self._pools:
            if pool.idle:
                await self._drop(pool.idle.pop())
                return

    async def _is_alive(self, box: Box) -> bool:
        if not box.ready or box.handle is None:
            return False
        try:
            result = await self._boxes.backend.provider.exec(box.handle, ["true"], timeout_s=_PROBE_TIMEOUT_S)
        except SandboxError:
            return False
        return result.outcome is ExecOutcome.EXITED  # with any exit code: an image may lack the program

    async def _hand_over(self, box: Box, order: CreateOrder) -> bool:
        boxes, body = self._boxes, order.body
        handle = box.handle
        assert handle is not None
        lease = LeaseRecord(f"le-{uuid.uuid4().hex}", box.sandbox_id, LeaseScope.OWNER, box.epoch)
        await boxes.store.hand_over(
            box.sandbox_id,
            lease,
            boxes.sealer.seal_doors(body.spec.doors, box.sandbox_id),
            creator=order.creator,
            creator_role=order.creator_role.value,
            owner=order.owner,
            idempotency_key=order.key,
            body_digest=order.digest,
            labels=dict(body.labels),
            ttl_s=order.ttl_s,
            expires_at=time.time() + order.ttl_s,
            request=boxes.sealer.seal(body, box.sandbox_id),
        )
        box.creator, box.creator_role, box.idempotency_key = order.creator, order.creator_role, order.key
        box.body_digest, box.labels, box.leases = order.digest, body.labels, {lease.lease_id: lease}
        box.ttl_s, box.deadline = order.ttl_s, time.monotonic() + order.ttl_s
        try:
            await boxes.backend.provider.renew(handle, order.ttl_s)
            for door in body.spec.doors:
                await boxes.backend.open_door(handle, door.to_door())
                box.doors[door.name] = door_digest(door)
        except SandboxError as error:
            log.info("warm_box_not_handed_over", sandbox_id=box.sandbox_id, error=str(error)[:300])
            await boxes.store.forget_key(box.sandbox_id)
            return False
        return True

    async def _drop(self, box: Box, reason: str = "closed") -> None:
        try:
            await self._boxes.destroy(box, reason)
        except NemoGymError as error:
            log.warning("sandbox_destroy_failed", sandbox_id=box.sandbox_id, error=str(error)[:300])

    async def _keep_filled(self, pool: _Pool) -> None:
        admission = self._boxes.admission
        while True:
            pause_s = _TICK_S
            pool.idle[:] = [box for box in pool.idle if box.state is BoxState.RUNNING]
            try:
                is_short = len(pool.idle) + len(pool.renewed) < pool.size
                if is_short and admission.has_place and not admission.waiting:
                    pool.idle.append(await self._make(pool.spec))
            except NemoGymError as error:
                log.warning("warm_pool_not_filled", image=pool.spec.image, error=str(error)[:300])
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._boxes.admission.waiting and not self._boxes.admission.has_place:
                await self.give_way()  # a create found no box to take the place of, because it was made or renewed
            for pool in self._pools:
                for box in [box for box in pool.idle if box.left_s < _LEASE_S / 2]:
                    pool.idle.remove(box)
                    pool.renewed.append(box)
                    self._tasks.start(self._renew(pool, box), name=f"renew {box.sandbox_id}")

    async def _renew(self, pool: _Pool, box: Box) -> None:
        try:
            await self._boxes.renew(box, _LEASE_S)
        except NemoGymError as error:
            log.warning("warm_box_not_renewed", sandbox_id=box.sandbox_id, error=str(error)[:300])
            await asyncio.sleep(_RETRY_S)
        finally:
            pool.renewed.remove(box)
            pool.idle.append(box)

    async def _make(self, spec: BoxSpec) -> Box:
        self._boxes.admission.occupy(OWNER)
        body = CreateSandbox(spec=spec, ttl_s=_LEASE_S, labels={"nemo_gym.role": "warm"})
        order = CreateOrder(OWNER, Role.OPERATOR, OWNER, uuid.uuid4().hex, b"warm", _LEASE_S, body)
        return await self._boxes.create(order)

    async def _fetch(self) -> None:
        for image in self._prefetch:
            try:
                await self._drop(await self._make(BoxSpec(image=image)))
            except NemoGymError as error:
                log.warning("image_not_fetched", image=image, error=str(error)[:300])


def _poolable(spec: BoxSpec) -> BoxSpec:
    """Return the spec without doors and ``ready_timeout_s``, in which a warm box may differ from a request."""
    return spec.model_copy(update={"doors": (), "ready_timeout_s": None})


# -- Creation ------------------------------------------------------------------------------------------------------

CREATES = Counter("sandbox_broker_creates", "Creates by how they ended", ("outcome",))
CREATE_SECONDS = Histogram("sandbox_broker_create_seconds", "From the request to the box")
IN_PROGRESS_WAIT_S = 20.0
"""How long a repeated request waits for the box of the first request."""


@dataclass(slots=True)
class _Pending:
    digest: bytes
    task: asyncio.Task[tuple[Box, bool]]
    waiters: int = 0
    queued: bool = True
    """Still true while nothing was written and the backend was not asked, so that the create can simply be dropped."""
    taking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a warm box may be handed over, because it is known only afterwards whose the box is."""


class Creations:
    """Creates in progress. A create continues after its caller disconnects, because the caller may repeat it with the
    same key; only a create that still waits for a place is dropped."""

    def __init__(self, boxes: Boxes, warm: WarmPools) -> None:
        self._boxes, self._warm = boxes, warm
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._draining = False

    async def create(self, order: CreateOrder) -> tuple[Box, bool]:
        """Return the box, and whether this request created it.

        Raises:
            BrokerError: the key was used with another body (``idempotency_key_reused``), its box is gone
                (``sandbox_gone``), it is not ready yet (``create_in_progress``) or not taken over yet after a restart
                (``backend_unreachable``), or there is no free place.
            SandboxError: the provider failed.
        """
        if self._draining:
            raise draining()
        name = (order.creator, order.key)
        pending = self._pending.get(name)
        is_first = pending is None
        if pending is None:
            task = asyncio.create_task(self._counted(order), name=f"create by key {order.key[:64]}")
            pending = self._pending[name] = _Pending(order.digest, task)
            task.add_done_callback(lambda _: self._finished(name, task))
        elif pending.digest != order.digest:
            raise _reused(order.key)
        pending.waiters += 1
        try:
            await asyncio.wait({pending.task}, timeout=None if is_first else IN_PROGRESS_WAIT_S)
            if not pending.task.done():
                detail = f"the box of Idempotency-Key '{order.key[:64]}' is still being created; repeat the request"
                raise BrokerError("create_in_progress", detail, retry_after_s=1)
            if pending.task.cancelled() and self._draining:
                raise draining()
            if pending.task.cancelled():
                raise BrokerError("create_in_progress", "the create was dropped; repeat the request", retry_after_s=1)
            box, is_new = pending.task.result()
            return box, is_new and is_first
        finally:
            pending.waiters -= 1
            if not pending.waiters and pending.queued and not pending.task.done():
                pending.task.cancel()
                self._finished(name, pending.task)

    def drain(self) -> None:
        """Refuse all creates from now on, including those that wait for a place."""
        self._draining = True
        for pending in self._pending.values():
            if pending.queued:
                pending.task.cancel()

    async def discard(self, creator: str, key: str) -> str | None:
        """Undo a create that is in progress or done, or refuse one yet to arrive; return the destroyed box's id."""
        pending = self._pending.get((creator, key))
        if pending is not None:
            async with pending.taking:
                pass
            if pending.queued:
                pending.task.cancel()
                self._finished((creator, key), pending.task)
        box = self._boxes.by_key(creator, key)
        if box is None:
            # If the create request arrives later, it finds its key already used.
            await self._boxes.store.spend_key(creator, key)
            return None
        await self._boxes.destroy(box, "closed")
        return box.sandbox_id

    def _finished(self, name: tuple[str, str], task: asyncio.Task[tuple[Box, bool]]) -> None:
        pending = self._pending.get(name)
        if pending is not None and pending.task is task:
            del self._pending[name]
        if task.done() and not task.cancelled():
            task.exception()  # mark it as retrieved: its callers received it, or have disconnected

    async def _counted(self, order: CreateOrder) -> tuple[Box, bool]:
        start, outcome = time.monotonic(), "internal"
        try:
            box, is_new = await self._create(order)
            outcome = "created" if is_new else "repeated"
        except asyncio.CancelledError:
            outcome = "dropped"
            raise
        except NemoGymError as error:
            outcome = error.code
            raise
        finally:
            CREATES.add(outcome)
        if is_new:
            CREATE_SECONDS.observe(time.monotonic() - start)
        return box, is_new

    async def _create(self, order: CreateOrder) -> tuple[Box, bool]:
        boxes, pending = self._boxes, self._pending[order.creator, order.key]
        record = await boxes.store.find_by_key(order.creator, order.key)
        if record is not None and record.body_digest not in (order.digest, b""):
            raise _reused(order.key)
        if record is not None and not (record.state is BoxState.GONE and record.reason == "create_failed"):
            box = boxes.get(record.sandbox_id)
            if box is not None and box.idempotency_key != order.key:
                # A warm box whose hand-over was written, although it failed.
                await boxes.destroy(box, "create_failed")
            elif box is None and record.state is not BoxState.GONE:
                raise not_adopted(f"box '{record.sandbox_id}'", started="yes")
            elif box is None or box.state in (BoxState.CLOSING, BoxState.GONE):
                raise gone(record.sandbox_id, f"{record.reason or 'closed'}; create another box with a new key")
            else:
                if box.state is BoxState.CREATING:
                    await boxes.bring_up(box, order.body, interrupted=True)
                return box, False
        spec = order.body.to_spec()
        (await boxes.backend.capabilities()).check(spec, boxes.backend.name)
        async with pending.taking:
            pending.queued = False
            if not boxes.admission.waiting and (box := await self._warm.take(order)) is not None:
                return box, True
            pending.queued = True
        if self._draining or not pending.waiters:
            raise asyncio.CancelledError  # nobody could drop it meanwhile
        if not boxes.admission.has_place:
            await self._warm.give_way()
        await boxes.admission.enter(order.owner)
        pending.queued = False
        return await boxes.create(order), True


def draining() -> BrokerError:
    return BrokerError("draining", "the broker is stopping; retry when it is back", retry_after_s=2)


def _reused(key: str) -> BrokerError:
    return BrokerError(
        "idempotency_key_reused",
        f"Idempotency-Key '{key[:64]}' was used with another body; a key is bound to one request permanently",
    )
