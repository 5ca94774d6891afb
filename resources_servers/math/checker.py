"""Compares answers in worker processes, which are killed when a comparison takes too long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nemo_gym.environment.worker_pool import Ending, WorkerPool

COMPARE = "resources_servers.math.comparison:compare"


@dataclass(frozen=True)
class Comparison:
    ending: Ending
    right: bool = False
    read: str | None = None
    """The part of the text that was taken as the answer."""


class Checker:
    """Compares answers, ``workers`` at a time, each within ``timeout_s``."""

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = WorkerPool(
            COMPARE,
            workers=workers,
            warm_up={"expected": "1", "answer": "1"},
            missing="install the packages of requirements.txt (the extra 'math')",
        )

    async def compare(self, expected: str, answer: str) -> Comparison:
        """Raise `VerifierError` if a process cannot be started or cannot import math-verify."""
        reply = await self._pool.ask({"expected": expected, "answer": answer}, timeout_s=self._timeout_s)
        if reply.ending is not Ending.ANSWERED:
            return Comparison(reply.ending)
        return Comparison(reply.ending, reply.value["right"], reply.value["read"])

    async def aclose(self) -> None:
        await asyncio.to_thread(self._pool.close)
