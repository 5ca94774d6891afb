"""Measure what a stack costs: time to ready, CPU per request, memory.

    python -m campaigns.bench.stack [--json] [--runs 5] [--requests 4000]

*Start*: from the start of the ``ng_run`` process to its line ``servers ready``, for an environment, an agent and a
model; the first start warms up files and byte code and is not counted. *Request*: a no-op tool, called with a
credential over kept-alive connections, beside the same tool in a bare FastAPI application under the same uvicorn;
CPU of the server process, interleaved rounds. *Memory*: PSS of ``ng_run`` and all its processes after the requests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report

PLUGINS = Path(__file__).resolve().parents[2] / "tests" / "plugins"
COMPOSITION = ("agent=one_shot", "environment=choice_questions", "model=instant")
READY_AT_MOST_S = 1.5
CPU_RATIO_AT_MOST = 3.0
PSS_AT_MOST_MIB = 250.0
CONNECTIONS = 16
DEADLINE_S = 120.0

BARE_APP = """
import socket, sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Ping(BaseModel):
    value: int

class Pong(BaseModel):
    value: int

app = FastAPI()

@app.post("/noop")
async def noop(body: Ping) -> Pong:
    return Pong(value=body.value)

listener = socket.socket(fileno=int(sys.argv[1]))
uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run([listener])
"""


@dataclass(frozen=True)
class Started:
    """A running ``ng_run``."""

    process: subprocess.Popen[str]
    seconds: float
    cpu_s: float
    """CPU seconds of all its processes when the last server was ready."""
    run_dir: Path


def processes(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


@contextmanager
def ng_run(*words: str) -> Iterator[Started]:
    """Start a stack as a user does, and time its start."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory, "run")
        begin = time.perf_counter()
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ng_run"), *words, f"run_dir={run_dir}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NEMO_GYM_EXTRA_ROOTS": str(PLUGINS), "NEMO_GYM_CACHE_DIR": f"{directory}/cache"},
        )
        try:
            assert process.stdout is not None
            if not any("servers ready" in line for line in process.stdout):
                raise RuntimeError("ng_run ended before its servers were ready")
            seconds = time.perf_counter() - begin
            cpu_s = sum(sum(one.cpu_times()[:2]) for one in processes(process.pid))
            yield Started(process, seconds, cpu_s, run_dir)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)


@contextmanager
def bare_server() -> Iterator[tuple[int, str]]:
    """Run the same tool without this suite; yield (pid, url)."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        process = subprocess.Popen(
            [sys.executable, "-c", BARE_APP, str(listener.fileno())], pass_fds=[listener.fileno()]
        )
        try:
            yield process.pid, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


async def load(url: str, headers: dict[str, str], count: int) -> None:
    """Send ``count`` requests over a few kept-alive connections, and check each response."""
    numbers = iter(range(count))
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:

        async def worker() -> None:
            for number in numbers:
                async with session.post(f"{url}/noop", json={"value": number}) as reply:
                    assert (await reply.json())["value"] == number

        await asyncio.gather(*(worker() for _ in range(CONNECTIONS)))


async def cpu_us(pid: int, url: str, headers: dict[str, str], count: int) -> float:
    """Return the server's CPU microseconds per request."""
    before = sum(psutil.Process(pid).cpu_times()[:2])
    await load(url, headers, count)
    return 1e6 * (sum(psutil.Process(pid).cpu_times()[:2]) - before) / count


@asynccontextmanager
async def noop_server() -> AsyncIterator[tuple[int, str, dict[str, str]]]:
    """Run the tool in a server of the suite; yield (pid, url, headers of an authenticated caller)."""
    from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
    from nemo_gym.stack.endpoints import read_stack

    with ng_run("environment=noop") as started:
        stack = read_stack(started.run_dir)
        server = stack.server("noop")
        assert server.pid is not None
        keys = StackKeys.from_hex(stack.root_key)
        yield server.pid, server.url, {CREDENTIAL_HEADER: keys.caller(Role.AGENT, "bench", "noop")}


async def request_rounds(runs: int, requests: int) -> tuple[list[float], list[float]]:
    """Measure CPU per request in interleaved rounds, after a warm-up round; return (bare, suite)."""
    bare: list[float] = []
    suite: list[float] = []
    async with noop_server() as (pid, url, headers):
        with bare_server() as (bare_pid, bare_url):
            for number in range(runs + 1):
                bare_us = await cpu_us(bare_pid, bare_url, {}, requests)
                suite_us = await cpu_us(pid, url, headers, requests)
                if number:
                    bare.append(bare_us)
                    suite.append(suite_us)
    return bare, suite


def starts(runs: int) -> tuple[list[Started], float]:
    """Return ``runs`` timed starts after a warm-up start, and the memory of the last stack in MiB."""
    from nemo_gym.stack.endpoints import pss_mib

    found = []
    memory = 0.0
    for number in range(runs + 1):
        with ng_run(*COMPOSITION) as started:
            memory = pss_mib(process.pid for process in processes(started.process.pid))
        if number:
            found.append(started)
    return found, memory


def measure(runs: int = 5, requests: int = 4000) -> tuple[dict[str, Any], list[Bar]]:
    """The whole benchmark, for `campaigns.bench.servers`."""
    started, memory = starts(runs)
    bare, suite = uvloop.run(request_rounds(runs, requests))
    ready = Samples([one.seconds for one in started])
    ratio = Samples([ours / theirs for ours, theirs in zip(suite, bare, strict=True)])
    figures: dict[str, Any] = {
        "ready_s": ready.summary(),
        "ready_cpu_s": Samples([one.cpu_s for one in started]).summary(),
        "stack_pss_mib": round(memory, 1),
        "bare_cpu_us_per_request": Samples(bare).summary(1),
        "suite_cpu_us_per_request": Samples(suite).summary(1),
        "cpu_ratio": ratio.summary(),
    }
    return figures, [
        Bar.at_most("start of environment, agent and model", ready.median, READY_AT_MOST_S, "s"),
        Bar.at_most("CPU per request, ratio to bare FastAPI", ratio.median, CPU_RATIO_AT_MOST, "x"),
        Bar.at_most("memory of the whole stack", memory, PSS_AT_MOST_MIB, "MiB PSS"),
    ]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    arguments = parser.parse_args()
    figures, bars = measure(arguments.runs, arguments.requests)
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
