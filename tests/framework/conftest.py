"""Gateways on real sockets before a fake engine with a loop of its own, and a framework over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.framework import GatewayPool, OpenAICompatibleAgentFramework
from nemo_gym.framework.samples import TrajectoryRow
from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway import FakeVllmEngine
from responses_api_models.gateway.app import Gateway
from responses_api_models.gateway.tests.conftest import FAMILY, Teller
from tests.framework import runners
from tests.gateway.tokens.policies import write
from tests.servers.stack import Stack, running_stack


class MemorySink:
    """Remembers what was written, and in which order."""

    def __init__(self) -> None:
        self.rows: dict[str, TrajectoryRow] = {}
        self.partitions: dict[str, str] = {}
        self.tags: dict[str, list[dict[str, Any]]] = {}
        self.tagged: set[tuple[str, str]] = set()
        self.refuse: Callable[[Sequence[TrajectoryRow]], bool] = lambda rows: False

    async def put(self, partition: str, rows: Sequence[TrajectoryRow]) -> None:
        if self.refuse(rows):
            raise OSError("the storage is full")
        for row in rows:
            self.rows[row.key] = row
            self.partitions[row.key] = partition

    async def tag(self, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        self.tags.setdefault(uid, []).append(dict(tag))
        self.tagged.add((partition, uid))

    def status(self, uid: str) -> list[str]:
        return [tag["status"] for tag in self.tags[uid]]


class EngineThread:
    """A fake engine that answers although the test's own loop is blocked."""

    def __init__(self, engine: FakeVllmEngine) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(engine.start())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def stop(self) -> None:
        self.call(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


class Stage:
    """Gateways, their engine, a sink, and frameworks over them."""

    def __init__(self, stack: Stack, engine: FakeVllmEngine, folder: Path) -> None:
        self.stack = stack
        self.engine = engine
        self.folder = folder
        self.sink = MemorySink()
        self.names: list[str] = []
        self.spread: list[dict[str, int]] = []
        self._pools: list[GatewayPool] = []

    async def start(self, count: int = 1, **block: Any) -> None:
        for _ in range(count):
            name = f"gateway_{len(self.names) + 1}"
            given = {
                "model": "policy-7b",
                "engines": [{"type": "vllm", "base_url": self.engine.url}],
                "policy": {"path": str(self.folder / "policy"), "max_context_tokens": 100_000},
                "journal_dir": str(self.folder / name),
                "path_tokens": True,
                **block,
            }
            await asyncio.to_thread(self.stack.add, name, Gateway, Role.MODEL, **given)
            self.names.append(name)

    def pool(self, **options: Any) -> GatewayPool:
        made = GatewayPool(
            self.stack.client(), self.names, observe=lambda counts: self.spread.append(dict(counts)), **options
        )
        self._pools.append(made)
        return made

    def framework(
        self,
        agent_runners: Mapping[str, Any] | None = None,
        *,
        rollout: Mapping[str, Any] | None = None,
        pool: GatewayPool | None = None,
        parts: Mapping[str, Any] | None = None,
        **block: Any,
    ) -> OpenAICompatibleAgentFramework:
        block = {"agent_runners": agent_runners or {"calls": {"runner_fqn": "tests.framework.runners.calls"}}, **block}
        return OpenAICompatibleAgentFramework.from_config(
            config=trainer_config(block, **(rollout or {})),
            gateways=pool or self.pool(),
            sink=self.sink,
            **(parts or {}),
        )

    def live_sessions(self) -> list[str]:
        """Sessions that are still open at any gateway."""
        found = []
        for server in self.stack.servers.values():
            if isinstance(server, Gateway):
                found += [live.session_id for live in server._durable._table if live.closed_at is None]
        return found

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


def trainer_config(block: Mapping[str, Any], **rollout: Any) -> dict[str, Any]:
    """A trainer's configuration, as far as the framework reads it."""
    keys = {"n": 2, "temperature": 0.9, "top_p": 0.8, "top_k": 7, "val_kwargs": {"n": 1, "temperature": 0.1}}
    return {"actor_rollout_ref": {"rollout": {**keys, **rollout, "custom": {"agent_framework": dict(block)}}}}


def prompts(count: int = 1, **columns: Any) -> dict[str, Any]:
    """A batch of plain columns."""
    return {
        "uid": [f"u{number}" for number in range(count)],
        "raw_prompt": [[{"role": "user", "content": f"prompt {number}"}] for number in range(count)],
        "global_steps": 3,
        **columns,
    }


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    write(tmp_path / "policy", FAMILY)
    engine = FakeVllmEngine(Teller())
    thread = EngineThread(engine)
    runners.reset()
    try:
        with running_stack() as stack:
            made = Stage(stack, engine, tmp_path)
            yield made
            await made.aclose()
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)
    finally:
        thread.stop()
