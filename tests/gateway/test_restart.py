"""Engines, retries and journal together: a gateway is killed in the middle of its sessions, again and again, and its
harnesses simply repeat what was not answered."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import aiohttp
import orjson

from nemo_gym.gateway.journal import SessionJournal
from nemo_gym_testing.gateway import FakeVllmEngine

ROOT = Path(__file__).resolve().parents[2]
SESSIONS, TURNS, KILLS = 6, 12, 5


class Gateway:
    """The process, started again by whoever finds it dead."""

    def __init__(self, directory: Path, engine_url: str) -> None:
        self._arguments = [str(directory), engine_url]
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    async def start(self) -> None:
        command = [sys.executable, "-m", "tests.gateway.restart_process", *self._arguments]
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        self.port = int(await self._process.stdout.readline())

    async def kill(self) -> None:
        assert self._process is not None and self._process.returncode is None, "it must live until it is killed"
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def test_no_committed_token_is_lost_or_doubled_when_the_gateway_is_killed_mid_session(tmp_path: Path) -> None:
    chance = random.Random(3)
    received: dict[str, list[list[int]]] = {f"s{number}": [] for number in range(SESSIONS)}
    async with FakeVllmEngine() as engine, aiohttp.ClientSession() as http:
        gateway = Gateway(tmp_path, engine.url)
        await gateway.start()

        async def harness(session: str) -> None:
            prompt: list[int] = [ord(char) for char in session]
            while len(received[session]) < TURNS:
                try:
                    url = f"http://127.0.0.1:{gateway.port}/{session}"
                    async with http.post(url, data=orjson.dumps({"prompt": prompt})) as reply:
                        tokens = orjson.loads(await reply.read())["tokens"]
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)
                    continue
                received[session].append(tokens)
                prompt = [*prompt, *tokens, 1]

        async def killer() -> None:
            for _ in range(KILLS):
                target = len(engine.calls) + chance.randrange(3, 10)
                while len(engine.calls) < target:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await gateway.kill()
                await gateway.start()

        async with asyncio.TaskGroup() as group:
            for session in received:
                group.create_task(harness(session))
            group.create_task(killer())
        await gateway.kill()

        journal, sessions = SessionJournal.open(tmp_path)
        await journal.aclose()
        sampled = [list(call.token_ids) for call in engine.calls]
    assert {session.record.session_id for session in sessions} == set(received)
    committed: list[list[int]] = []
    for session in sessions:
        turns = [orjson.loads(turn.body)["tokens"] for turn in session.turns]
        assert turns == received[session.record.session_id], "what the harness got is what was committed, once"
        committed += turns
    assert all(sampled.count(tokens) == 1 for tokens in committed), "every committed token was sampled, exactly once"
    assert len(committed) == SESSIONS * TURNS <= len(sampled)
