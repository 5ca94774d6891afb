"""Boxes, their leases and images on the wire."""

from __future__ import annotations

import dataclasses
from typing import Literal, Self

from pydantic import Field

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.contract.session import LeaseScope, MountModel, ResourcesModel, SandboxSpecModel
from nemo_gym.sandbox.base import SandboxInfo, SandboxStatus
from nemo_gym.sandbox.wire.doors import DoorModel
from nemo_gym.sandbox.wire.fields import MAX_DOORS, Identifier, Labels, Text, TtlS, WireModel


class BoxSpec(SandboxSpecModel):
    """The wire form of a `SandboxSpec`. Its lease, labels and idempotency key are the request's."""

    ttl_s: None = None
    """Of the request (`CreateSandbox.ttl_s`), never of the spec."""
    network: NetworkPolicy = NetworkPolicy.NONE
    doors: tuple[DoorModel, ...] = Field((), max_length=MAX_DOORS)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        return cls(
            image=spec.image,
            ready_timeout_s=spec.ready_timeout_s,
            workdir=spec.workdir,
            env=dict(spec.env),
            files=dict(spec.files),
            resources=ResourcesModel(**dataclasses.asdict(spec.resources)),
            entrypoint=None if spec.entrypoint is None else tuple(spec.entrypoint),
            provider_options=dict(spec.provider_options),
            ports=tuple(spec.ports),
            mounts=tuple(MountModel(source=mount.source, target=mount.target) for mount in spec.mounts),
            user=spec.user,
            requires=tuple(spec.requires),
            network=spec.network,
            doors=tuple(DoorModel.of(door) for door in spec.doors),
        )

    def to_spec(self) -> SandboxSpec:
        return super().to_spec().replace(network=self.network, doors=tuple(door.to_door() for door in self.doors))


class CreateSandbox(WireModel):
    """``POST /v1/sandboxes``; the header ``Idempotency-Key`` makes it safe to repeat."""

    spec: BoxSpec
    ttl_s: TtlS | None = None
    """Seconds of the first lease; ``None`` is the broker's default."""
    labels: Labels = Field(default_factory=dict)

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        """The request for a box of ``spec``; its idempotency key goes into the header."""
        return cls(spec=BoxSpec.of(spec), ttl_s=spec.ttl_s, labels=dict(spec.metadata))

    def to_spec(self, idempotency_key: str | None = None) -> SandboxSpec:
        return self.spec.to_spec().replace(
            ttl_s=self.ttl_s, metadata=dict(self.labels), idempotency_key=idempotency_key
        )


TerminationReason = Literal["closed", "reaped", "expired", "exited", "out_of_memory", "create_failed", "lost"]


class SandboxView(WireModel):
    """One box, as whoever may read it sees it."""

    sandbox_id: Identifier
    state: SandboxStatus
    ready: bool
    """Whether it takes execs now."""
    termination_reason: TerminationReason | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    provider: str
    image: str | None = None
    epoch: int = Field(ge=1)
    """Of its lease; a token of an older epoch is fenced."""
    created_at: float
    """Unix seconds, of the broker's clock, as `expires_at`."""
    expires_at: float | None = None

    def to_info(self) -> SandboxInfo:
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            status=self.state,
            labels=dict(self.labels),
            expires_at=self.expires_at,
            created_at=self.created_at,
            termination_reason=self.termination_reason,
        )


class SandboxPage(WireModel):
    """``GET /v1/sandboxes``: boxes that are not gone, oldest first."""

    sandboxes: tuple[SandboxView, ...]
    next_cursor: str | None = None
    """Of the next page; ``None`` on the last."""


class ReapedView(WireModel):
    """``DELETE /v1/sandboxes?label=…``: ids of the boxes that this request destroyed."""

    reaped: tuple[str, ...]


class LeaseView(WireModel):
    """A right to a box. The token is told once, when the lease is made."""

    lease_id: Identifier
    sandbox_id: Identifier
    scope: LeaseScope
    epoch: int = Field(ge=1)
    expires_at: float
    """Unix seconds of the broker's clock; that of the box where the lease has no end of its own."""
    ttl_s: float
    """Seconds left when this was answered, for clients whose clock differs."""
    token: str | None = Field(None, repr=False)


class CreatedSandbox(WireModel):
    """201 (made) or 200 (made before, by the same key)."""

    sandbox: SandboxView
    lease: LeaseView


class RenewLease(WireModel):
    """``PUT …/lease``: let the box live ``ttl_s`` seconds from now, longer or shorter than before."""

    ttl_s: TtlS


class MintLease(WireModel):
    """``POST …/leases``: a lease that may do less."""

    scope: LeaseScope
    ttl_s: TtlS | None = None
    """Seconds until it ends by itself; ``None``: with the box, however often that is renewed."""


class CommitImage(WireModel):
    """``POST …/images``: store the box's files as an image of the backend."""

    image: Text = Field(min_length=1)
    labels: dict[str, str] = Field(default_factory=dict)


class ImageView(WireModel):
    image: str
    labels: dict[str, str] = Field(default_factory=dict)
