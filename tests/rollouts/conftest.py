"""A stack of small peers in processes of their own, and runs against it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.http.client import ServerClient, close_global_aiohttp_client
from tests.rollouts.chain_process import ChainServer

HERE = Path(__file__).parent
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
async def _no_session_left() -> AsyncIterator[None]:
    yield
    await close_global_aiohttp_client()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.02)


class Chain:
    """Environment, agent and model, and what a run against them needs."""

    def __init__(self, directory: Path, **options: dict[str, Any]) -> None:
        self.directory = directory
        self.journal = directory / "journal"
        self.journal.touch()
        self.output = directory / "out.jsonl"
        roles = ("environment", "agent", "model")
        self.servers = {
            role: ChainServer(role, {"journal": str(self.journal), **options.get(role, {})}) for role in roles
        }
        for server in self.servers.values():
            server.wait_ready()
        self._collectors: list[subprocess.Popen[bytes]] = []

    @property
    def stack(self) -> dict[str, Any]:
        ports = {role: {"host": "127.0.0.1", "port": server.port} for role, server in self.servers.items()}
        extra = self.servers["agent"].options.get("config", {})
        agent = {
            **ports["agent"],
            "resources_server": {"type": "resources_servers", "name": "env"},
            "model_server": {"type": "responses_api_models", "name": "policy"},
            **extra,
        }
        return {
            "env": {"resources_servers": {"chain": ports["environment"]}},
            "policy": {"responses_api_models": {"chain": ports["model"]}},
            "trivial": {"responses_api_agents": {"chain": agent}},
        }

    def client(self) -> ServerClient:
        return ServerClient(global_config_dict=self.stack)

    def write_rows(self, count: int, **extra: Any) -> Path:
        path = self.directory / "in.jsonl"
        rows = (
            {
                "id": f"t{number}",
                "responses_create_params": {"input": "A or B?", "metadata": {"expected_answer": "B"}},
                "expected_answer": "B" if number % 2 == 0 else "A",
                **extra,
            }
            for number in range(count)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def run_keys(self, **keys: Any) -> dict[str, Any]:
        return {
            "input": str(self.directory / "in.jsonl"),
            "output": str(self.output),
            "retry_delay_s": 0.01,
            **keys,
        }

    def collect(self, **keys: Any) -> subprocess.Popen[bytes]:
        """Start a collector in a process of its own."""
        given = json.dumps({"stack": self.stack, "run": self.run_keys(**keys)})
        command = [sys.executable, str(HERE / "collect.py"), given]
        self._collectors.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        return self._collectors[-1]

    def results(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        path = self.directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def notes(self, what: str) -> list[tuple[str, int]]:
        """``(rollout id, attempt)`` of every call of a kind that the peers served."""
        split = (line.split() for line in self.journal.read_text().splitlines())
        return [(rollout_id, int(attempt)) for kind, rollout_id, attempt in split if kind == what]

    def stop(self) -> None:
        for collector in self._collectors:
            with collector:
                collector.kill()
        for server in self.servers.values():
            server.stop()


@pytest.fixture
def make_chain(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    chains: list[Chain] = []

    def make(**options: dict[str, Any]) -> Chain:
        chains.append(Chain(tmp_path, **options))
        return chains[-1]

    yield make
    for made in chains:
        made.stop()
