"""Real boxes of the local provider, and an MCP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.server_utils import close_global_aiohttp_client
from tests.harness import stage as staging
from tests.servers.stack import Stack


@dataclass
class Weather:
    url: str
    seen: list[str]


@pytest.fixture(scope="module")
def local_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("boxes")
    return {"state_dir": str(directory / "state"), "image_dir": str(directory / "images")}


@pytest.fixture
async def local(local_settings: dict[str, Any]) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(**local_settings)
    if await provider.image_labels(staging.IMAGE) is None:
        await staging.commit_image(provider)
    yield provider
    await provider.aclose()
    await close_global_aiohttp_client()


@pytest.fixture
def stack(tmp_path: Path, local: LocalProvider, local_settings: dict[str, Any]) -> Iterator[Stack]:
    with staging.stage(tmp_path, {"local": local_settings}) as running:
        yield running


@pytest.fixture
async def weather() -> AsyncIterator[Weather]:
    seen: list[str] = []
    async for url in staging.weather_server(seen):
        yield Weather(url, seen)
