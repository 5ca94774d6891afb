"""Everything of one broker that its routes use, made at start and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import structlog

from nemo_gym.broker.access import Access
from nemo_gym.broker.backend import Backend
from nemo_gym.broker.boxes import Boxes
from nemo_gym.broker.config import BrokerConfig
from nemo_gym.broker.creation import Creations
from nemo_gym.broker.exec_manager import Execs
from nemo_gym.broker.images import Images
from nemo_gym.broker.metrics import Metrics
from nemo_gym.broker.permissions import Permissions
from nemo_gym.broker.registry.writer import GroupCommitWriter
from nemo_gym.broker.upkeep import Upkeep
from nemo_gym.broker.warm import WarmPools
from nemo_gym.contract.errors import NemoGymError

log = structlog.get_logger(__name__)


@dataclass
class BrokerService:
    config: BrokerConfig
    writer: GroupCommitWriter
    backend: Backend
    boxes: Boxes
    execs: Execs
    creations: Creations
    access: Access
    permissions: Permissions
    images: Images
    warm: WarmPools
    upkeep: Upkeep
    metrics: Metrics
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    """What this process alone may have: the lock of the state directory."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the broker is told to stop: no more creates, and streams end so that clients come back later."""

    async def start(self) -> None:
        await self.upkeep.start()
        try:
            await self.images.reconcile()
        except NemoGymError as error:
            log.warning("images_not_reconciled", error=str(error)[:300])
        try:
            await self.warm.start()
        except NemoGymError as error:
            # The reconciler comes back to what could not be let go.
            log.warning("warm_pools_not_started", error=str(error)[:300])

    async def aclose(self) -> None:
        await self.warm.aclose()
        await self.upkeep.aclose()
        if self.config.on_stop == "destroy":
            await self.upkeep.destroy_all()
        await self.boxes.aclose()
        await self.backend.aclose()
        await self.writer.aclose()
        self.held.close()
