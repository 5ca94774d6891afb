"""Measure rollouts through the shipped compositions, each compared with a bare chain of the same hops.

    python -m campaigns.bench.compositions [--json] [--runs 3] [--rollouts 500] [--concurrency 32] [--only NAME …]

*Shipped*: servers as ``ng_run`` starts them and whole collections: rows checked, durable store, result files. The
model behind `openai` and `gateway` is a process that responds at once. *Bare*: the same hops with handlers of a few
lines (``tests/rollouts/chain.py``) and a loop of posts; nothing is checked or kept. It makes six posts per rollout:
open a model session, seed, act, verify, finalize, close. If an environment has nothing to release, the shipped
pipeline leaves out the last one. In the bare chain, the protocol's official library serves and calls tools over MCP,
with one client for all rollouts. Both run in turns on servers that stay up; the bars are on the ratio of their rates,
and, for the compositions that people measure, on rollouts per second and on the CPU of the environment, agent and
model servers. The CPU of the pipeline (with its store) and of the fake model are separate figures.

*Memory*: that of each server after 20,000 rollouts over that after 10,000, for the compositions in `MEMORY`. The first
ten thousand fill whatever is kept up to a limit, and the environment's heap, through the one request with all rows
that computes the metrics.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.composition_parts import nothing
from campaigns.bench.gateway_parts.processes import Running, child
from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from campaigns.bench.rollouts import Round, bare_rollouts, measured, suite_stack
from tests.rollouts.chain_process import ChainServer

ROOT = Path(__file__).resolve().parents[2]
RATE_RATIO_AT_LEAST = 0.5
RATE_AT_LEAST = 400.0
SERVER_CPU_AT_MOST_MS = 4.0
MEMORY_RATIO_AT_MOST = 1.1
MEMORY_ROLLOUTS = 10_000
MEASURED_BY_PEOPLE = ("simple_agent × mcqa × openai", "simple_agent × math × openai")
MEMORY = (*MEASURED_BY_PEOPLE[:1], "simple_agent × mcqa × gateway", "simple_agent × weather × scripted")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Task:
    """An environment with one of its example rows, and a model's responses to it."""

    environment: str
    row: int
    says: dict[str, Any]
    """The fake model's script: ``text``, and optionally a ``tool`` that it calls first."""
    asks: tuple[str, ...] = ("/responses",)
    """An agent's calls in order: routes of the model, or the name of the environment's tool."""

    def rows(self, count: int) -> list[dict[str, Any]]:
        source = ROOT / "resources_servers" / self.environment / "data" / "example.jsonl"
        row = orjson.loads(source.read_bytes().splitlines()[self.row])
        if "responses_create_params" not in row:
            row["responses_create_params"] = {"input": [{"role": "user", "content": row["question"]}]}
        return [{**row, "id": f"{row['task_id']}-{number}", "task_id": f"t{number}"} for number in range(count)]


MCQA = Task("mcqa", 0, {"text": "The capital is \\boxed{B}"})
MATH = Task("math", 0, {"text": "The fence is \\boxed{46} metres long"})
WEATHER = Task(
    "example_mcp_weather",
    3,
    {"text": "It is 1.1 °C in Quito.", "tool": "get_weather", "arguments": {"city": "Quito"}},
    ("/responses", "get_weather", "/responses"),
)
BOX = Task(
    "math", 0, {"text": "\\boxed{46}", "tool": "bash", "arguments": {"command": SUBMIT}}, ("/chat/completions",)
)


@dataclass(frozen=True)
class Composition:
    agent: str
    task: Task
    model: str
    words: tuple[str, ...] = ()
    name: str = field(init=False)

    def __post_init__(self) -> None:
        environment = self.task.environment.removeprefix("example_mcp_")
        where = "nothing" if self.task is BOX else environment
        object.__setattr__(self, "name", f"{self.agent} × {where} × {self.model}")

    @property
    def reward(self) -> float:
        """The reward of every rollout; none in a box that does nothing."""
        return 0.0 if self.task is BOX else 1.0


COMPOSITIONS = [
    *(
        Composition("simple_agent", task, model)
        for task in (MCQA, MATH, WEATHER)
        for model in ("openai", "gateway", "scripted")
    ),
    Composition("mini_swe_agent", BOX, "openai"),
]


