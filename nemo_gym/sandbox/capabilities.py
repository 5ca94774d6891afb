"""What a provider may be able to do beyond the basics: small protocols, and the data that declares them.

`SandboxCapabilities` is what a provider says of itself on this machine. A spec is checked against it before create, a
composition before any task runs, so that nobody finds out half-way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from nemo_gym.errors import SandboxCapabilityError
from nemo_gym.sandbox.base import (
    Door,
    NetworkPolicy,
    SandboxHandle,
    SandboxProvider,
    SandboxResources,
    SandboxSpec,
    default_limits,
)
from nemo_gym.sandbox.door_statistics import DoorStatistics

_LIMIT_CAPABILITIES: Mapping[str, str] = {
    "cpu": "cpu_limit",
    "memory_mib": "memory_limit",
    "disk_gib": "disk_limit",
    "pids": "pids_limit",
}


@dataclass(frozen=True)
class SandboxCapabilities:
    """What a provider enforces or offers on this machine. ``reasons`` explains each that is missing."""

    network_policies: frozenset[NetworkPolicy] = frozenset()
    loopback_door: bool = False
    snapshot: bool = False
    endpoint: bool = False
    connect: bool = False
    nested_containers: bool = False
    gpu: bool = False
    memory_limit: bool = False
    cpu_limit: bool = False
    pids_limit: bool = False
    disk_limit: bool = False
    user_limits: bool = False
    """What the kernel counts per user and one box could use up (inotify instances and watches, queued signals, message
    queues) is a box's own, or it has a share of it: enough is left to the host and to every other box."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Capability name → why it is missing here and what would provide it."""
    default_limits: SandboxResources = field(default_factory=SandboxResources)
    """Limits of boxes whose spec leaves them open; see `with_default_limits`."""

    def with_default_limits(self, configured: SandboxResources, *, host_memory_mib: int | None) -> SandboxCapabilities:
        """These abilities, with the limits that are ``configured``, and the suite's own where nothing is and the
        provider can enforce them. What is configured and cannot be enforced stays, and is refused by `check`."""
        suite = default_limits(host_memory_mib)
        kept = {name: getattr(suite, name) for name, able in _LIMIT_CAPABILITIES.items() if getattr(self, able)}
        return replace(self, default_limits=configured.filled(SandboxResources(**kept)))

    def limits(self, wanted: SandboxResources) -> SandboxResources:
        """The limits of a box whose spec has ``wanted``."""
        return wanted.filled(self.default_limits)

    def missing(self, spec: SandboxSpec) -> list[str]:
        """One sentence for each thing the spec asks for and the provider cannot give; empty when all is well."""
        wanted: dict[str, bool] = {
            "loopback_door": bool(spec.doors),
            **{able: getattr(spec.resources, name) is not None for name, able in _LIMIT_CAPABILITIES.items()},
            "gpu": bool(spec.resources.gpu),
            "endpoint": bool(spec.ports),
        }
        for name in spec.requires:
            wanted[name] = True
        lacking = []
        for name, is_wanted in wanted.items():
            if is_wanted and not getattr(self, name, False):
                lacking.append(f"{name}: {self.reasons.get(name, 'not supported by this provider')}")
        if spec.network not in self.network_policies:
            why = self.reasons.get(f"network_{spec.network}", "not supported by this provider")
            lacking.append(f"network={spec.network}: {why}")
        return lacking

    def check(self, spec: SandboxSpec, provider_name: str) -> None:
        """Raise `SandboxCapabilityError` naming everything that is missing, at once."""
        lacking = self.missing(spec)
        if lacking:
            raise SandboxCapabilityError(
                f"sandbox provider '{provider_name}' cannot serve this spec: " + "; ".join(lacking),
                provider=provider_name,
                missing=lacking,
            )


@runtime_checkable
class SupportsLoopbackDoor(Protocol):
    """Doors can also be opened on a running box. Doors of the spec are open when ``create`` returns."""

    async def open_door(self, handle: SandboxHandle, door: Door) -> None: ...

    async def close_door(self, handle: SandboxHandle, name: str) -> None: ...


@runtime_checkable
class SupportsDoorStatistics(Protocol):
    """The provider serves its boxes' doors itself, and counts what went through them."""

    def door_statistics(self, handle: SandboxHandle) -> Mapping[str, DoorStatistics]:
        """By door name; the objects go on counting until the door closes."""
        ...


@runtime_checkable
class SupportsSnapshot(Protocol):
    """A box's files can become an image."""

    async def commit(self, handle: SandboxHandle, image: str, labels: Mapping[str, str]) -> None:
        """Store the box's files as ``image``, atomically: a name either has all of it or does not exist."""
        ...

    async def image_labels(self, image: str) -> Mapping[str, str] | None:
        """Labels the image was committed with; ``None`` when there is no such image."""
        ...

    async def remove_image(self, image: str) -> None:
        """Forget an image; idempotent."""
        ...


@runtime_checkable
class SupportsEndpoint(Protocol):
    async def endpoint(self, handle: SandboxHandle, port: int) -> str:
        """A URL on this host that reaches ``port`` of the box."""
        ...


@runtime_checkable
class Connectable(Protocol):
    """A box can be used from another process, by plain data."""

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str) -> dict[str, Any]: ...

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle: ...


@runtime_checkable
class SupportsFencing(Protocol):
    """Boxes that were lent can be taken back while they live."""

    async def fence(self, handle: SandboxHandle) -> None:
        """Make every descriptor that ``serialize_handle`` made of this handle useless, also to who is connected."""
        ...


CAPABILITY_PROTOCOLS: Mapping[str, type] = {
    "loopback_door": SupportsLoopbackDoor,
    "snapshot": SupportsSnapshot,
    "endpoint": SupportsEndpoint,
    "connect": Connectable,
}
"""Declared capability → the protocol of a provider that declares it; the conformance suite checks both ways."""


def require(provider: SandboxProvider, protocol: type, *, why: str) -> None:
    """Raise `SandboxCapabilityError` unless the provider implements ``protocol``; ``why`` completes the sentence."""
    if not isinstance(provider, protocol):
        raise SandboxCapabilityError(
            f"sandbox provider '{provider.name}' does not implement {protocol.__name__}, which is needed {why}",
            provider=provider.name,
        )
