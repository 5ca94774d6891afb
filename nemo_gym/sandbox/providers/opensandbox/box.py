"""One box as this process holds it: what `SandboxHandle.raw` is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nemo_gym.contract.errors import SandboxError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.door_statistics import DoorStatistics

if TYPE_CHECKING:
    from opensandbox.sandbox import Sandbox


class ServedDoor(Protocol):
    """A door that this process serves, see `RelayedDoor`."""

    @property
    def door(self) -> Door: ...

    @property
    def statistics(self) -> DoorStatistics: ...

    async def aclose(self, *, quits: bool) -> None: ...


@dataclass
class OpenSandboxBox:
    sandbox_id: str
    directory: str
    """Where in the box this suite's helper program lies."""
    sdk: Sandbox | None = field(default=None, repr=False)
    """The SDK's object, made on ``loop`` and of use only there."""
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    doors: dict[str, ServedDoor] = field(default_factory=dict, repr=False)
    """Those that this process serves, by name."""

    @property
    def tool(self) -> str:
        return f"{self.directory}/boxtool"

    def incoming(self, name: str) -> str:
        """Where a file is put that the helper program reads once and removes."""
        return f"{self.directory}/in/{name}"


def box_of(handle: SandboxHandle) -> OpenSandboxBox:
    if not isinstance(handle.raw, OpenSandboxBox):
        raise SandboxError(
            f"sandbox handle {handle.sandbox_id} of '{handle.provider_name}' is not the opensandbox provider's"
        )
    return handle.raw