@dataclass
class Measured:
    """The measurements of one composition."""

    bare: list[Round] = field(default_factory=list)
    shipped: list[Round] = field(default_factory=list)
    model_cpu_ms: list[float] = field(default_factory=list)
    by_server: dict[str, list[float]] = field(default_factory=dict)
    """CPU milliseconds per rollout."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """MiB of each server: after the warm-up, after `MEMORY_ROLLOUTS` more, and after as many again."""

    def figures(self) -> dict[str, Any]:
        ratios = [shipped.rate / bare.rate for shipped, bare in zip(self.shipped, self.bare, strict=True)]
        all_ms = [one.server_cpu_ms + one.driver_cpu_ms for one in self.shipped]
        return {
            "rate_ratio": Samples(ratios).summary(3),
            "cpu_ratio": round(
                Samples([one.server_cpu_ms + one.driver_cpu_ms for one in self.bare]).median / Samples(all_ms).median,
                3,
            ),
            "rollouts_per_s": Samples([one.rate for one in self.shipped]).summary(1),
            "bare_rollouts_per_s": Samples([one.rate for one in self.bare]).summary(1),
            "server_cpu_ms": Samples([one.server_cpu_ms for one in self.shipped]).summary(3),
            "by_server_cpu_ms": {name: round(Samples(values).median, 3) for name, values in self.by_server.items()},
            "pipeline_cpu_ms": Samples([one.driver_cpu_ms for one in self.shipped]).summary(3),
            "fake_model_cpu_ms": round(Samples(self.model_cpu_ms).median, 3),
            "bare_server_cpu_ms": round(Samples([one.server_cpu_ms for one in self.bare]).median, 3),
            "bare_driver_cpu_ms": round(Samples([one.driver_cpu_ms for one in self.bare]).median, 3),
            **({"memory_mib": self.memory} if self.memory else {}),
        }

    def bars(self, name: str) -> list[Bar]:
        figures = self.figures()
        found = [
            Bar.at_least(f"{name}: rate over bare chain", figures["rate_ratio"]["median"], RATE_RATIO_AT_LEAST, "x")
        ]
        if name in MEASURED_BY_PEOPLE:
            rate, cpu = figures["rollouts_per_s"]["median"], figures["server_cpu_ms"]["median"]
            found.append(Bar.at_least(f"{name}: rollouts", rate, RATE_AT_LEAST, "1/s"))
            found.append(Bar.at_most(f"{name}: server CPU per rollout", cpu, SERVER_CPU_AT_MOST_MS, "ms"))
        if self.memory:
            most = max(after / before for _, before, after in self.memory.values())
            found.append(
                Bar.at_most(f"{name}: memory over {MEMORY_ROLLOUTS} rollouts", most, MEMORY_RATIO_AT_MOST, "x")
            )
        return found


@contextlib.contextmanager
def fake_model(task: Task) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        script = ROOT / "campaigns" / "bench" / "composition_parts" / "fake_model.py"
        command = [sys.executable, str(script), str(listener.fileno()), orjson.dumps(task.says).decode()]
        with child(command, pass_fds=(listener.fileno(),)) as process:
            yield Running(url, process.pid)


@contextlib.contextmanager
def bare_chain(composition: Composition, model_url: str) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Start the bare chain; yield URLs by role, and process ids."""
    chain: dict[str, ChainServer] = {}
    try:
        asks = composition.task.asks
        tool = next((route for route in asks if not route.startswith("/")), None)
        chain["environment"] = ChainServer("environment", {"plain": True, "tool": tool})
        tools = {"mcp": f"http://127.0.0.1:{chain['environment'].port}/mcp"} if tool else {}
        forwards = {} if composition.model == "scripted" else {"forwards_to": f"{model_url}/v1"}
        chain["agent"] = ChainServer("agent", {"asks": asks, **tools})
        chain["model"] = ChainServer("model", forwards)
        for server in chain.values():
            server.wait_ready()
        urls = {role: f"http://127.0.0.1:{server.port}" for role, server in chain.items()}
        yield urls, [server.process.pid or 0 for server in chain.values()]
    finally:
        for server in chain.values():
            server.stop()


