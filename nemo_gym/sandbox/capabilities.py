"""What a provider may be able to do beyond the basics: small protocols, one for each declared capability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from nemo_gym.contract.errors import SandboxCapabilityError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym.sandbox.door_statistics import DoorStatistics


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
