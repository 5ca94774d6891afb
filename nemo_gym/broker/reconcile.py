"""What the registry says and what the backend has, made one again.

At the start of the broker and on a timer: interrupted creates are finished, interrupted deletes are done, boxes whose
lease ended meanwhile are destroyed, boxes that vanished are written off, and boxes of ours that nobody has a record
of are reaped. The backend's inventory is the judge, never the registry.
"""

from __future__ import annotations

import asyncio

import structlog

from nemo_gym.broker.backend import BROKER_LABEL, SANDBOX_LABEL
from nemo_gym.broker.box import Box
from nemo_gym.broker.boxes import Boxes, door_digest
from nemo_gym.broker.exec_manager import Execs
from nemo_gym.broker.registry.records import BoxRecord, BoxState
from nemo_gym.broker.sealing import SealError
from nemo_gym.contract.errors import NemoGymError, SandboxError, SandboxLostError
from nemo_gym.sandbox.base import SandboxInfo, SandboxStatus
from nemo_gym.sandbox.wire.doors import DoorModel

log = structlog.get_logger(__name__)

_AT_ONCE = 16


class Reconciler:
    """Runs over all boxes of one broker."""

    def __init__(self, boxes: Boxes, execs: Execs) -> None:
        self._boxes, self._execs = boxes, execs
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self.reaped = 0
        """Boxes without a record that were destroyed so far."""

    async def run(self) -> None:
        """Once over everything. Raises `NemoGymError` when the registry or the backend does not answer."""
        boxes = self._boxes
        records = {record.sandbox_id: (record, leases) for record, leases in await boxes.store.live()}
        boxes.adopt(entry for sandbox_id, entry in records.items() if sandbox_id not in boxes.live)
        # Only what was there before the backend was asked can be missed in its answer.
        before = [box for box in boxes.live.values() if box.ready]
        inventory = await boxes.backend.inventory()
        adopting = [box for box in boxes.live.values() if box.adopting]
        await asyncio.gather(
            *(self._tended(self._adopt(box, records[box.sandbox_id][0], inventory), box) for box in adopting),
            *(self._tended(self._check(box, inventory.get(box.sandbox_id)), box) for box in before),
            *(self._tended(boxes.destroy(box, box.reason or "closed"), box) for box in self._stuck()),
        )
        for sandbox_id in inventory.keys() - boxes.live.keys():
            await self._reap(sandbox_id)

    def _stuck(self) -> list[Box]:
        """Boxes whose destruction failed before."""
        return [
            box
            for box in self._boxes.live.values()
            if box.state is BoxState.CLOSING and not box.adopting and (box.closing is None or box.closing.done())
        ]

    async def _tended(self, work: object, box: Box) -> None:
        async with self._at_once:
            try:
                await work  # type: ignore[misc]
            except NemoGymError as error:
                # One box does not keep the others from being reconciled; the timer comes back to it.
                log.warning("reconcile_failed", sandbox_id=box.sandbox_id, error=str(error)[:500])

    async def _reap(self, sandbox_id: str) -> None:
        labels = {BROKER_LABEL: self._boxes.backend.identity, SANDBOX_LABEL: sandbox_id}
        try:
            reaped = await self._boxes.backend.provider.reap(labels)
        except SandboxError as error:
            log.warning("reap_failed", sandbox_id=sandbox_id, error=str(error)[:500])
            return
        self.reaped += len(reaped)
        log.info("box_without_record_reaped", sandbox_id=sandbox_id, boxes=len(reaped))

    async def _check(self, box: Box, info: SandboxInfo | None) -> None:
        """A running box that the backend may have ended by itself."""
        if not box.ready:
            return
        if info is None:
            await self._boxes.lost(box, "expired" if box.left_s <= 0 else "lost")
        elif info.status in (SandboxStatus.STOPPED, SandboxStatus.ERROR):
            await self._boxes.destroy(box, "exited")

    # -- after a restart -----------------------------------------------------------------------------------------

    async def _adopt(self, box: Box, record: BoxRecord, inventory: dict[str, SandboxInfo]) -> None:
        info = inventory.get(box.sandbox_id)
        if box.state is BoxState.CLOSING:
            await self._boxes.destroy(box, box.reason or "closed")
        elif box.left_s <= 0:
            await self._boxes.destroy(box, "expired")
        elif box.state is BoxState.CREATING:
            await self._finish_create(box, record)
        elif info is None:
            await self._execs.recover(box, None)
            await self._boxes.lost(box)
        else:
            await self._take_over(box, record)
        box.adopting = False

    async def _finish_create(self, box: Box, record: BoxRecord) -> None:
        try:
            body = self._boxes.opened(record.request, box.sandbox_id)
        except SealError:
            await self._boxes.destroy(box, "lost")
            return
        if not await self._boxes.backend.creates_once():
            # A second create would be a second box: the first is destroyed, and the client's retry makes another.
            await self._boxes.destroy(box, "create_failed")
            return
        await self._boxes.bring_up(box, body, interrupted=True)

    async def _take_over(self, box: Box, record: BoxRecord) -> None:
        """Go on with a running box: connect, lengthen its lease as far as was promised, end the commands whose output
        nobody read, open its doors again."""
        boxes, backend = self._boxes, self._boxes.backend
        try:
            if record.descriptor is None:
                raise SandboxLostError(f"provider '{backend.name}' cannot connect to boxes of an earlier process")
            handle = await backend.connect(boxes.sealer.open(record.descriptor, box.sandbox_id))
            await backend.provider.renew(handle, max(box.left_s, 1.0))
            await self._execs.recover(box, handle)
            for sealed in await boxes.store.doors_of(box.sandbox_id):
                door = DoorModel.model_validate_json(boxes.sealer.open(sealed, box.sandbox_id))
                await backend.open_door(handle, door.to_door())
                box.doors[door.name] = door_digest(door)
        except (SandboxLostError, SealError) as error:
            log.warning("box_not_adopted", sandbox_id=box.sandbox_id, error=str(error))
            await self._execs.recover(box, None)
            await boxes.destroy(box, "lost")
            return
        box.handle = handle
