"""What the docker tests share: a provider whose boxes are gone after each test."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider


@dataclass
class Boxes:
    """Creates boxes that carry this test's own label."""

    provider: DockerProvider
    labels: dict[str, str]

    def spec(self, **fields: Any) -> SandboxSpec:
        return SandboxSpec(**{"ttl_s": 300, "metadata": self.labels, **fields})

    async def create(self, **fields: Any) -> SandboxHandle:
        return await self.provider.create(self.spec(**fields))

    async def ids(self) -> list[str]:
        return [info.sandbox_id for info in await self.provider.list(self.labels)]


@pytest_asyncio.fixture
async def boxes(docker_engine: str) -> AsyncIterator[Boxes]:
    provider = DockerProvider(base_url=docker_engine)
    made = Boxes(provider, {"nemo_gym.run": f"test-{uuid.uuid4().hex}"})
    try:
        yield made
    finally:
        await provider.reap(made.labels)
        await provider.aclose()


@pytest_asyncio.fixture
async def box(boxes: Boxes) -> AsyncIterator[SandboxHandle]:
    yield await boxes.create()


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = 20) -> None:
    """Wait until ``condition`` holds; fail when it does not for ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.05)
