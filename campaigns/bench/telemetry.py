"""Measure what traces cost: no-op rollouts with and without traces, in turns, on the same servers.

    python -m campaigns.bench.telemetry [--json] [--runs 9] [--rollouts 400] [--concurrency 32]

The stack traces half of all attempts (``observability.traces.sample=0.5``). An attempt's identity decides whether it
is traced, so each turn runs one whole collection with only traced attempts and one with none, in alternating order.
There is one stack, because two stacks differ by up to 5 % of their CPU even when neither traces anything. The cost of
finding out that an attempt is not traced is measured separately and added.

The collector is a process that only reads and responds. Its own CPU is not counted; that of servers and pipeline is,
including sending. The bar is on CPU per rollout, which determines the rate on a machine with no other load; the ratio
of rates is a figure beside it.

*Off* is the cost of one step when traces are off: two readings of the clock and a count.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.rollouts import COMPOSITION, Round, measured, suite_stack, write_rows
from nemo_gym.config.observability import TracesConfig
from nemo_gym.contract.verdict import TASK_INDEX_KEY, rollout_id_of
from nemo_gym.http import observability, telemetry
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.stack.stack import pipeline_client

SLOWER_AT_MOST = 0.03
SAMPLE = 0.5
ATTEMPTS_ASKED_ABOUT = 2
"""How often a rollout checks whether it is traced: once in the pipeline, once in the model server for its one call."""
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
    """Run a collector that discards what it receives; yield its URL."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _COLLECTOR, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


def write_halves(directory: Path, rollouts: int, run_id: str) -> dict[bool, Path]:
    """Write two inputs of ``rollouts`` rows each; return them by whether their attempts are traced in this run."""
    files = {is_on: directory / f"{is_on}.jsonl" for is_on in (False, True)}
    rows = write_rows(files[True], 4 * rollouts)
    halves: dict[bool, list[bytes]] = {False: [], True: []}
    for index, row in enumerate(rows):
        rollout = {"run_id": run_id, "rollout_id": rollout_id_of(run_id, index, 0), "attempt": 1}
        half = halves[telemetry.attempt_context(rollout) is not None]
        half.append(orjson.dumps({**row, TASK_INDEX_KEY: index}, option=orjson.OPT_APPEND_NEWLINE))
    for is_on, half in halves.items():
        assert len(half) >= rollouts, "fewer than `rollouts` rows fall into one half"
        files[is_on].write_bytes(b"".join(half[:rollouts]))
    return files


async def turns(runs: int, rollouts: int, concurrency: int) -> tuple[list[Round], list[Round], float]:
    """Measure rounds without and with traces, after a warm-up of each; return both, and the pipeline's spans per
    rollout."""
    off: list[Round] = []
    on: list[Round] = []
    async with AsyncExitStack() as undo:
        url = await undo.enter_async_context(collector())
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        keys = (f"observability.traces.endpoint={url}", f"observability.traces.sample={SAMPLE}")
        stack = await undo.enter_async_context(suite_stack((*COMPOSITION, *keys)))
        exporter = observability.SpanExporter(
            TracesConfig(endpoint=url), {"service.name": "pipeline", "run_id": "bench"}
        )
        telemetry.install(exporter, SAMPLE)
        client = pipeline_client(stack)

        async def run(source: Path, run_id: str) -> None:
            output = {"output": directory / "out" / source.name, "overwrite": True, "run_id": run_id}
            options = {"concurrency": concurrency, "agent_name": stack.chosen["agent"]}
            result = await run_collection(client, {"input": source, **output, **options})
            assert (result.valid, result.invalid) == (rollouts, 0)

        pids = [server.pid for server in stack.servers]
        for number in range(runs + 1):
            inputs = write_halves(directory, rollouts, run_id := f"bench-{number}")
            for is_on in (False, True) if number % 2 else (True, False):
                one_round = await measured(pids, rollouts, partial(run, inputs[is_on], run_id))
                if number:
                    (on if is_on else off).append(one_round)
        await asyncio.to_thread(exporter.close)
        telemetry.install(None)
        assert not observability.DROPPED.values, observability.DROPPED.values
        await close_global_aiohttp_client()
        return off, on, observability.EXPORTED.values[()] / ((runs + 1) * rollouts)


def sampling_us(count: int = 50_000) -> float:
    """Return the µs of CPU that it takes to find out that one attempt is not traced."""
    rollout = {"run_id": "bench", "rollout_id": rollout_id_of("bench", 0, 0), "attempt": 1}
    telemetry.install(_Nowhere(), 0.0)
    start = time.process_time()
    for _ in range(count):
        telemetry.attempt_context(rollout)
    spent = time.process_time() - start
    telemetry.install(None)
    return spent / count * 1e6


class _Nowhere:
    """Exports nothing."""

    def take(self, span: telemetry.Span) -> None: ...

    def close(self) -> None: ...


def step_us(count: int = 200_000) -> float:
    """Return the µs of CPU of one step with traces off."""
    start = time.process_time()
    for _ in range(count):
        with telemetry.step("bench", peer="server"):
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
    asked_ms = ATTEMPTS_ASKED_ABOUT * sampling_us() / 1000
    slower = Samples([(ours + asked_ms) / theirs - 1 for ours, theirs in zip(cpu_ms(on), cpu_ms(off), strict=True)])
    rates = Samples([ours.rate / theirs.rate for ours, theirs in zip(on, off, strict=True)])
    figures: dict[str, Any] = {
        "off_rollouts_per_s": Samples([one.rate for one in off]).summary(1),
        "on_rollouts_per_s": Samples([one.rate for one in on]).summary(1),
        "rate_ratio": rates.summary(3),
        "off_cpu_ms_per_rollout": Samples(cpu_ms(off)).summary(3),
        "on_cpu_ms_per_rollout": Samples(cpu_ms(on)).summary(3),
        "more_cpu_per_rollout": slower.summary(4),
        "pipeline_spans_per_rollout": round(spans, 2),
        "ms_per_rollout_to_ask_whether_it_is_traced": round(asked_ms, 4),
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
