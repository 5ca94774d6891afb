"""One real vLLM for all tests of a run: it takes a minute to come up; and what tests ask of any engine."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
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


async def count_of(url: str, *metrics: str) -> float:
    """The sum of an engine's own ``metrics``, over all their labels."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as reply:
        names = "|".join(map(re.escape, metrics))
        told = re.findall(rf"^(?:{names})(?:\{{[^}}]*\}})? (\S+)", await reply.text(), re.MULTILINE)
    assert told
    return sum(map(float, told))


def spelled(stream: bytes) -> tuple[str, dict[str, Any]]:
    """The text of a streamed chat completion, and its last event."""
    *events, done = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    assert done == b"[DONE]"
    read = [orjson.loads(event) for event in events]
    deltas = [choice["delta"] for event in read for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), read[-1]
