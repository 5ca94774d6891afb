"""Everything of one broker that its routes use, made at start and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import structlog

from nemo_gym.errors import NemoGymError
from resources_servers.sandbox.config import BrokerConfig
from resources_servers.sandbox.execs.manager import Execs
from resources_servers.sandbox.leases.access import Access
from resources_servers.sandbox.leases.permissions import Permissions
from resources_servers.sandbox.lifecycle.backend import Backend
from resources_servers.sandbox.lifecycle.boxes import Boxes
from resources_servers.sandbox.lifecycle.creation import Creations
from resources_servers.sandbox.lifecycle.images import Images
from resources_servers.sandbox.lifecycle.upkeep import Upkeep
from resources_servers.sandbox.lifecycle.warm import WarmPools
from resources_servers.sandbox.metrics import Metrics
from resources_servers.sandbox.registry.writer import GroupCommitWriter

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
