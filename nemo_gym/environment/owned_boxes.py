"""Boxes that an environment makes for its attempts and lends to their agents.

The environment acquires, renews, harvests and destroys a box; the agent server operates it, by a reference whose lease
allows nothing else. The environment renews a box only when the pipeline sends a `/heartbeat`, so the boxes of a killed
pipeline expire. Before a harvest the borrowers' access is revoked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.contract.errors import ContractError, NemoGymError, SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import SandboxRole, SandboxSpec
from nemo_gym.contract.session import (
    Artifact,
    BoxNeeds,
    HarvestItem,
    LeaseScope,
    RolloutIdentity,
    SandboxClause,
    SandboxRef,
    SessionDescriptor,
    Topology,
)
from nemo_gym.environment.attempts import AttemptKey
from nemo_gym.sandbox.base import (
    Connectable,
    SandboxHandle,
    SandboxProvider,
    SupportsFencing,
    box_labels,
    overrun_of,
    require,
)
from nemo_gym.sandbox.egress import HarnessNeeds, world_spec
from nemo_gym.sandbox.facade import keep_renewed
from nemo_gym.sandbox.harvest import harvest_all

log = structlog.get_logger(__name__)

DEFAULT_LEASE_S = 120.0
"""How long a box lives after the pipeline's last heartbeat, also if this server was killed."""
HARVEST_TIMEOUT_S = 600.0
LENT_TOPOLOGIES = frozenset({Topology.ENV_SANDBOXED, Topology.AGENT_IN_ENV})
_BEATS_PER_LEASE = 4
MAX_KEPT_BYTES = 256 << 20
"""The limit for artifacts of unclosed attempts. Beyond it the oldest are dropped: a live pipeline already has them."""
_FORGOTTEN_AFTER_LEASES = 10
"""Leases without a heartbeat after which a box's record is dropped; the box itself expired long before."""


@dataclass(slots=True)
class _Box:
    handle: SandboxHandle
    spec: SandboxSpec
    harvest: tuple[HarvestItem, ...]
    artifacts: list[Artifact] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    seen_at: float = field(default_factory=time.monotonic)
    """The monotonic time of the pipeline's last heartbeat, or of the harvest."""

    @property
    def kept_bytes(self) -> int:
        return sum(len(artifact.data) for artifact in self.artifacts or ())


