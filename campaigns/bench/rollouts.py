"""Measure 500 rollouts without tools and without model latency, compared with a bare chain of the same hops.

    python -m campaigns.bench.rollouts [--json] [--runs 5] [--rollouts 500] [--concurrency 32]

Each round runs both, one after the other, on servers that stay up. *Bare*: three FastAPI applications of a few lines
(``tests/rollouts/chain.py``) and a loop of aiohttp posts, which keep nothing: no credentials, no types, no store.
*Suite*: the servers of a composition as ``ng_run`` starts them, and a whole collection: rows read and checked, durable
store, result files, aggregate metrics. The bar is on the ratio of their rates.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from tests.rollouts.chain_process import ChainServer

PLUGINS = Path(__file__).resolve().parents[2] / "tests" / "plugins"
COMPOSITION = ("agent=one_shot", "environment=choice_questions", "model=instant")
RATE_RATIO_AT_LEAST = 0.5


@dataclass(frozen=True)
class Round:
    """One measured run."""

    rollouts: int
    seconds: float
    server_cpu_s: float
    driver_cpu_s: float

    @property
    def rate(self) -> float:
        return self.rollouts / self.seconds

    @property
    def server_cpu_ms(self) -> float:
        return 1000 * self.server_cpu_s / self.rollouts

    @property
    def driver_cpu_ms(self) -> float:
        return 1000 * self.driver_cpu_s / self.rollouts


def write_rows(path: Path, count: int) -> list[dict[str, Any]]:
    rows = [
        {
            "id": f"q{number}",
            "responses_create_params": {
                "input": [
                    {"role": "user", "content": f"Question {number}: A or B? Answer with the letter in brackets."}
                ]
            },
            "expected_answer": "AB"[number % 2],
        }
        for number in range(count)
    ]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return rows


async def bare_rollouts(urls: dict[str, str], rows: list[dict[str, Any]], concurrency: int) -> None:
    """Run the simplest loop over the same hops as the pipeline's."""
    verdicts: list[Any] = []
    remaining = iter(enumerate(rows))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as http:

        async def post(url: str, body: Any, token: str = "") -> Any:
            headers = {"Content-Type": "application/json", "X-NeMo-Gym-Control-Token": token}
            async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
                data = await response.read()
                assert response.status == 200, data
                return orjson.loads(data)

        async def worker() -> None:
            env, agent, model = urls["environment"], urls["agent"], urls["model"]
            for number, row in remaining:
                rollout = {"rollout_id": f"r{number}", "task_id": row["id"], "attempt": 1}
                session = {"rollout": rollout}
                opened = await post(f"{model}/sessions", session)
                seeded = await post(f"{env}/seed_session", {**row, "_ng_session": session})
                endpoint = {"base_url": opened["base_url"], "token": opened["inference_token"], "model": "policy"}
                params = row["responses_create_params"]
                act = {"responses_create_params": params, "descriptor": seeded["descriptor"], "inference": endpoint}
                done = await post(f"{agent}/act", act)
                work = {**row, "response": done["response"], "_ng_session": {**session, "artifacts": []}}
                verdicts.append(await post(f"{env}/verify", work, seeded["control_token"]))
                path = f"{model}/sessions/{opened['session_id']}/finalize"
                await post(path, {}, opened["control_token"])
                await post(f"{env}/close", session, seeded["control_token"])

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    assert len(verdicts) == len(rows)
    assert all("reward" in verdict for verdict in verdicts)


@asynccontextmanager
async def suite_stack(words: tuple[str, ...] = COMPOSITION) -> AsyncIterator[Any]:
    """Run the servers of a composition as ``ng_run`` starts them; yield the stack."""
    os.environ["NEMO_GYM_EXTRA_ROOTS"] = str(PLUGINS)
    from nemo_gym._util.secrets import public_environment
    from nemo_gym.config.compose import compose
    from nemo_gym.stack import nursery
    from nemo_gym.stack.stack import running_stack
    from nemo_gym.stack.supervisor import stop_nursery

    process = nursery.spawn(public_environment(os.environ))
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            composition = compose([*words, f"run_dir={run_dir}"])
            async with running_stack(composition, process, lambda text: print(text, file=sys.stderr)) as supervisor:
                yield supervisor.stack()
    finally:
        stop_nursery(process[0])


