"""A pool of `worker.py` processes, each asked one question at a time and killed when it takes too long."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nemo_gym.errors import VerifierError

WORKER = Path(__file__).with_name("worker.py")
STARTUP_TIMEOUT_S = 60.0
"""For the first answer of a new process, which imports sympy, on a busy machine."""


class Ending(StrEnum):
    ANSWERED = "answered"
    TIMED_OUT = "timed_out"
    DIED = "died"
    """The process ended instead of answering: out of memory, or a crash of the interpreter."""


@dataclass(frozen=True)
class Comparison:
    ending: Ending
    right: bool = False
    read: str | None = None
    """What was taken for the answer."""


class Checker:
    """Compares answers, ``workers`` at a time, each within ``timeout_s``. Belongs to one event loop."""

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[asyncio.subprocess.Process] = []

    async def compare(self, expected: str, answer: str) -> Comparison:
        """Raises `VerifierError` where no process can be started, or one cannot import math-verify."""
        async with self._slots:
            process = self._idle.pop() if self._idle else await _start()
            try:
                comparison = await self._ask(process, expected, answer)
            except BaseException:
                await _kill(process)
                raise
            if comparison.ending is Ending.ANSWERED:
                self._idle.append(process)
            else:
                await _kill(process)
            return comparison

    async def aclose(self) -> None:
        while self._idle:
            await _kill(self._idle.pop())

    async def _ask(self, process: asyncio.subprocess.Process, expected: str, answer: str) -> Comparison:
        try:
            reply = await asyncio.wait_for(_exchange(process, expected, answer), self._timeout_s)
        except TimeoutError:
            return Comparison(Ending.TIMED_OUT)
        if reply is None:
            return Comparison(Ending.DIED)
        said = json.loads(reply)
        return Comparison(Ending.ANSWERED, said["right"], said["read"])


async def _start() -> asyncio.subprocess.Process:
    """A process that has imported what it needs, so that its time limit counts the comparison alone."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-X", "utf8", str(WORKER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"LANG": "C.UTF-8"},  # no credential of this server
        limit=1024 * 1024,
    )
    try:
        reply = await asyncio.wait_for(_exchange(process, "1", "1"), STARTUP_TIMEOUT_S)
    except TimeoutError:
        await _kill(process)
        raise VerifierError(f"the answer checker did not start within {STARTUP_TIMEOUT_S:g} s") from None
    if reply is None:
        assert process.stderr is not None
        said = (await process.stderr.read()).decode("utf-8", "replace").strip().splitlines()
        await _kill(process)
        raise VerifierError(
            f"the answer checker cannot start: {said[-1] if said else 'it said nothing'}; install the packages of"
            " requirements.txt (the extra 'math')"
        )
    return process


async def _exchange(process: asyncio.subprocess.Process, expected: str, answer: str) -> bytes | None:
    """The reply's line, ``None`` when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"expected": expected, "answer": answer}).encode() + b"\n")
        await process.stdin.drain()
    except ConnectionError:
        return None
    line = await process.stdout.readline()
    return line if line.endswith(b"\n") else None


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
