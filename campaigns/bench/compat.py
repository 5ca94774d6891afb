"""Measure NeMo Gym's own plugins on this core, and compare them with their figures on NeMo Gym's core.

    python -m campaigns.bench.compat --plugins DIR [--json] [--runs 3] [--rollouts 500] [--concurrency 16]

``DIR`` holds NeMo Gym's plugins, unedited, as its wheel does. Environment (mcqa), agent (simple_agent) and model
server (openai_model) are all NeMo Gym's; the model behind them responds at once. *Start* is the time from the call
until every server is ready, *memory* the proportional set size of all processes that the start created, *CPU* that of
the servers alone. ``--theirs FILE`` is a JSON object with the same figures of NeMo Gym's core on this machine; the
default is `THEIRS`, the figures of release 0.7.0, each the best of three rounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.compositions import Task, fake_model
from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.stack import processes
from nemo_gym.stack.endpoints import pss_mib, running_stacks

THEIRS = {"rollouts_per_s": 147.0, "server_cpu_ms": 10.5, "start_s": 13.0, "memory_mib": 1675.0}
"""Release 0.7.0 on two cores, with the same plugins, 500 rows and 16 at once: each figure's best round."""
RATE_AT_LEAST, CPU_AT_MOST, START_AT_LEAST, MEMORY_AT_MOST = 3.0, 1 / 4, 10.0, 1 / 6
FILES = ("resources_servers/mcqa/configs/mcqa.yaml", "responses_api_models/openai_model/configs/openai_model.yaml")
ANSWER = "The answer is \\boxed{B}"


def rows_of(plugins: Path, count: int) -> list[dict[str, Any]]:
    """Return the plugin's first example ``count`` times, under different ids."""
    example = plugins / "resources_servers" / "mcqa" / "data" / "example.jsonl"
    row = orjson.loads(example.read_bytes().splitlines()[0])
    return [{**row, "id": f"q{number}"} for number in range(count)]


def measure(plugins: Path, model_url: str, runs: int, rollouts: int, concurrency: int) -> dict[str, Samples]:
    """Measure each figure ``runs`` times, after a warm-up round."""
    from nemo_gym import start

    samples: dict[str, list[float]] = {name: [] for name in (*THEIRS, "pipeline_cpu_ms")}
    rows = rows_of(plugins, rollouts)
    arguments = [f"+config_paths=[{','.join(FILES)}]"]
    policy = {"policy_base_url": f"{model_url}/v1", "policy_api_key": "key", "policy_model_name": "fake"}
    for number in range(runs + 1):
        begin = time.perf_counter()
        with start(*arguments, **policy) as stack:
            seconds = time.perf_counter() - begin
            (entry,) = (run for run in running_stacks() if psutil.Process(run.pid).ppid() == os.getpid())
            servers = [server.pid for server in entry.servers if server.pid is not None]
            memory = pss_mib(process.pid for process in processes(entry.pid))
            stack.run(rows[:concurrency], output=f"warm{number}.jsonl", concurrency=concurrency)
            before, driver, begin = _cpu_s(servers), time.process_time(), time.perf_counter()
            result = stack.run(rows, output=f"out{number}.jsonl", concurrency=concurrency)
            assert (len(result.rows), result.failures) == (rollouts, []), result.failures[:1]
            spent = result.collection.seconds
            assert spent is not None
            if number:
                samples["start_s"].append(seconds)
                samples["memory_mib"].append(memory)
                samples["rollouts_per_s"].append(rollouts / spent)
                samples["server_cpu_ms"].append(1000 * (_cpu_s(servers) - before) / rollouts)
                samples["pipeline_cpu_ms"].append(1000 * (time.process_time() - driver) / rollouts)
    return {name: Samples(values) for name, values in samples.items()}


def _cpu_s(pids: list[int]) -> float:
    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--plugins", type=Path, required=True, help="a directory with NeMo Gym's plugins")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--theirs", type=Path, help="a JSON object with NeMo Gym's figures on this machine")
    arguments = parser.parse_args()
    theirs = {**THEIRS, **(json.loads(arguments.theirs.read_text()) if arguments.theirs else {})}
    plugins = arguments.plugins.resolve()
    os.environ["NEMO_GYM_EXTRA_ROOTS"] = str(plugins)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).resolve().parents[2]), str(plugins)))
    with tempfile.TemporaryDirectory() as directory, fake_model(Task("mcqa", 0, {"text": ANSWER})) as model:
        os.environ["NEMO_GYM_CACHE_DIR"] = str(Path(directory, "cache"))
        os.chdir(directory)
        ours = measure(plugins, model.url, arguments.runs, arguments.rollouts, arguments.concurrency)
        os.chdir("/")
    figures = {"ours": {name: samples.summary(2) for name, samples in ours.items()}, "theirs": theirs}
    ratio = {name: ours[name].median / theirs[name] for name in THEIRS}
    bars = [
        Bar.at_least("rollouts per second, times theirs", ratio["rollouts_per_s"], RATE_AT_LEAST, "x"),
        Bar.at_most("server CPU per rollout, of theirs", ratio["server_cpu_ms"], CPU_AT_MOST, "x"),
        Bar.at_least("start, times faster", 1 / ratio["start_s"], START_AT_LEAST, "x"),
        Bar.at_most("memory of all processes, of theirs", ratio["memory_mib"], MEMORY_AT_MOST, "x"),
    ]
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
