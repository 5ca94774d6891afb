"""One real vLLM for all tests of a run: it takes a minute to come up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from nemo_gym.gateway.engines import EngineConnections, EngineEndpoint, VllmEngine
from nemo_gym_testing.gateway.real import make_real_policy, vllm_server

MAX_MODEL_LEN = 16_384
"""Far below the 131,072 positions that the policy's directory names."""


@dataclass(frozen=True)
class RealVllm:
    url: str
    policy: Path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealVllm]:
    folder = tmp_path_factory.mktemp("vllm")
    policy = make_real_policy(folder / "policy")
    async with vllm_server(policy, folder / "vllm.log", "--enable-scale-out", max_model_len=MAX_MODEL_LEN) as url:
        yield RealVllm(url, policy)


@pytest.fixture
async def engine(vllm: RealVllm) -> AsyncIterator[VllmEngine]:
    http = EngineConnections()
    yield VllmEngine(EngineEndpoint("e0", vllm.url, model="tiny"), http)
    await http.aclose()
