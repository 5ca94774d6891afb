"""A small run with everything on, whose servers are still up: scraped, and traced to a collector."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from nemo_gym._util.secrets import public_environment
from nemo_gym.cli.collect_rollouts import stack_telemetry
from nemo_gym.config.check import check_everything
from nemo_gym.config.compose import compose
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.rollouts.collection import CollectionResult, run_collection
from nemo_gym.stack import nursery
from nemo_gym.stack.endpoints import SCRAPE_TARGETS, SCRAPE_TOKEN_FILE, StackEntry
from nemo_gym.stack.stack import pipeline_client, running_stack
from nemo_gym.stack.supervisor import stop_nursery

ROOT = Path(__file__).resolve().parents[2]
WEATHER = ("agent=simple_agent", "environment=example_mcp_weather", "model=scripted")
WEATHER_ROWS = ROOT / "resources_servers/example_mcp_weather/data/example.jsonl"


@dataclass
class Run:
    stack: StackEntry
    result: CollectionResult

    @property
    def run_dir(self) -> Path:
        return Path(self.stack.run_dir)

    def targets(self) -> dict[str, str]:
        """Server → URL of what Prometheus would scrape."""
        found = {}
        for path in (self.run_dir / SCRAPE_TARGETS).glob("*.json"):
            for target in json.loads(path.read_text()):
                labels = target["labels"]
                found[labels["server"]] = f"{labels['__scheme__']}://{target['targets'][0]}/metrics"
        return found

    async def scrape(
        self, url: str, token: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Status and text; with the run's token, where no other is given."""
        token = token or (self.run_dir / SCRAPE_TOKEN_FILE).read_text()
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}", **(headers or {})}) as http,
            http.get(url) as reply,
        ):
            return reply.status, await reply.text()


@asynccontextmanager
async def observed_run(
    directory: Path, words: tuple[str, ...] = WEATHER, rows: Path = WEATHER_ROWS, **keys: Any
) -> AsyncIterator[Run]:
    """Run ``rows`` over the composition of ``words``; its servers and its pipeline's metrics are up inside."""
    process = nursery.spawn(public_environment(os.environ))
    try:
        composition = compose([*words, f"run_dir={directory / 'run'}", "observability.metrics_port=0"])
        check_everything(composition)
        async with running_stack(composition, process, print) as supervisor:
            stack = supervisor.stack()
            async with stack_telemetry(stack, print):
                given = {"input": rows, "output": directory / "out.jsonl", "agent_name": stack.chosen["agent"], **keys}
                result = await run_collection(pipeline_client(stack), given)
                yield Run(stack, result)
    finally:
        await close_global_aiohttp_client()
        stop_nursery(process[0])
