from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from nemo_gym.gateway.engines import EngineConnections


@pytest.fixture
async def http() -> AsyncIterator[EngineConnections]:
    async with EngineConnections() as session:
        yield session


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], object]:
    """Waits until a condition holds; fails after a deadline that only a hang reaches."""

    async def wait(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, "the condition never came true"
            await asyncio.sleep(0.005)

    return wait
