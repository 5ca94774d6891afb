"""Statistics of the doors of remote boxes, fetched from the broker and refreshed here."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.sandbox.providers.remote.connection import BrokerConnection, RemoteBox
from nemo_gym.sandbox.wire import routes
from nemo_gym.sandbox.wire.models import DoorsView

log = structlog.get_logger(__name__)

_POLL_S = 0.5
_PATIENCE_S = 1.0


class DoorCounts:
    """Refreshes the statistics of a box on request, and regularly while the box is watched."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._watching: dict[str, asyncio.Task[None]] = {}

    async def refresh(self, box: RemoteBox) -> None:
        """Fetch the statistics now. Failures are only logged, because results are valid without statistics."""
        if not box.doors:
            return
        try:
            answer = await self._connection.ask(
                "GET",
                box.url(routes.doors(box.sandbox_id)),
                headers=box.headers,
                repeatable=True,
                patience_s=_PATIENCE_S,
            )
            box.update_doors(DoorsView.model_validate_json(answer))
        except NemoGymError as error:
            log.info("remote_doors_not_heard", sandbox_id=box.sandbox_id, error=str(error))

    def watch(self, box: RemoteBox) -> None:
        """Refresh the statistics about twice a second until `forget`."""
        if box.doors and box.sandbox_id not in self._watching:
            self._watching[box.sandbox_id] = asyncio.create_task(self._watch(box), name=f"doors {box.sandbox_id}")

    async def forget(self, box: RemoteBox) -> None:
        await self._end(self._watching.pop(box.sandbox_id, None))

    async def aclose(self) -> None:
        while self._watching:
            await self._end(self._watching.popitem()[1])

    async def _watch(self, box: RemoteBox) -> None:
        while True:
            await self.refresh(box)
            await asyncio.sleep(_POLL_S)

    @staticmethod
    async def _end(task: asyncio.Task[None] | None) -> None:
        if task is None:
            return
        task.cancel()
        if task.get_loop() is asyncio.get_running_loop():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
