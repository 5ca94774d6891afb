"""One box as this process holds it: what `SandboxHandle.raw` is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import SandboxHandle

if TYPE_CHECKING:
    from opensandbox.sandbox import Sandbox

    from nemo_gym.sandbox.providers.opensandbox.doors import RelayedDoor


@dataclass
class OpenSandboxBox:
    sandbox_id: str
    directory: str
    """Where in the box this suite's helper program lies."""
    sdk: Sandbox | None = field(default=None, repr=False)
    """The SDK's object, made on ``loop`` and of use only there."""
    loop: asyncio.AbstractEventLoop | None = field(default=None, repr=False)
    doors: dict[str, RelayedDoor] = field(default_factory=dict, repr=False)
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
