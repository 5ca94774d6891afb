"""Engines that can be killed: separate processes at fixed ports, and a listener for the port of a dead one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym_testing.gateway.tiny.log import EngineCall, read_log

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class EngineProcess:
    """A tiny engine (a real model) in a process, and its log."""

    name: str
    policy: Path
    workspace: Path
    wire: str = "vllm"
    first_token_delay_s: float = 0.0
    tokens_per_second: float | None = None
    faults: str = ""
    steady_delay_s: float | None = None
    """If set, no model: responses with some ids, each of which takes this time, however many run."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.workspace / f"{self.name}.jsonl"

    def config(self, **options: Any) -> dict[str, Any]:
        return {"type": self.wire, "base_url": self.url, "name": self.name, **options}

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self._command(), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def _command(self) -> list[str]:
        if self.steady_delay_s is not None:
            command = [sys.executable, "-m", "campaigns.faults.router_steady_engine", "--port", str(self.port)]
            return [*command, "--log", str(self.log), "--delay-s", str(self.steady_delay_s)]
        command = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny", "--policy", str(self.policy)]
        command += ["--wire", self.wire, "--port", str(self.port), "--log", str(self.log)]
        command += ["--seed", str(sum(self.name.encode())), "--first-token-delay", str(self.first_token_delay_s)]
        if self.tokens_per_second:
            command += ["--tokens-per-second", str(self.tokens_per_second)]
        if self.faults:
            command += ["--faults", self.faults]
        return command

    async def up(self) -> None:
        """Wait until the engine is healthy."""
        end = time.monotonic() + START_S
        async with aiohttp.ClientSession() as http:
            while True:
                assert self.process is not None and self.process.poll() is None, f"engine {self.name} did not start"
                assert time.monotonic() < end, f"engine {self.name} did not answer within {START_S} s"
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/health") as reply:
                        if reply.status == 200:
                            return
                await asyncio.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the engine as the kernel or an operator would: with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def calls(self) -> list[EngineCall]:
        return read_log(self.log) if self.log.exists() else []

    def count(self) -> int:
        """The number of inference requests that the engine has begun."""
        return self.log.read_bytes().count(b'{"event":"call"') if self.log.exists() else 0


@asynccontextmanager
async def engines(*wanted: EngineProcess) -> AsyncIterator[list[EngineProcess]]:
    try:
        for engine in wanted:
            engine.start()
        for engine in wanted:
            await engine.up()
        yield [*wanted]
    finally:
        for engine in wanted:
            if engine.process is not None:
                engine.send(signal.SIGCONT)  # for engines that a case stopped
            engine.kill()


@dataclass
class Listener:
    """Listens at the port of a dead engine, and counts connections and requests, also by method and path."""

    seen: Counter[str] = field(default_factory=Counter)
    last_call_at: float | None = None
    """Monotonic seconds of the last request that was not a probe."""

    @asynccontextmanager
    async def at(self, port: int, answer: bytes | None) -> AsyncIterator[Listener]:
        """``answer``: the whole HTTP response to a request; empty bytes close the connection, ``None`` keeps it."""

        talks: set[asyncio.Task[Any] | None] = set()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.seen["connections"] += 1
            talks.add(asyncio.current_task())
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    method, path = head.split(b" ")[:2]
                    self.seen["requests"] += 1
                    if method == b"POST":
                        self.last_call_at = time.monotonic()
                    self.seen[f"{method.decode()} {path.decode()}"] += 1
                    length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                    if length:
                        await reader.readexactly(int(length[0].split(b":")[1]))
                    if answer is None:
                        await asyncio.Event().wait()
                    if not answer:
                        return
                    writer.write(answer)
                    await writer.drain()
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                return  # cancelled at the end of this listener
            finally:
                writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", port, reuse_address=True)
        try:
            yield self
        finally:
            server.close()
            for task in talks:
                if task is not None:
                    task.cancel()
