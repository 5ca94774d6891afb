"""A live box as this process holds it, and as callers see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from nemo_gym.broker.registry.records import BoxRecord, BoxState, LeaseRecord
from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.base import SandboxHandle, SandboxStatus
from nemo_gym.sandbox.wire.boxes import LeaseView, SandboxView, TerminationReason

if TYPE_CHECKING:
    from nemo_gym.broker.exec_run import ExecRun

_STATUS = {
    BoxState.CREATING: SandboxStatus.STARTING,
    BoxState.RUNNING: SandboxStatus.RUNNING,
    BoxState.CLOSING: SandboxStatus.STOPPED,
    BoxState.GONE: SandboxStatus.STOPPED,
}


@dataclass(slots=True, eq=False)
class Box:
    """A box that is not gone. The registry has all of it that must survive this process."""

    sandbox_id: str
    creator: str
    """Name of the caller that asked for it."""
    creator_role: Role
    owner: str
    """Whose quota it counts against."""
    idempotency_key: str | None
    body_digest: bytes
    state: BoxState
    created_at: float
    ttl_s: float
    deadline: float
    """When its lease ends, on the monotonic clock: the wall clock may jump."""
    labels: Mapping[str, str]
    epoch: int
    image: str | None
    leases: dict[str, LeaseRecord]
    reason: str | None = None
    handle: SandboxHandle | None = None
    backend_id: str | None = None
    creating: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    adopting: bool = False
    """Known to the registry and, after a restart, not looked for in the backend yet."""
    interrupted: bool = False
    """Its create was cut short and begun again: a backend that does not know the two to be one has its twin."""
    execs: dict[str, ExecRun] = field(default_factory=dict)
    doors: dict[str, bytes] = field(default_factory=dict)
    """Digests of the doors that are open, by name."""
    doors_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease_deadlines: dict[str, float] = field(default_factory=dict)
    """When leases with an end of their own end, by lease, on the monotonic clock."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Given to each exec: a box of the warm pool was made before it was known for what."""

    @classmethod
    def of(cls, record: BoxRecord, leases: list[LeaseRecord]) -> Box:
        """From the registry; what is left of its lease is counted from now, and is never more than its whole length,
        should the clock have jumped back."""
        left_s = min(record.expires_at - time.time(), record.ttl_s)
        box = cls(
            sandbox_id=record.sandbox_id,
            creator=record.creator,
            # Of a release that kept no roles: whose it is nobody knows any more, so it may what anybody may.
            creator_role=record.creator_role or Role.AGENT,
            owner=record.owner,
            idempotency_key=record.idempotency_key,
            body_digest=record.body_digest,
            state=record.state,
            created_at=record.created_at,
            ttl_s=record.ttl_s,
            deadline=time.monotonic() + left_s,
            labels=record.labels,
            epoch=record.epoch,
            image=record.image,
            leases={lease.lease_id: lease for lease in leases},
            reason=record.reason,
            backend_id=record.backend_id,
        )
        for lease in leases:
            box.lease_left_s(lease)
        return box

    @property
    def made_by(self) -> Caller:
        return Caller(self.creator_role, self.creator)

    @property
    def ready(self) -> bool:
        return self.state is BoxState.RUNNING and self.handle is not None

    @property
    def left_s(self) -> float:
        """Seconds until its lease ends."""
        return self.deadline - time.monotonic()

    @property
    def expires_at(self) -> float:
        return time.time() + self.left_s

    @property
    def owner_lease(self) -> LeaseRecord:
        return next(lease for lease in self.leases.values() if lease.scope is LeaseScope.OWNER)

    def lease_left_s(self, lease: LeaseRecord) -> float:
        """Seconds until a lease of this box ends, counted from when this process first saw it: with the box, or by
        itself before."""
        if lease.expires_at is None:
            return self.left_s
        now = time.monotonic()
        own = self.lease_deadlines.setdefault(lease.lease_id, now + lease.expires_at - time.time()) - now
        return min(own, self.left_s)

    def lease_has_ended(self, lease: LeaseRecord) -> bool:
        """Whether a lease ended by itself; the box's own end is told otherwise."""
        return lease.expires_at is not None and self.lease_left_s(lease) <= 0 < self.left_s

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        return wanted.items() <= self.labels.items()

    def view(self, provider: str) -> SandboxView:
        return SandboxView(
            sandbox_id=self.sandbox_id,
            state=_STATUS[self.state],
            ready=self.ready,
            termination_reason=cast("TerminationReason | None", self.reason),
            labels=dict(self.labels),
            provider=provider,
            image=self.image,
            epoch=self.epoch,
            created_at=self.created_at,
            expires_at=self.expires_at,
        )

    def lease_view(self, lease: LeaseRecord, token: str | None = None) -> LeaseView:
        left_s = max(0.0, self.lease_left_s(lease))
        return LeaseView(
            lease_id=lease.lease_id,
            sandbox_id=self.sandbox_id,
            scope=lease.scope,
            epoch=lease.epoch,
            expires_at=time.time() + left_s,
            ttl_s=left_s,
            token=token,
        )


def gone_view(record: BoxRecord, provider: str) -> SandboxView:
    """A box of which only the record is left."""
    return SandboxView(
        sandbox_id=record.sandbox_id,
        state=SandboxStatus.ERROR if record.reason == "create_failed" else SandboxStatus.STOPPED,
        ready=False,
        termination_reason=cast("TerminationReason | None", record.reason),
        labels=dict(record.labels),
        provider=provider,
        image=record.image,
        epoch=record.epoch,
        created_at=record.created_at,
        expires_at=record.expires_at,
    )
