"""A gateway over a real socket, before engines that answer as told and remember what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientResponse

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.server_utils import close_global_aiohttp_client, request
from nemo_gym_testing.gateway import FakeVllmEngine
from nemo_gym_testing.gateway.sampler import Sampled
from responses_api_models.gateway.app import Gateway
from tests.gateway.tokens.policies import policy, write
from tests.servers.stack import Stack, rollout, running_stack

FAMILY = "chatml_think"
TOOL = {"type": "function", "function": {"name": "shell", "description": "Run.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)


class Teller:
    """Samples the next of the texts it was told, else one that differs from call to call."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.policy = policy(FAMILY)

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int, call: int) -> Sampled:
        text = self.texts.pop(0) if self.texts else f"answer {call}"
        assert self.policy.turn_end is not None
        ids = [*self.policy.encode(text), self.policy.stops[self.policy.turn_end]]
        kept = ids[:max_tokens]
        return Sampled(tuple(kept), tuple(-call - at / 1024 for at in range(len(kept))), stopped=len(kept) == len(ids))


@dataclass
class Opened:
    """A session as its opener knows it."""

    stack: Stack
    facts: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "hello"}])

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> ClientResponse:
        """As a harness does: with the session's token, and no credential of the stack."""
        return await self.post_raw(path, orjson.dumps(body), **headers)

    async def post_raw(self, path: str, body: bytes, **headers: str) -> ClientResponse:
        sent = {"Authorization": f"Bearer {self.facts['inference_token']}", **headers}
        return await request("POST", self.facts["base_url"] + path, data=body, headers=sent)

    async def chat(self, **body: Any) -> dict[str, Any]:
        reply = await self.post("/chat/completions", {"messages": self.messages, "model": "any", **body})
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer

    async def say(self, text: str, **body: Any) -> dict[str, Any]:
        """One more exchange in the conversation."""
        answer: dict[str, Any] = (await self.chat(**body))["choices"][0]["message"]
        self.messages += [answer, {"role": "user", "content": text}]
        return answer

    async def control(self, action: str, body: dict[str, Any] | None = None) -> ClientResponse:
        headers = {CONTROL_TOKEN_HEADER: self.facts["control_token"]}
        path = f"/sessions/{self.facts['session_id']}/{action}"
        return await self.stack.client().post("gateway", path, json=body or {}, headers=headers)

    async def finalize(self, **body: Any) -> dict[str, Any]:
        reply = await self.control("finalize", body)
        assert reply.status == 200, await reply.text()
        summary: dict[str, Any] = await reply.json()
        return summary

    async def state(self) -> dict[str, Any]:
        headers = {CONTROL_TOKEN_HEADER: self.facts["control_token"]}
        reply = await self.stack.client().get("gateway", f"/sessions/{self.facts['session_id']}", headers=headers)
        state: dict[str, Any] = await reply.json()
        return state


class GatewayStack:
    """One gateway and its engine."""

    def __init__(self, stack: Stack, engine: FakeVllmEngine, teller: Teller, folder: Path) -> None:
        self.stack = stack
        self.engine = engine
        self.teller = teller
        self.folder = folder

    async def start(self, cls: type[Gateway] = Gateway, **block: Any) -> None:
        """Servers start in a thread and block until they are up: the engine must go on meanwhile."""
        given = {
            "model": "policy-7b",
            "engines": [{"type": "vllm", "base_url": self.engine.url}],
            "policy": {"path": str(self.folder / "policy"), "max_context_tokens": 100_000},
            "journal_dir": str(self.folder / "journal"),
            **block,
        }
        await asyncio.to_thread(lambda: self.stack.add("gateway", cls, Role.MODEL, **given))

    async def restart(self, cls: type[Gateway] = Gateway, **block: Any) -> None:
        await asyncio.to_thread(self.stack.stop, "gateway")
        await self.start(cls, **block)

    async def open(
        self,
        body: dict[str, Any] | None = None,
        *,
        role: Role = Role.PIPELINE,
        name: str = "collector",
        **identity: Any,
    ) -> Opened:
        asked = {"rollout": rollout(**identity).model_dump(), **(body or {})}
        reply = await self.stack.client(role, name).post("gateway", "/sessions", json=asked)
        assert reply.status == 200, await reply.text()
        return Opened(self.stack, await reply.json())


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayStack]:
    write(tmp_path / "policy", FAMILY)
    teller = Teller()
    async with FakeVllmEngine(teller) as engine:
        with running_stack() as stack:
            served = GatewayStack(stack, engine, teller, tmp_path)
            await served.start()
            yield served
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)
