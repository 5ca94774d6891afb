"""A gateway that is killed after its answer was handed over, and before its caller had it: the next gives it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from campaigns.faults.gateway.bodies import ROLLOUT
from campaigns.faults.gateway.processes import GatewayProcess
from campaigns.faults.gateway.wire import Call, Leave
from nemo_gym_testing.gateway import FakeOpenAIEngine
from nemo_gym_testing.gateway.engine import Answer, CallLog

LONG = 12 << 20
"""More than the kernels at both ends of a connection take of what nobody reads."""


class Wordy(FakeOpenAIEngine):
    """Says another text with each call."""

    letters = 100

    def answer(self, call: CallLog) -> Answer:
        made = super().answer(call)
        made.whole["choices"][0]["message"]["content"] = chr(ord("a") + len(self.calls)) * self.letters
        return made


class Setting:
    def __init__(self, engine: Wordy, gateway: GatewayProcess, http: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.gateway = gateway
        self._http = http
        self._opened: dict[str, Any] = {}
        self._calls: list[Call] = []

    async def request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        async with self._http.request(
            method, self.gateway.url + path, headers=self.gateway.headers(), **options
        ) as reply:
            assert reply.status == 200, await reply.text()
            data: dict[str, Any] = await reply.json()
            return data

    async def open(self) -> None:
        self._opened = await self.request("POST", "/sessions", json={"rollout": ROLLOUT})

    async def ask(self, *, stream: bool, buffer_bytes: int | None = None) -> Call:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
        headers = {"Authorization": f"Bearer {self._opened['inference_token']}"}
        path = f"/sessions/{self._opened['session_id']}/v1/chat/completions"
        self._calls.append(await Call.send(self.gateway.port, path, body, headers, buffer_bytes=buffer_bytes))
        return self._calls[-1]

    def hang_up(self) -> None:
        for call in self._calls:
            call.leave(Leave.CLOSE)

    async def restart(self) -> None:
        await asyncio.to_thread(self.gateway.kill)
        await asyncio.to_thread(self.gateway.start)


@asynccontextmanager
async def setting(folder: Path) -> AsyncIterator[Setting]:
    async with Wordy() as engine, aiohttp.ClientSession() as http:
        gateway = GatewayProcess(folder, [engine.url], None, wire="openai", durability="process")
        try:
            await asyncio.to_thread(gateway.start)
            there = Setting(engine, gateway, http)
            try:
                await there.open()
                yield there
            finally:
                there.hang_up()
        finally:
            await asyncio.to_thread(gateway.close)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_that_the_kernel_has_not_taken_is_given_again_after_a_kill(tmp_path: Path, stream: bool) -> None:
    async with setting(tmp_path) as there:
        there.engine.letters = LONG
        slow = await there.ask(stream=stream, buffer_bytes=4096)
        await slow.read_bytes(1000)
        await there.request("GET", "/engines")  # the gateway has gone on since
        await asyncio.sleep(0.3)
        await there.restart()
        slow.leave(Leave.CLOSE)
        again = await there.ask(stream=False)
        status, body = await again.whole()
        assert status == 200 and body.count(b"b" * 100) == LONG // 100
        assert len(there.engine.calls) == 1, "sampled once"


async def test_slow_answer_that_was_read_whole_counts_as_delivered_after_a_kill(tmp_path: Path) -> None:
    async with setting(tmp_path) as there:
        there.engine.letters = LONG
        slow = await there.ask(stream=False, buffer_bytes=4096)
        await slow.read_bytes(1000)
        await asyncio.sleep(0.3)
        await slow.whole()
        await asyncio.sleep(1.0)  # after which it has been looked at again
        await there.restart()
        there.engine.letters = 100
        status, _ = await (await there.ask(stream=False)).whole()
        assert status == 200 and len(there.engine.calls) == 2, "a deliberate resample"


@pytest.mark.parametrize("how", [Leave.RESET, Leave.CLOSE])
async def test_answer_whose_caller_left_unread_is_given_again_after_a_kill(tmp_path: Path, how: Leave) -> None:
    async with setting(tmp_path) as there:
        gone = await there.ask(stream=False)
        await gone.read_bytes(20)
        await asyncio.sleep(0.1)
        gone.leave(how)
        await asyncio.sleep(0.1)
        await there.request("GET", "/engines")  # the gateway has seen it by then
        await there.restart()
        again = await there.ask(stream=False)
        status, body = await again.whole()
        assert status == 200 and b"b" * 100 in body
        assert len(there.engine.calls) == 1, "sampled once"
