"""Handlers of a few lines, and a registry that each test finds as it was."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_gym.prorl import registry
from nemo_gym.prorl.registry import AgentHandler, JobDetails

LLM = "http://127.0.0.1:9/v1"
"""Nobody listens there: the handlers here ask no model."""


class Runtime:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def close(self) -> None:
        self._log.append(f"close {self._name}")


class Echo(AgentHandler):
    """Says back what it is asked, and notes what happens. ``fails`` and ``hangs`` name stages."""

    def __init__(self, name: str = "echo", *, fails: str = "", hangs: str = "") -> None:
        self._name, self.fails, self.hangs = name, fails, hangs
        self.log: list[str] = []
        self.made: list[str] = []
        """Jobs whose runtime was handed to the server."""
        self.seen: dict[str, JobDetails] = {}
        self.most: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.reached = threading.Event()

    @property
    def name(self) -> str:
        return self._name

    async def init(
        self, instance: Any, llm_config: Any = None, sid: str | None = None, max_iterations: int = 1
    ) -> tuple[Any, Any, Any]:
        await self._enter("init")
        self.made.append(str(sid))
        return Runtime(self.log, str(sid)), {"sid": sid, "llm": llm_config}, {"max_iterations": max_iterations}

    async def run(self, runtime: Any, metadata: Any, config: Any, instance: Any) -> dict[str, Any]:
        assert runtime is not None
        await self._enter("run")
        self.log.append(f"run {metadata['sid']}")
        return {"git_patch": "x", "messages": [], "max_iterations": config["max_iterations"], "llm": metadata["llm"]}

    async def eval(self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True) -> dict[str, Any]:
        self.seen[job_details.job_id] = job_details
        await self._enter("eval")
        self.log.append(f"eval {job_details.job_id} as {sid} skip={allow_skip} runtime={job_details.runtime}")
        return {"report": {"resolved": True}}

    async def release(self, job_details: JobDetails) -> None:
        self.log.append(f"release {job_details.job_id}")

    async def _enter(self, stage: str) -> None:
        self.inside[stage] += 1
        self.most[stage] = max(self.most[stage], self.inside[stage])
        try:
            self.reached.set()
            if self.hangs == stage:
                await asyncio.Event().wait()
            await asyncio.sleep(0.001)
            if self.fails == stage:
                raise RuntimeError(f"{stage} broke")
        finally:
            self.inside[stage] -= 1


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    yield