def words_of(composition: Composition, model_url: str) -> tuple[str, ...]:
    chosen = (
        f"agent={composition.agent}",
        f"environment={composition.task.environment}",
        f"model={composition.model}",
    )
    endpoint = () if composition.model == "scripted" else (f"policy_base_url={model_url}/v1", "policy_model_name=fake")
    return (*chosen, *endpoint, *composition.words)


def memory_mib(pid: int) -> float:
    """Return the memory of one process that it shares with no other."""
    return float(psutil.Process(pid).memory_full_info().uss) / 2**20


async def compare(
    composition: Composition, runs: int, rollouts: int, concurrency: int, *, memory: bool = False
) -> Measured:
    """Measure ``runs`` rounds of both, in turns, after a warm-up round."""
    from nemo_gym.http.client import close_global_aiohttp_client
    from nemo_gym.rollouts.collection import run_collection
    from nemo_gym.stack.stack import pipeline_client

    results = Measured()
    rows = composition.task.rows(rollouts)
    with (
        tempfile.TemporaryDirectory() as directory,
        fake_model(composition.task) as model,
        bare_chain(composition, model.url) as (urls, bare_pids),
    ):
        source = Path(directory, "in.jsonl")
        source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        async with suite_stack(words_of(composition, model.url)) as stack:
            client = pipeline_client(stack)
            pids = {server.instance: server.pid for server in stack.servers}

            async def collect(repeats: int = 1) -> None:
                output = Path(directory, "out.jsonl")
                keys = {"input": source, "output": output, "concurrency": concurrency, "overwrite": True}
                for old in Path(directory).glob("out*"):
                    old.unlink()
                result = await run_collection(
                    client, {**keys, "agent_name": stack.chosen["agent"], "num_repeats": repeats}
                )
                assert (result.valid, result.invalid) == (rollouts * repeats, 0), result
                assert result.aggregates[0]["agent_metrics"]["mean/reward"] == composition.reward

            try:
                for number in range(runs + 1):
                    bare = await measured(bare_pids, rollouts, lambda: bare_rollouts(urls, rows, concurrency))
                    before = model.cpu_s()
                    cpu_before_s = {name: _cpu_s(pid) for name, pid in pids.items()}
                    shipped = await measured([*pids.values()], rollouts, collect)
                    spent_s = {name: _cpu_s(pid) - cpu_before_s[name] for name, pid in pids.items()}
                    if number:
                        results.bare.append(bare)
                        results.shipped.append(replace(shipped, server_cpu_s=sum(spent_s.values())))
                        results.model_cpu_ms.append(1000 * (model.cpu_s() - before) / rollouts)
                        for name, seconds in spent_s.items():
                            results.by_server.setdefault(name, []).append(1000 * seconds / rollouts)
                if memory:
                    for repeats in (0, MEMORY_ROLLOUTS // rollouts, MEMORY_ROLLOUTS // rollouts):
                        if repeats:
                            await collect(repeats)
                        for name, pid in pids.items():
                            results.memory.setdefault(name, []).append(round(memory_mib(pid), 1))
            finally:
                await close_global_aiohttp_client()
    return results


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a server and of the processes in which it grades."""
    server = psutil.Process(pid)
    return float(sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True))))


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--only", nargs="+", default=[], help="compositions whose names hold one of these words")
    parser.add_argument("--no-memory", action="store_true", help="leave out the 20,000 rollouts")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    with nothing.installed() as (entry_points, sandbox):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(entry_points), str(ROOT)])
        sys.path.insert(0, str(entry_points))
        for composition in COMPOSITIONS:
            if arguments.only and not any(word in composition.name for word in arguments.only):
                continue
            chosen = replace(composition, words=(f"sandbox={sandbox}",)) if composition.task is BOX else composition
            memory = composition.name in MEMORY and not arguments.no_memory
            results = uvloop.run(
                compare(chosen, arguments.runs, arguments.rollouts, arguments.concurrency, memory=memory)
            )
            figures[composition.name] = results.figures()
            bars += results.bars(composition.name)
            if not arguments.json:
                print(composition.name, figures[composition.name], flush=True)
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
