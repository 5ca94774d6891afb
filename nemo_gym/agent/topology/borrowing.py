"""A box that its environment lends: entered by reference, with the attempt's doors, and left as it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from nemo_gym.agent.topology.teardown import CLOSE_TIMEOUT_S, shielded
from nemo_gym.contract.errors import FencedError, SandboxLostError
from nemo_gym.contract.sandbox import Door
from nemo_gym.contract.session import SandboxRef
from nemo_gym.sandbox.base import Connectable, SandboxHandle, SandboxProvider, SupportsLoopbackDoor, require
from nemo_gym.sandbox.registry import create_provider

BROKER_CLIENT = "remote"
"""Name of the provider whose references these are."""


@contextlib.asynccontextmanager
async def borrowed(
    provider: SandboxProvider, ref: SandboxRef, doors: Sequence[Door]
) -> AsyncIterator[tuple[SandboxProvider, SandboxHandle]]:
    """The lent box with ``doors`` open, and the provider to use it by: ``provider`` where that is a broker's client,
    else one made for the occasion.

    Raises:
        SandboxLostError: the box is gone, or the reference is no longer good.
        SandboxError: a door cannot be opened.
    """
    lender = provider if provider.name == BROKER_CLIENT else create_provider(BROKER_CLIENT)
    try:
        require(lender, Connectable, why="to use a box that the environment lends")
        assert isinstance(lender, Connectable)
        handle = await lender.connect(ref.model_dump())
        try:
            if doors:
                require(lender, SupportsLoopbackDoor, why="to open the model's door in a lent box")
                assert isinstance(lender, SupportsLoopbackDoor)
                await asyncio.gather(*(lender.open_door(handle, door) for door in doors))
            yield lender, handle
        finally:
            await shielded(_leave(lender, handle, doors), CLOSE_TIMEOUT_S, what="leave a lent box")
    finally:
        if lender is not provider:
            await shielded(lender.aclose(), CLOSE_TIMEOUT_S, what="close a broker's client")


async def _leave(lender: SandboxProvider, handle: SandboxHandle, doors: Sequence[Door]) -> None:
    try:
        # Where the environment was faster and took the box back, its doors are closed already.
        with contextlib.suppress(SandboxLostError, FencedError):
            for door in doors:
                assert isinstance(lender, SupportsLoopbackDoor)
                await lender.close_door(handle, door.name)
    finally:
        await lender.close(handle)
