"""Rows of the registry as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.session import LeaseScope


class BoxState(StrEnum):
    """What the broker has undertaken for a box; each is written before the backend is asked."""

    CREATING = "creating"
    RUNNING = "running"
    CLOSING = "closing"
    GONE = "gone"


@dataclass(slots=True)
class LeaseRecord:
    """A right to a box. The box's first lease is its owner's."""

    lease_id: str
    sandbox_id: str
    scope: LeaseScope
    epoch: int
    expires_at: float | None = None
    """Unix seconds; ``None``: with the box."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """One row of ``boxes``."""

    sandbox_id: str
    creator: str
    owner: str
    idempotency_key: str | None
    body_digest: bytes
    state: BoxState
    created_at: float
    ttl_s: float
    expires_at: float
    request: bytes = field(repr=False)
    """Sealed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 1
    image: str | None = None
    reason: str | None = None
    detail: str | None = None
    gone_at: float | None = None
    backend_id: str | None = None
    descriptor: bytes | None = field(default=None, repr=False)
    """Sealed."""
    creator_role: Role | None = None


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One row of ``images``: whose an image is that was made of a box of this broker."""

    name: str
    """As the backend has it."""
    owner: str
    owner_role: Role
    created_at: float


@dataclass(frozen=True, slots=True)
class ExecRecord:
    """One row of ``execs``."""

    sandbox_id: str
    exec_id: str
    body_digest: bytes
    submitted_at: float
    end: bytes | None = None
