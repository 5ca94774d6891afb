"""Debian's Prometheus scrapes real servers, and the queries of the Grafana dashboard return data."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nemo_gym.rollouts.collection import run_collection
from nemo_gym.stack.endpoints import SCRAPE_FILE
from nemo_gym.stack.ports import DEFAULT_HOST
from nemo_gym.stack.stack import pipeline_client
from tests.architecture.docs import ROOT, table
from tests.gateway.testing.processes import tiny_engine
from tests.telemetry.collector import collecting
from tests.telemetry.runs import WEATHER_ROWS, Run, observed_run
from tests.telemetry.test_servers import PAGE, families

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TALKS = 'rules:\n  - name: talk\n    steps:\n      - {say: "I do not know."}\n'
SWE_ROWS = ROOT / "resources_servers/swe_bench/data/example.jsonl"
DASHBOARD = ROOT / "deploy/grafana/nemo_gym.json"
BOXES = re.compile(r"sandbox_broker|box_start")
"""Queries over boxes, which have a run of their own."""
RUNNING_ONLY = re.compile(r"nemo_gym_rollouts_(?:stage_(?!seconds)|server_|jobs)")
"""Of a pipeline while it works, and of a service."""
DEADLINE_S = 120.0


def queries() -> dict[str, str]:
    """Every query of the dashboard, as Grafana asks it, by panel and letter."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            asked = target["expr"].replace("$__rate_interval", "1m").replace("$run_id", ".*")
            found[f"{panel['title']} {target['refId']}"] = asked
    return found


@asynccontextmanager
async def prometheus(run: Run, folder: Path) -> AsyncIterator[str]:
    """The URL of a Prometheus that reads the run's own scrape configuration, every half second."""
    program = shutil.which("prometheus")
    assert program is not None, "scripts/install-system --with-tests installs it"
    whole = folder / "prometheus.yml"
    given = {"global": {"scrape_interval": "500ms"}, **json.loads((run.run_dir / SCRAPE_FILE).read_text())}
    whole.write_text(json.dumps(given))
    with free_port() as port:
        pass
    words = [f"--config.file={whole}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = subprocess.Popen(  # noqa: ASYNC220
        [program, *words, f"--web.listen-address={DEFAULT_HOST}:{port}", "--log.level=error"],
    )
    url = f"http://{DEFAULT_HOST}:{port}"
    try:
        await until_true(lambda: answers(f"{url}/-/ready"))
        yield url
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@contextmanager
def free_port() -> Iterator[int]:
    import socket

    with socket.create_server((DEFAULT_HOST, 0)) as listener:
        yield listener.getsockname()[1]


async def answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as http, http.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


async def until_true(condition: Any) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.2)


async def ask(url: str, query: str) -> list[Any]:
    params = {"query": query}
    async with aiohttp.ClientSession() as http, http.get(f"{url}/api/v1/query", params=params) as reply:
        said = await reply.json()
        assert said["status"] == "success", said
        result: list[Any] = said["data"]["result"]
        return result


async def test_each_query_of_the_dashboard_returns_data_of_a_real_run(tmp_path: Path) -> None:
    left = {name: query for name, query in queries().items() if not BOXES.search(query)}
    exposed: set[str] = set()
    with collecting() as collector, tiny_engine(tmp_path, TALKS) as engine:
        collector.status = 400  # some spans are lost
        words = (
            *("agent=simple_agent", "environment=example_mcp_weather", "sandbox=local", "model=vllm"),
            *(f"policy_base_url={engine}", "policy_model_name=tiny", f"policy_path={tmp_path / 'policy'}"),
            "++policy_model.responses_api_models.gateway.policy.max_context_tokens=8192",
            f"observability.traces.endpoint={collector.url}",
            "observability.traces.interval_s=0.2",
        )
        async with observed_run(tmp_path, words) as run, prometheus(run, tmp_path) as url:
            await until_true(lambda: ask(url, 'up{job="nemo_gym"} == 1'))
            await run.scrape(next(iter(run.targets().values())), "wrong")
            number = 0
            give_up = time.monotonic() + 2 * DEADLINE_S
            while left:
                assert time.monotonic() < give_up, sorted(left)
                number += 1
                # Acts that are cut short, and then rollouts while Prometheus looks.
                cut = {"run_timeout_s": 0.001, "max_attempts": 1} if number == 1 else {"num_repeats": 20}
                output = tmp_path / f"again-{number}.jsonl"
                keys = {"input": WEATHER_ROWS, "output": output, "agent_name": run.stack.chosen["agent"]}
                going = asyncio.create_task(run_collection(pipeline_client(run.stack), {**keys, **cut}))
                await asyncio.sleep(0.5)
                collector.status = 200
                while not going.done():
                    for name, query in [*left.items()]:
                        if await ask(url, query):
                            del left[name]
                    await asyncio.sleep(0.2)
                await going
            for target in run.targets().values():
                exposed |= families((await run.scrape(target))[1])
    rows = table(PAGE, "metric")
    assert exposed <= set(rows)
    missing = {name for name in set(rows) - exposed if not RUNNING_ONLY.match(name) and rows[name][2] != "brokers"}
    assert missing == set()


async def test_queries_over_boxes_return_data_of_boxes_of_a_broker(tmp_path: Path) -> None:
    left = {name: query for name, query in queries().items() if BOXES.search(query)}
    task = tmp_path / "task.jsonl"
    task.write_text(SWE_ROWS.read_text().splitlines()[0])
    prepare = [str(Path(sys.executable).with_name("ng_prepare")), "swe_bench", f"rows={task}", "sandbox=local"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=600)  # noqa: ASYNC221 - nothing else goes on yet
    exposed: set[str] = set()
    with collecting() as collector:
        words = (
            *("agent=mini_swe_agent", "environment=swe_bench", "sandbox=broker_local", "model=scripted"),
            *(f"observability.traces.endpoint={collector.url}", "observability.traces.interval_s=0.2"),
        )
        async with observed_run(tmp_path, words, task) as run, prometheus(run, tmp_path) as url:
            await until_true(lambda: ask(url, 'up{job="nemo_gym"} == 1'))
            keys = {"input": task, "output": tmp_path / "again.jsonl", "agent_name": run.stack.chosen["agent"]}
            going = asyncio.create_task(run_collection(pipeline_client(run.stack), {**keys, "num_repeats": 10}))
            while not going.done():
                for name, query in [*left.items()]:
                    if await ask(url, query):
                        del left[name]
                for target in run.targets().values():
                    exposed |= families((await run.scrape(target))[1])
                await asyncio.sleep(0.2)
            await going
        spans = collector.spans
    assert left == {}
    rows = table(PAGE, "metric")
    assert exposed <= set(rows)
    assert {name for name, (_, _, where, _) in rows.items() if where == "brokers"} - exposed == set()
    rollouts = {span.trace_id for span in spans if span.name == "rollout"}
    for name in ("box_start", "box_exec", "box_close"):
        of_boxes = [span for span in spans if span.name == name]
        assert {span.trace_id for span in of_boxes} == rollouts, name
        assert all(span.attributes["sandbox_id"] for span in of_boxes), name


def test_the_dashboard_names_metrics_of_the_page_only() -> None:
    page = set(table(PAGE, "metric"))
    for query in queries().values():
        for name in re.findall(r"\b((?:nemo_gym|sandbox_broker|process)_\w+)", query):
            assert re.sub(r"_(total|bucket|count|sum)$", "", name) in page or name in page, name
