"""What a broker can do: its backend's abilities on its host, and its own limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

from pydantic import Field

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxResources
from nemo_gym.contract.session import ResourcesModel
from nemo_gym.sandbox.base import SandboxCapabilities
from nemo_gym.sandbox.wire.fields import MAX_STDIN_BYTES, MAX_TTL_S, WireModel

_NOT_FLAGS = ("network_policies", "reasons", "default_limits")
_ABILITIES = tuple(field.name for field in dataclasses.fields(SandboxCapabilities) if field.name not in _NOT_FLAGS)


class BrokerLimits(WireModel):
    """What this broker bounds, for clients that want to know before they are refused."""

    max_ttl_s: float = MAX_TTL_S
    default_ttl_s: float
    max_body_bytes: int
    max_archive_bytes: int
    max_output_bytes: int
    max_stdin_bytes: int = MAX_STDIN_BYTES
    max_boxes: int | None = None


class CapabilitiesView(WireModel):
    """``GET /v1/capabilities``: the backend's abilities on the broker's host, and the broker's limits."""

    provider: str
    network_policies: tuple[NetworkPolicy, ...]
    abilities: dict[str, bool]
    """Every other field of `SandboxCapabilities` by name; a reader ignores those it does not know."""
    reasons: dict[str, str] = Field(default_factory=dict)
    default_limits: ResourcesModel = Field(default_factory=ResourcesModel)
    """Of the backend's boxes whose spec leaves them open."""
    door_statistics: bool = False
    limits: BrokerLimits

    @classmethod
    def of(
        cls, capabilities: SandboxCapabilities, *, provider: str, door_statistics: bool, limits: BrokerLimits
    ) -> Self:
        return cls(
            provider=provider,
            network_policies=tuple(sorted(capabilities.network_policies)),
            abilities={name: bool(getattr(capabilities, name)) for name in _ABILITIES},
            reasons=dict(capabilities.reasons),
            default_limits=ResourcesModel(**dataclasses.asdict(capabilities.default_limits)),
            door_statistics=door_statistics,
            limits=limits,
        )

    def to_capabilities(self, *, carried: Mapping[str, str | None]) -> SandboxCapabilities:
        """What the backend can and the wire carries.

        Args:
            carried: ability → ``None``, where a client of the broker has it whatever the backend does, or why it can
                never have it.
        """
        abilities = {name: self.abilities.get(name, False) for name in _ABILITIES}
        reasons = dict(self.reasons)
        for name, why_not in carried.items():
            if name in abilities:
                abilities[name] = why_not is None
            reasons.pop(name, None)
            if why_not is not None:
                reasons[name] = why_not
        return SandboxCapabilities(
            network_policies=frozenset(self.network_policies),
            reasons=reasons,
            default_limits=SandboxResources(**self.default_limits.model_dump()),
            **abilities,
        )
