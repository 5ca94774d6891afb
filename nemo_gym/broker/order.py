"""A create as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gym.contract.credentials import Role
from nemo_gym.sandbox.wire.boxes import CreateSandbox


@dataclass(frozen=True, slots=True)
class CreateOrder:
    """Who asks for a box, under which key, and for what."""

    creator: str
    creator_role: Role
    owner: str
    key: str
    digest: bytes
    ttl_s: float
    body: CreateSandbox
