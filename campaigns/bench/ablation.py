"""Measure what each of the gateway's optimizations saves, with calls in turns to a gateway with it and one without.

    python -m campaigns.bench.ablation [--json] [--only NAME,...] [--conversations 60]

Two gateways run at a time, alike except that the second runs without one mechanism (``gateway_parts/mechanisms.py``
patches module attributes, the product has no switches). Calls go to both alternately. The policy's tokenizer has
150,000 entries; tool outputs are passages of Python source.

instant      conversations of eight turns, an engine that answers at once: wall p50 and CPU of a call
realistic    16 conversations at once, an engine that takes 300 ms: the same
turn_200     the CPU of a call at turns 181 to 200 of one conversation
long_answer  the CPU of a call that is answered with 16,384 tokens

CPU is the gateway process's own, by the kernel's clock: on a busy machine it is more reliable than wall time. A
mechanism must save 50 µs of CPU or 2 % on one of these paths, beyond what the row ``nothing`` (two equal gateways)
shows. One that misses this bar is deleted, unless `Mechanism.kept_for` gives another reason to keep it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from campaigns.bench.gateway_parts import conversations
from campaigns.bench.gateway_parts.conversations import Load
from campaigns.bench.gateway_parts.doors import ChatTalk, GatewayDoor, gateway, text_kind, token_kind
from campaigns.bench.gateway_parts.engine import Scenario
from campaigns.bench.gateway_parts.large_policy import make_large_policy, tool_outputs
from campaigns.bench.gateway_parts.mechanisms import MECHANISMS, VARIABLE
from campaigns.bench.gateway_parts.processes import on_socket
from campaigns.bench.gateway_parts.wire import Connection
from campaigns.bench.report import Bar, argument_parser, print_report
from nemo_gym._util.files import cache_root
from nemo_gym.http.webserver import keep_memory, raise_file_limit

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).parent / "gateway_parts" / "ablated"
TURNS, LATE_TURNS, LATE_FROM = 8, 200, 180
CALLERS, ENGINE_S, REALISTIC_TURNS, REALISTIC_ROUNDS = 16, 0.3, 4, 3
LONG_TOKENS, LONG_CALLS = 16_384, 9
WORTH_US, WORTH_SHARE = 50.0, 0.02
PATHS = ("instant", "realistic", "turn_200", "long_answer")


@dataclass(frozen=True)
class Spent:
    """The cost of one call."""

    wall_ms: float
    cpu_ms: float


async def _turn(door: GatewayDoor, talk: ChatTalk) -> Spent:
    body = talk.chat.body()
    cpu, begin = door.server.cpu_s(), time.perf_counter()
    await talk.ask(body)
    return Spent(1000 * (time.perf_counter() - begin), 1000 * (door.server.cpu_s() - cpu))


class Ablation:
    """Both gateways, and the engine behind them."""

    def __init__(self, load: Load, engine_url: str, pair: tuple[GatewayDoor, GatewayDoor], amount: int) -> None:
        self._load = load
        self._engine_url = engine_url
        self._doors = pair
        self._connections = {door: Connection(door.url) for door in pair}
        self._amount = amount

    async def play(self, answer: Scenario) -> None:
        connection = Connection(self._engine_url)
        (await connection.post("/scenario", answer.to_json())).json()
        connection.close()

    async def figures(self) -> dict[str, Any]:
        """Return, for each path, wall p50 and CPU per call with the mechanism, and what the mechanism saves."""
        await self.play(self._load.tool_answer())
        figures_by_path = {"instant": await self.instant(), "turn_200": await self.late()}
        await self.play(self._load.long_answer(LONG_TOKENS))
        figures_by_path["long_answer"] = await self.long_answers()
        await self.play(self._load.tool_answer(delay_s=ENGINE_S, jitter=0.25))
        figures_by_path["realistic"] = await self.realistic()
        for connection in self._connections.values():
            connection.close()
        return {path: figures_by_path[path] for path in PATHS}

    async def _conversation(self, number: int, turns: int, measured_from: int, spent: list[list[Spent]]) -> None:
        talks = [await door.open(self._connections[door], number) for door in self._doors]
        for turn in range(turns):
            for place in (0, 1) if turn % 2 else (1, 0):
                cost = await _turn(self._doors[place], talks[place])
                if turn >= measured_from:
                    spent[place].append(cost)
        for talk in talks:
            await talk.close()

    async def instant(self) -> dict[str, float]:
        spent: list[list[Spent]] = [[], []]
        await self._conversation(0, TURNS, TURNS, spent)  # warm-up
        for number in range(self._amount):
            await self._conversation(number, TURNS, 0, spent)
        return _compared(spent)

    async def late(self) -> dict[str, float]:
        spent: list[list[Spent]] = [[], []]
        for number in range(2):
            await self._conversation(number, LATE_TURNS, LATE_FROM, spent)
        return _compared(spent)

    async def long_answers(self) -> dict[str, float]:
        spent: list[list[Spent]] = [[], []]
        for number in range(LONG_CALLS):
            await self._conversation(number, 1, 0 if number else 1, spent)
        return _compared(spent)

    async def realistic(self) -> dict[str, float]:
        spent: list[list[Spent]] = [[], []]
        for number in range(REALISTIC_ROUNDS):
            for place in (0, 1) if number % 2 else (1, 0):
                spent[place] += await self._callers(self._doors[place])
        return _compared(spent)

    async def _callers(self, door: GatewayDoor) -> list[Spent]:
        connections = [Connection(door.url) for _ in range(CALLERS)]
        talks = [await door.open(connection, number) for number, connection in enumerate(connections)]
        walls: list[float] = []

        async def caller(number: int, talk: ChatTalk) -> None:
            await asyncio.sleep(ENGINE_S * number / CALLERS)
            for _ in range(REALISTIC_TURNS):
                begin = time.perf_counter()
                await talk.turn()
                walls.append(1000 * (time.perf_counter() - begin))

        cpu = door.server.cpu_s()
        await asyncio.gather(*(caller(number, talk) for number, talk in enumerate(talks)))
        used = 1000 * (door.server.cpu_s() - cpu) / len(walls)
        for talk in talks:
            await talk.close()
        for connection in connections:
            connection.close()
        return [Spent(wall, used) for wall in walls]


def _compared(spent: list[list[Spent]]) -> dict[str, float]:
    with_it, without = spent
    walls = [statistics.median(one.wall_ms for one in each) for each in (with_it, without)]
    # Medians, because garbage collections and other work on the same cores make a few calls many times as long.
    cpu = statistics.median(one.cpu_ms for one in with_it)
    saved = statistics.median(two.cpu_ms - one.cpu_ms for one, two in zip(with_it, without, strict=True))
    return {
        "p50_ms": round(walls[0], 3),
        "p50_saved_us": round(1000 * (walls[1] - walls[0]), 1),
        "cpu_ms": round(cpu, 3),
        "cpu_saved_us": round(1000 * saved, 1),
        "cpu_saved_share": round(saved / (cpu + saved), 4),
    }


@contextlib.contextmanager
def without(name: str | None) -> Iterator[None]:
    """Start gateways in the block without the mechanism ``name``."""
    before = dict(os.environ)
    if name is not None:
        os.environ |= {VARIABLE: name, "PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


async def run(names: list[str], amount: int) -> tuple[dict[str, Any], list[Bar]]:
    raise_file_limit()
    conversations.results = tool_outputs
    by_name: dict[str, Any] = {}
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        policy = make_large_policy(folder / "policy", cache_root() / "bench")
        load = Load(policy)
        engine = resources.enter_context(on_socket("engine.py"))
        kinds = {"token": token_kind(engine.url, policy), "text": text_kind(engine.url)}
        for name in names:
            kind = MECHANISMS[name].kind
            # Start both anew: a gateway that has had a thousand sessions is slower by more than most mechanisms save.
            with contextlib.ExitStack() as gateways:
                plain = await asyncio.to_thread(gateways.enter_context, gateway(kinds[kind]))
                with without(name):
                    ablated = await asyncio.to_thread(gateways.enter_context, gateway(kinds[kind]))
                figures = await Ablation(load, engine.url, (plain, ablated), amount).figures()
                by_name[name] = {"files": MECHANISMS[name].files, "kept_for": MECHANISMS[name].kept_for, **figures}
                await asyncio.to_thread(gateways.close)
            print(name, {path: figures[path]["cpu_saved_us"] for path in PATHS}, file=sys.stderr, flush=True)
        await asyncio.to_thread(resources.close)
    return {"mechanisms": by_name}, _bars(by_name)


def _bars(by_name: dict[str, Any]) -> list[Bar]:
    alike = by_name.get("nothing")
    bars = []
    for name, figures in by_name.items():
        if MECHANISMS[name].kept_for:
            continue
        worth = 0.0
        for path in PATHS:
            noise_us = abs(alike[path]["cpu_saved_us"]) if alike is not None else 0.0
            saved_us = figures[path]["cpu_saved_us"] - noise_us
            share = saved_us / 1000 / figures[path]["cpu_ms"]
            worth = max(worth, saved_us / WORTH_US, share / WORTH_SHARE)
        bars.append(Bar.at_least(f"{name}: the larger of saved / 50 µs and saved share / 2 %", worth, 1.0, "x"))
    return bars


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=",".join(MECHANISMS), help="mechanisms, separated by commas; default: all")
    parser.add_argument("--conversations", type=int, default=60, help="of eight turns, for 'instant'")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := {*names} - {*MECHANISMS}:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(MECHANISMS)}")
    keep_memory()
    figures, bars = uvloop.run(run(names, arguments.conversations))
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
