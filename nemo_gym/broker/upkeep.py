"""What goes on by itself: leases that end, reconciliation on a timer, and forgetting what is long over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from nemo_gym.broker.boxes import Boxes
from nemo_gym.broker.reconcile import Reconciler
from nemo_gym.broker.registry.records import BoxState
from nemo_gym.broker.spool import SpoolSpace
from nemo_gym.contract.errors import NemoGymError

log = structlog.get_logger(__name__)

_EXPIRY_TICK_S = 0.2
_FORGET_EVERY_S = 15.0


class Upkeep:
    """The broker's timers."""

    def __init__(
        self,
        boxes: Boxes,
        reconciler: Reconciler,
        space: SpoolSpace,
        *,
        reconcile_interval_s: float,
        retention_s: float,
        output_retention_s: float,
    ) -> None:
        self._boxes, self.reconciler, self._space = boxes, reconciler, space
        self._reconcile_interval_s, self._retention_s = reconcile_interval_s, retention_s
        self._output_retention_s = output_retention_s
        self._ownerless: dict[str, float] = {}
        """When a box was first seen to be gone whose output is still there."""
        self._tasks: list[asyncio.Task[None]] = []
        self._expiring: set[asyncio.Task[None]] = set()
        self.unreconciled: str | None = "the first reconciliation has not ended yet"
        """Why the broker does not know for sure what the backend has."""

    async def start(self) -> None:
        """Reconcile once, then go on with the timers. A backend that does not answer yet is asked again."""
        await self._reconcile()
        self._tasks = [
            asyncio.create_task(self._every(_EXPIRY_TICK_S, self._expire), name="broker leases"),
            asyncio.create_task(self._every(self._reconcile_interval_s, self._reconcile), name="broker reconcile"),
            asyncio.create_task(self._every(_FORGET_EVERY_S, self._forget), name="broker forget"),
        ]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._expiring:
            await asyncio.wait(self._expiring, timeout=10)

    async def destroy_all(self) -> None:
        """Every box of this broker, at its orderly end."""
        live = [*self._boxes.live.values()]
        results = await asyncio.gather(*(self._boxes.destroy(box, "closed") for box in live), return_exceptions=True)
        for box, error in zip(live, results, strict=True):
            if error is not None:
                log.warning("sandbox_destroy_failed", sandbox_id=box.sandbox_id, error=str(error)[:500])

    async def _every(self, pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await work()
            except Exception:
                # A timer that ended would let boxes live for ever; what it met is in the log.
                log.exception("upkeep_failed", work=work.__name__)

    async def _expire(self) -> None:
        now = time.monotonic()
        for box in [*self._boxes.live.values()]:
            # One whose end could not even be written down is tried again.
            is_ending = box.closing is not None and not box.closing.done()
            if box.deadline <= now and box.state in (BoxState.CREATING, BoxState.RUNNING) and not is_ending:
                task = asyncio.create_task(self._boxes.destroy(box, "expired"), name=f"expire {box.sandbox_id}")
                self._expiring.add(task)
                task.add_done_callback(self._expired)
                await asyncio.sleep(0)

    def _expired(self, task: asyncio.Task[None]) -> None:
        self._expiring.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("sandbox_destroy_failed", error=str(error)[:500])

    async def _reconcile(self) -> None:
        try:
            await self.reconciler.run()
            self.unreconciled = None
        except NemoGymError as error:
            log.warning("reconcile_failed", error=str(error)[:500])
            self.unreconciled = str(error)

    async def _forget(self) -> None:
        now = time.monotonic()
        there = await asyncio.to_thread(self._space.boxes)
        self._ownerless = {
            sandbox_id: self._ownerless.get(sandbox_id, now) for sandbox_id in there - self._boxes.live.keys()
        }
        for sandbox_id, since in self._ownerless.items():
            if now - since > self._output_retention_s:
                self._space.forget(sandbox_id)
        while ids := await self._boxes.store.forget(time.time() - self._retention_s):
            for sandbox_id in ids:
                self._space.forget(sandbox_id)
