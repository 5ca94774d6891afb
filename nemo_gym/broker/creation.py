"""Creates as they are asked for: each idempotency key once, after waiting for a place."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nemo_gym.broker.box import Box
from nemo_gym.broker.boxes import Boxes, gone
from nemo_gym.broker.order import CreateOrder
from nemo_gym.broker.registry.records import BoxState
from nemo_gym.broker.warm import WarmPools
from nemo_gym.sandbox.wire.problems import BrokerError

IN_PROGRESS_WAIT_S = 20.0
"""How long a repeated request waits for the first one's box."""


@dataclass(slots=True)
class _Pending:
    digest: bytes
    task: asyncio.Task[tuple[Box, bool]]
    waiters: int = 0
    queued: bool = True
    """Nothing was written nor asked for yet: it can be dropped without a trace."""


class Creations:
    """Creates under way. One goes on when its caller has left, as the caller may ask again by its key; only one that
    still waits for a place is dropped."""

    def __init__(self, boxes: Boxes, warm: WarmPools) -> None:
        self._boxes, self._warm = boxes, warm
        self._pending: dict[tuple[str, str], _Pending] = {}
        self._draining = False

    async def create(self, order: CreateOrder) -> tuple[Box, bool]:
        """The box, and whether this request is the one that made it.

        Raises:
            BrokerError: the key was used with another body (``idempotency_key_reused``), its box is gone
                (``sandbox_gone``), it is not there yet (``create_in_progress``), or there is no place.
            SandboxError: what the provider said.
        """
        if self._draining:
            raise draining()
        name = (order.creator, order.key)
        pending = self._pending.get(name)
        is_first = pending is None
        if pending is None:
            task = asyncio.create_task(self._create(order), name=f"create by key {order.key[:64]}")
            pending = self._pending[name] = _Pending(order.digest, task)
            task.add_done_callback(lambda _: self._finished(name, task))
        elif pending.digest != order.digest:
            raise _reused(order.key)
        pending.waiters += 1
        try:
            await asyncio.wait({pending.task}, timeout=None if is_first else IN_PROGRESS_WAIT_S)
            if not pending.task.done():
                said = f"the box of Idempotency-Key '{order.key[:64]}' is being made; ask again for it"
                raise BrokerError("create_in_progress", said, retry_after_s=1)
            if pending.task.cancelled() and self._draining:
                raise draining()
            if pending.task.cancelled():
                raise BrokerError("create_in_progress", "the create was dropped; ask again", retry_after_s=1)
            box, is_new = pending.task.result()
            return box, is_new and is_first
        finally:
            pending.waiters -= 1
            if not pending.waiters and pending.queued and not pending.task.done():
                pending.task.cancel()
                self._finished(name, pending.task)

    def drain(self) -> None:
        """Refuse creates from now on, those that wait for a place included."""
        self._draining = True
        for pending in self._pending.values():
            if pending.queued:
                pending.task.cancel()

    async def discard(self, creator: str, key: str) -> str | None:
        """Take back a create, whether it is under way, done, or still to come; the id of the box that is destroyed."""
        pending = self._pending.get((creator, key))
        if pending is not None and pending.queued:
            pending.task.cancel()
            self._finished((creator, key), pending.task)
        box = self._boxes.by_key(creator, key)
        if box is None:
            # Should the request be still on its way, it finds its key spent.
            await self._boxes.store.spend_key(creator, key)
            return None
        await self._boxes.destroy(box, "closed")
        return box.sandbox_id

    def _finished(self, name: tuple[str, str], task: asyncio.Task[tuple[Box, bool]]) -> None:
        found = self._pending.get(name)
        if found is not None and found.task is task:
            del self._pending[name]
        if task.done() and not task.cancelled():
            task.exception()  # its callers have it, or have left

    async def _create(self, order: CreateOrder) -> tuple[Box, bool]:
        boxes = self._boxes
        known = await boxes.store.find_by_key(order.creator, order.key)
        if known is not None and known.body_digest not in (order.digest, b""):
            raise _reused(order.key)
        if known is not None and not (known.state is BoxState.GONE and known.reason == "create_failed"):
            box = boxes.get(known.sandbox_id)
            if box is None or box.state in (BoxState.CLOSING, BoxState.GONE):
                raise gone(known.sandbox_id, f"{known.reason or 'closed'}; ask for another under another key")
            if box.state is BoxState.CREATING:
                await boxes.bring_up(box, order.body, interrupted=True)
            return box, False
        spec = order.body.to_spec()
        (await boxes.backend.capabilities()).check(spec, boxes.backend.name)
        if not boxes.admission.waiting and (box := await self._warm.take(order)) is not None:
            return box, True
        if not boxes.admission.has_place:
            await self._warm.give_way()
        await boxes.admission.enter(order.owner)
        pending = self._pending.get((order.creator, order.key))
        if pending is not None:
            pending.queued = False
        box = await boxes.create(
            order.body,
            creator=order.creator,
            creator_role=order.creator_role,
            owner=order.owner,
            key=order.key,
            digest=order.digest,
            ttl_s=order.ttl_s,
        )
        return box, True


def draining() -> BrokerError:
    return BrokerError("draining", "the broker is stopping; ask again when it is back", retry_after_s=2)


def _reused(key: str) -> BrokerError:
    return BrokerError(
        "idempotency_key_reused",
        f"Idempotency-Key '{key[:64]}' was used with another body; one key means one request for good",
    )
