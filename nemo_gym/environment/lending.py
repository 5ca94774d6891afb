"""The routes by which a pipeline keeps an environment's box alive and has it harvested, and the lending at seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog
from starlette.requests import Request
from starlette.responses import Response

from nemo_gym.contract.errors import ContractError, FencedError, SandboxError
from nemo_gym.contract.session import BoxNeeds, RolloutIdentity, SessionDescriptor
from nemo_gym.environment.attempts import AttemptKey, AttemptStore
from nemo_gym.http.problems import JsonResponse

if TYPE_CHECKING:
    from nemo_gym.environment.hooks import EnvironmentHooks
    from nemo_gym.environment.owned_boxes import OwnedBoxes

log = structlog.get_logger(__name__)


class Lending:
    """Boxes of one environment, where it makes any (`EnvironmentHooks.owned_boxes`).

    Args:
        ask: the attempt that a request is about, its control token checked.
    """

    def __init__(
        self,
        server: EnvironmentHooks,
        attempts: AttemptStore,
        ask: Callable[[Request], Awaitable[RolloutIdentity]],
    ) -> None:
        self._server, self._attempts, self._ask = server, attempts, ask

    async def lent(
        self, descriptor: SessionDescriptor, needs: BoxNeeds | None
    ) -> tuple[SessionDescriptor, dict[str, Any]]:
        """The descriptor with a box of this environment, and what a seed's reply says of it: ``heartbeat_s``.
        Unchanged without ``needs``: then the caller will not care for a box."""
        boxes = self._server.owned_boxes()
        if boxes is None or needs is None:
            return descriptor, {}
        lent = await boxes.lend(descriptor, needs)
        if not boxes.owns(descriptor.rollout):
            return descriptor, {}
        try:
            await self._attempts.require_live(*AttemptKey.of(descriptor.rollout))
        except FencedError:
            await boxes.release(descriptor.rollout)
            raise
        return lent, {"heartbeat_s": boxes.heartbeat_s}

    async def heartbeat(self, request: Request) -> Response:
        """The pipeline still cares for an attempt whose box is this environment's."""
        rollout = await self._ask(request)
        boxes = self._boxes()
        await boxes.renew(rollout)
        return JsonResponse({"heartbeat_s": boxes.heartbeat_s})

    async def harvest(self, request: Request) -> Response:
        """The agent has ended: take the box from it, and answer with what is in it. It goes on when its caller
        leaves: asked again, it answers with what it found."""
        rollout = await self._ask(request)
        harvesting = asyncio.ensure_future(self._boxes().harvest(rollout))
        try:
            artifacts = await asyncio.shield(harvesting)
        except asyncio.CancelledError:
            harvesting.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        return JsonResponse({"artifacts": [artifact.model_dump() for artifact in artifacts]})

    async def release(self, rollout: RolloutIdentity) -> None:
        """Let go of an attempt's box, if it has one."""
        boxes = self._server.owned_boxes()
        if boxes is not None:
            try:
                await boxes.release(rollout)
            except SandboxError as error:  # its lease ends it
                log.warning("owned_box_not_released", rollout_id=rollout.rollout_id, error=str(error))

    def _boxes(self) -> OwnedBoxes:
        boxes = self._server.owned_boxes()
        if boxes is None:
            raise ContractError(f"environment '{self._server.config.name}' makes no boxes for agents")
        return boxes