class OwnedBoxes:
    """The working boxes of one environment.

    Args:
        provider: a provider whose boxes can be lent: `Connectable` and `SupportsFencing`. Closed with this object.
        lease_s: how long a box lives without a heartbeat.
    """

    def __init__(self, provider: SandboxProvider, *, lease_s: float = DEFAULT_LEASE_S) -> None:
        require(provider, Connectable, why="to lend boxes to agents")
        require(provider, SupportsFencing, why="to take lent boxes back")
        self._provider, self._lease_s = provider, lease_s
        self._boxes: dict[AttemptKey, _Box] = {}

    @property
    def heartbeat_s(self) -> float:
        """The interval in seconds at which a pipeline is asked to send heartbeats."""
        return self._lease_s / _BEATS_PER_LEASE

    def owns(self, rollout: RolloutIdentity) -> bool:
        """Whether this process has a box of the attempt, harvested or not."""
        return AttemptKey.of(rollout) in self._boxes

    async def lend(self, descriptor: SessionDescriptor, needs: BoxNeeds) -> SessionDescriptor:
        """Create the box that the descriptor specifies, with what the agent needs in it, and return the descriptor
        with a reference to the box instead of the spec. Unchanged if the topology leaves the box to the agent.

        Raises:
            ConfigError: the environment's and the agent's requirements for the box conflict.
            SandboxError: the box could not be created.
        """
        clause = descriptor.sandbox
        if clause is None or clause.spec is None or descriptor.placement.topology not in LENT_TOPOLOGIES:
            return descriptor
        assert isinstance(self._provider, Connectable)
        rollout = descriptor.rollout
        spec = world_spec(clause.spec.to_spec(), descriptor, HarnessNeeds.of(needs)).replace(
            ttl_s=self._lease_s, metadata=_labels(rollout)
        )
        handle = await self._provider.create(spec)
        try:
            ref = SandboxRef.model_validate(
                await self._provider.serialize_handle(handle, scope=LeaseScope.OPERATE.value)
            ).model_copy(update={"workdir": spec.workdir})
            lent = descriptor.model_copy(update={"sandbox": SandboxClause(ref=ref)})
        except BaseException:
            await finish(self._provider.close(handle))
            raise
        self._boxes[AttemptKey.of(rollout)] = _Box(handle, spec, descriptor.harvest)
        self._forget_old()
        return lent

    async def renew(self, rollout: RolloutIdentity) -> None:
        """Renew the box's lease after a heartbeat. Raises `SandboxLostError` if the box is gone, and `ContractError`
        if this process has none for the attempt."""
        box = self._box(rollout)
        if box.artifacts is None:
            await self._provider.renew(box.handle, self._lease_s)
        box.seen_at = time.monotonic()

    async def harvest(self, rollout: RolloutIdentity) -> list[Artifact]:
        """Revoke the borrowers' access, collect the descriptor's artifacts, and destroy the box. A repeated call
        returns the same artifacts. They are empty, with the reason, if the box was ended for exceeding a limit.

        Raises:
            SandboxError: the box was lost, or could not be read in time.
        """
        box = self._box(rollout)
        assert isinstance(self._provider, SupportsFencing)
        async with box.lock:
            if box.artifacts is None:
                try:
                    await self._provider.fence(box.handle)
                    async with (
                        asyncio.timeout(HARVEST_TIMEOUT_S),
                        keep_renewed(self._provider, box.handle, self._lease_s),
                    ):
                        box.artifacts = await harvest_all(
                            self._provider, box.handle, box.spec, box.harvest, box.spec.metadata
                        )
                except SandboxLostError:
                    # The policy can do this whenever it likes, so it is graded without its work.
                    if (overrun := await overrun_of(self._provider, box.handle)) is None:
                        raise
                    box.artifacts = [Artifact.of(item.name, item.kind, b"", error=overrun) for item in box.harvest]
                except TimeoutError:
                    raise SandboxError(f"harvest did not end within {HARVEST_TIMEOUT_S:g} s", retryable=True) from None
                await finish(self._destroy(box))  # with its artifacts taken, nobody else would
                key = AttemptKey.of(rollout)
                if self._boxes.get(key) is box:
                    self._boxes[key] = self._boxes.pop(key)  # in the order in which they were harvested
                    box.seen_at = time.monotonic()
                self._forget_old()
            return box.artifacts

    async def release(self, rollout: RolloutIdentity) -> None:
        """Destroy the attempt's box, even one that an earlier process of this server created."""
        box = self._boxes.pop(AttemptKey.of(rollout), None)
        if box is None:
            await self._provider.reap(_labels(rollout))
        elif box.artifacts is None:
            await self._destroy(box)

    async def aclose(self) -> None:
        """Destroy all boxes, at shutdown, and close the provider."""
        boxes, self._boxes = [*self._boxes.values()], {}
        await asyncio.gather(*(self._destroy(box) for box in boxes if box.artifacts is None))
        await self._provider.aclose()

    def _forget_old(self) -> None:
        """Drop old boxes and artifacts. Many attempts are never closed, because their pipeline was killed."""
        oldest_kept = time.monotonic() - _FORGOTTEN_AFTER_LEASES * self._lease_s
        for key, box in [*self._boxes.items()]:
            if box.seen_at < oldest_kept and not box.lock.locked():
                del self._boxes[key]
        harvested = [key for key, box in self._boxes.items() if box.artifacts is not None]
        kept_bytes = sum(self._boxes[key].kept_bytes for key in harvested)
        for key in harvested[:-1]:
            if kept_bytes <= MAX_KEPT_BYTES:
                break
            kept_bytes -= self._boxes.pop(key).kept_bytes

    def _box(self, rollout: RolloutIdentity) -> _Box:
        box = self._boxes.get(AttemptKey.of(rollout))
        if box is None:
            raise ContractError(f"{rollout} has no box of this environment", rollout_id=rollout.rollout_id)
        return box

    async def _destroy(self, box: _Box) -> None:
        try:
            await self._provider.close(box.handle)
        except NemoGymError as error:  # its lease ends it
            log.warning("owned_box_not_closed", sandbox_id=box.handle.sandbox_id, error=str(error))


def _labels(rollout: RolloutIdentity) -> dict[str, str]:
    return dict(
        box_labels(run=rollout.run_id, rollout=rollout.rollout_id, attempt=rollout.attempt, role=SandboxRole.WORK)
    )