async def measured(pids: list[int], rollouts: int, work: Callable[[], Awaitable[None]]) -> Round:
    def server_cpu_s() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)

    before, driver, start = server_cpu_s(), time.process_time(), time.perf_counter()
    await work()
    seconds = time.perf_counter() - start
    return Round(rollouts, seconds, server_cpu_s() - before, time.process_time() - driver)


async def rollout_rounds(runs: int, rollouts: int, concurrency: int) -> tuple[list[Round], list[Round]]:
    """Measure ``runs`` rounds of both, interleaved, after a warm-up round; return (bare, suite)."""
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.rollouts.collection import run_collection
    from nemo_gym.stack.stack import pipeline_client

    chain = {role: ChainServer(role, {"plain": True}) for role in ("environment", "agent", "model")}
    bare: list[Round] = []
    suite: list[Round] = []
    try:
        for server in chain.values():
            await asyncio.to_thread(server.wait_ready)
        urls = {role: f"http://127.0.0.1:{server.port}" for role, server in chain.items()}
        chain_pids = [server.process.pid or 0 for server in chain.values()]
        async with suite_stack() as stack:
            client = pipeline_client(stack)
            pids = [server.pid for server in stack.servers]
            with tempfile.TemporaryDirectory() as directory:
                source = Path(directory, "in.jsonl")
                rows = write_rows(source, rollouts)

                async def run_suite() -> None:
                    output = Path(directory, "out.jsonl")
                    keys = {"input": source, "output": output, "overwrite": True, "concurrency": concurrency}
                    result = await run_collection(client, {**keys, "agent_name": stack.chosen["agent"]})
                    assert (result.valid, result.invalid) == (rollouts, 0)
                    assert abs(result.aggregates[0]["agent_metrics"]["mean/reward"] - 0.5) < 0.01

                for number in range(runs + 1):
                    bare_round = await measured(chain_pids, rollouts, lambda: bare_rollouts(urls, rows, concurrency))
                    suite_round = await measured(pids, rollouts, run_suite)
                    if number:
                        bare.append(bare_round)
                        suite.append(suite_round)
                await close_global_aiohttp_client()
    finally:
        for server in chain.values():
            server.stop()
    return bare, suite


def report(bare: list[Round], suite: list[Round]) -> tuple[dict[str, Any], list[Bar]]:
    """Return the figures and the bar."""
    ratios = Samples([ours.rate / theirs.rate for ours, theirs in zip(suite, bare, strict=True)])
    # From the CPU of drivers and servers together: the ratio of rates on a machine with no other load.
    cpu_ratios = [
        (theirs.server_cpu_ms + theirs.driver_cpu_ms) / (ours.server_cpu_ms + ours.driver_cpu_ms)
        for ours, theirs in zip(suite, bare, strict=True)
    ]
    figures: dict[str, Any] = {"rate_ratio": ratios.summary(3), "cpu_ratio": Samples(cpu_ratios).summary(3)}
    for name, rounds in (("bare", bare), ("suite", suite)):
        figures[f"{name}_rollouts_per_s"] = Samples([r.rate for r in rounds]).summary(1)
        figures[f"{name}_server_cpu_ms_per_rollout"] = Samples([r.server_cpu_ms for r in rounds]).summary(3)
        figures[f"{name}_driver_cpu_ms_per_rollout"] = Samples([r.driver_cpu_ms for r in rounds]).summary(3)
    return figures, [Bar.at_least("rollouts/s, ratio to the bare chain", ratios.median, RATE_RATIO_AT_LEAST, "x")]


def measure(runs: int = 5, rollouts: int = 500, concurrency: int = 32) -> tuple[dict[str, Any], list[Bar]]:
    """The whole benchmark, for `campaigns.bench.servers`."""
    return report(*uvloop.run(rollout_rounds(runs, rollouts, concurrency)))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    arguments = parser.parse_args()
    figures, bars = measure(arguments.runs, arguments.rollouts, arguments.concurrency)
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
