"""Harnesses that keep retrying whatever happens to the gateway, and record every complete response."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from campaigns.faults.gateway.harness import PATHS, Conversation, Received
from campaigns.faults.gateway.processes import GatewayProcess
from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER
from nemo_gym.gateway.dialects import Dialect

RETRY_DELAY_S = 0.05
GIVE_UP_AFTER_S = 180.0


@dataclass
class Client:
    """One session's harness. ``counts_retries``: requests carry a retry count, as those of the official SDKs do."""

    number: int
    gateway: GatewayProcess
    http: aiohttp.ClientSession
    dialect: Dialect
    stream: bool
    counts_retries: bool
    max_tokens: int = 16
    opened: dict[str, Any] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    refusals: list[Any] = field(default_factory=list)
    asking: bool = False
    hits: int = 0
    """Kills of the gateway while this harness waited for a response."""
    begun_before_hit: frozenset[str] = frozenset()
    """Ids of the calls that the engine had begun at the last hit."""
    given_again: int = 0
    """Responses whose sampling began before a kill and that were delivered after it."""

    @property
    def tag(self) -> str:
        return f"session-{self.number:04d}"

    async def open(self) -> None:
        rollout = {"rollout_id": self.tag, "task_id": "t", "group_id": "g", "attempt": 1, "run_id": "faults"}
        self.opened = await self._control("/sessions", {"rollout": rollout})

    async def run(self, turns: int, pause: Callable[[], float] = lambda: 0.0) -> None:
        conversation = Conversation(self.dialect)
        for turn in range(turns):
            conversation.user(f"{self.tag} turn {turn}")
            answer = await self.ask(conversation)
            conversation.history += answer.history
            await asyncio.sleep(pause())

    async def ask(self, conversation: Conversation) -> Received:
        """Send a request until it has a complete response."""
        body = conversation.body(stream=self.stream, max_tokens=self.max_tokens)
        self.asking = True
        try:
            async with asyncio.timeout(GIVE_UP_AFTER_S):
                tries = 0
                while (received := await self._try(conversation, body, tries)) is None:
                    tries += 1
                    await asyncio.sleep(RETRY_DELAY_S)
        finally:
            self.asking = False
        if received.call_id in self.begun_before_hit:
            self.given_again += 1
        self.begun_before_hit = frozenset()
        self.received.append(received)
        return received

    async def _try(self, conversation: Conversation, body: dict[str, Any], tries: int) -> Received | None:
        headers = {"Authorization": f"Bearer {self.opened['inference_token']}"}
        if self.counts_retries:
            headers["x-stainless-retry-count"] = str(tries)
        try:
            url = self.opened["base_url"] + PATHS[self.dialect]
            async with self.http.post(url, json=body, headers=headers) as reply:
                data = b"".join([piece async for piece in reply.content.iter_any()])
        except (aiohttp.ClientError, ConnectionError) as error:
            self.statuses[type(error).__name__] += 1
            return None
        if reply.status != 200:
            self.statuses[str(reply.status)] += 1
            self.refusals.append((reply.status, dict(reply.headers), data))
            return None
        received = conversation.received(data, stream=self.stream)
        self.statuses["200" if received else "cut off"] += 1
        return received

    async def finalize(self) -> dict[str, Any]:
        return await self._control(f"/sessions/{self.opened['session_id']}/finalize", {"reward": 1.0})

    async def state(self) -> dict[str, Any]:
        return await self._control(f"/sessions/{self.opened['session_id']}", None)

    async def _control(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Call a control route as the pipeline does: repeat the idempotent call until it succeeds."""
        headers = self.gateway.headers()
        if self.opened:
            headers[CONTROL_TOKEN_HEADER] = self.opened["control_token"]
        async with asyncio.timeout(GIVE_UP_AFTER_S):
            while True:
                try:
                    method = "GET" if body is None else "POST"
                    url = self.gateway.url + path
                    async with self.http.request(method, url, json=body, headers=headers) as reply:
                        if reply.status == 200:
                            answer: dict[str, Any] = await reply.json()
                            return answer
                        error_text = await reply.text()
                    if reply.status < 500:
                        raise AssertionError(f"{path} was answered with {reply.status}: {error_text}")
                except (aiohttp.ClientError, ConnectionError):
                    pass
                await asyncio.sleep(RETRY_DELAY_S)


def clients(count: int, gateway: GatewayProcess, http: aiohttp.ClientSession, draw: random.Random) -> list[Client]:
    """Return ``count`` harnesses of all dialects, streaming and not, with and without retry counts."""
    kinds = [(d, s, c) for d in Dialect for s in (False, True) for c in (False, True)]
    draw.shuffle(kinds)
    return [Client(number, gateway, http, *kinds[number % len(kinds)]) for number in range(count)]


def connector() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0)
