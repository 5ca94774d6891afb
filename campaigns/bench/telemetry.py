"""What traces cost: no-op rollouts with and without them, by turns, on servers that stay up.

    python -m campaigns.bench.telemetry [--json] [--runs 9] [--rollouts 400] [--concurrency 32]

Two stacks of the same composition stand side by side, one with `observability.traces` and one without; each turn runs
a whole collection on both, the first of them alternating. The collector is a process that reads and answers, and
nothing more. Its own CPU is not counted; that of servers and pipeline is, sending included. The bar is on CPU per
rollout, which is what the rate comes to when nothing else loads the machine; the ratio of rates stands beside it.

*Off* is the cost of one step where traces are off: two looks at the clock and a count.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.rollouts import COMPOSITION, Round, measured, suite_stack, write_rows
from nemo_gym.config.observability import TracesConfig
from nemo_gym.http import otlp, tracing
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.stack.stack import pipeline_client

SLOWER_AT_MOST = 0.03
STEP_US_AT_MOST = 10.0
_COLLECTOR = """
import asyncio

async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\\r")[0])
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    except asyncio.IncompleteReadError:
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """The URL of a collector that throws away what it gets."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _COLLECTOR, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


async def turns(runs: int, rollouts: int, concurrency: int) -> tuple[list[Round], list[Round], float]:
    """Rounds without and with traces, after one of each that warms up, and spans per rollout of the pipeline."""
    off: list[Round] = []
    on: list[Round] = []
    async with AsyncExitStack() as undo:
        url = await undo.enter_async_context(collector())
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        source = directory / "in.jsonl"
        write_rows(source, rollouts)
        traced = (*COMPOSITION, f"observability.traces.endpoint={url}")
        stacks = {
            False: await undo.enter_async_context(suite_stack()),
            True: await undo.enter_async_context(suite_stack(traced)),
        }
        exporter = otlp.SpanExporter(TracesConfig(endpoint=url), {"service.name": "pipeline", "run_id": "bench"})

        async def one(is_on: bool) -> Round:
            stack = stacks[is_on]
            client = pipeline_client(stack)
            keys = {"input": source, "output": directory / f"{is_on}.jsonl", "overwrite": True}

            async def run() -> None:
                given = {**keys, "concurrency": concurrency, "agent_name": stack.chosen["agent"]}
                result = await run_collection(client, given)
                assert (result.valid, result.invalid) == (rollouts, 0)

            tracing.install(exporter if is_on else None)
            try:
                return await measured([server.pid for server in stack.servers], rollouts, run)
            finally:
                tracing.install(None)

        for number in range(runs + 1):
            for is_on in (False, True) if number % 2 else (True, False):
                found = await one(is_on)
                if number:
                    (on if is_on else off).append(found)
        exporter.close()
        assert not otlp.DROPPED.values, otlp.DROPPED.values
        await close_global_aiohttp_client()
        return off, on, otlp.EXPORTED.values[()] / ((runs + 1) * rollouts)


def step_us(count: int = 200_000) -> float:
    """One step with traces off, in µs of CPU."""
    start = time.process_time()
    for _ in range(count):
        with tracing.step("bench", peer="server"):
            pass
    return (time.process_time() - start) / count * 1e6


def cpu_ms(rounds: list[Round]) -> list[float]:
    return [one.server_cpu_ms + one.driver_cpu_ms for one in rounds]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=32)
    chosen = parser.parse_args()
    off_us = step_us()
    off, on, spans = uvloop.run(turns(chosen.runs, chosen.rollouts, chosen.concurrency))
    slower = Samples([ours / theirs - 1 for ours, theirs in zip(cpu_ms(on), cpu_ms(off), strict=True)])
    rates = Samples([ours.rate / theirs.rate for ours, theirs in zip(on, off, strict=True)])
    figures: dict[str, Any] = {
        "off_rollouts_per_s": Samples([one.rate for one in off]).summary(1),
        "on_rollouts_per_s": Samples([one.rate for one in on]).summary(1),
        "rate_ratio": rates.summary(3),
        "off_cpu_ms_per_rollout": Samples(cpu_ms(off)).summary(3),
        "on_cpu_ms_per_rollout": Samples(cpu_ms(on)).summary(3),
        "more_cpu_per_rollout": slower.summary(4),
        "pipeline_spans_per_rollout": round(spans, 2),
        "step_us_when_off": round(off_us, 2),
    }
    return print_report(
        figures,
        [
            Bar.at_most("CPU per no-op rollout, traces on over off, less 1", slower.median, SLOWER_AT_MOST),
            Bar.at_most("one step with traces off", off_us, STEP_US_AT_MOST, "us"),
        ],
        as_json=chosen.json,
    )


if __name__ == "__main__":
    sys.exit(main())
