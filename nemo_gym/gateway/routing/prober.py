"""Asks engines how they are: those out of service, and those that have not been heard from for a while."""

from __future__ import annotations

import asyncio
from typing import Generic

import structlog

from nemo_gym.gateway.engines.types import EngineError, EngineFailedError
from nemo_gym.gateway.routing.health import E, HealthState, Replica
from nemo_gym.gateway.routing.router import Router

PROBE_INTERVAL_S = 5.0
log = structlog.get_logger(__name__)


class Prober(Generic[E]):
    """An engine out of service gets one probe in each interval, and nothing else; one that is silent gets one, too."""

    def __init__(self, router: Router[E], *, interval_s: float = PROBE_INTERVAL_S) -> None:
        self._router = router
        self._interval_s = interval_s
        self._asking: set[Replica[E]] = set()
        self.first_round_done = False
        """Whether every engine there was at the beginning has answered, or failed to."""

    async def run(self) -> None:
        """Probe until cancelled. An engine that takes its time does not delay the others' next probe."""
        async with asyncio.TaskGroup() as group:
            self._router.ask_now = lambda replica: self._ask_now(group, replica)
            group.create_task(self._first_round(self._ask(group)))
            while True:
                await asyncio.sleep(self._interval_s)
                self._ask(group)

    async def round(self) -> None:
        """Probe once whoever is due, and wait for all of them."""
        async with asyncio.TaskGroup() as group:
            self._ask(group)

    async def _first_round(self, probes: list[asyncio.Task[None]]) -> None:
        if probes:
            await asyncio.wait(probes)
        self.first_round_done = True

    def _ask(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        asked = []
        for replica in self._router.replicas:
            silent = not replica.heard_from
            replica.heard_from = False
            if replica.health.rests:
                replica.health.rests -= 1
            elif replica not in self._asking and (silent or replica.health.state is not HealthState.UP):
                asked.append(group.create_task(self._probe(replica)))
        return asked

    def _ask_now(self, group: asyncio.TaskGroup, replica: Replica[E]) -> None:
        if replica not in self._asking:
            self._asking.add(replica)
            replica.heard_from = False  # since then
            group.create_task(self._probe(replica))

    async def _probe(self, replica: Replica[E]) -> None:
        before = replica.health.state
        self._asking.add(replica)
        try:
            await replica.engine.probe()
        except EngineError as error:
            if error.fatal or not replica.heard_from:  # else its answers, which came meanwhile, say more
                self._router.probe_failed(replica, error)
        except Exception as error:
            log.exception("a probe failed by a defect", engine=replica.name)
            found = EngineFailedError(f"probing engine '{replica.name}' failed: {type(error).__name__}")
            self._router.probe_failed(replica, found)
        else:
            self._router.probe_succeeded(replica)
        finally:
            self._asking.discard(replica)
        if replica.health.state is not before:
            log.info(
                "engine changed its state",
                engine=replica.name,
                state=replica.health.state,
                error=replica.health.last_error,
            )
