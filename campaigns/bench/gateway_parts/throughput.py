"""Measure calls per second with many callers at once, each in its own conversation."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from campaigns.bench.gateway_parts.doors import Door, Talk
from campaigns.bench.gateway_parts.wire import Connection, WireError


@dataclass(frozen=True)
class Round:
    """One measurement of one door."""

    calls: int
    failed: int
    seconds: float
    cpu_s: float | None
    p50_ms: float
    p99_ms: float

    @property
    def rate(self) -> float:
        return (self.calls - self.failed) / self.seconds


async def measured(door: Door, callers: int, turns: int, spread_s: float) -> Round:
    """Measure one door. Sessions are opened before the timed part and closed after it. Callers start evenly over
    ``spread_s`` seconds, so that they are spread as in a run that has been going on."""
    connections = [Connection(door.url) for _ in range(callers)]
    talks: list[Talk] = [*await asyncio.gather(*(door.open(one, number) for number, one in enumerate(connections)))]
    spent: list[float] = []
    failed = 0

    async def caller(number: int, talk: Talk) -> None:
        nonlocal failed
        await asyncio.sleep(spread_s * number / callers)
        for _ in range(turns):
            begin = time.perf_counter()
            try:
                await talk.turn()
            except (WireError, TimeoutError, OSError):
                failed += 1
            spent.append(1000 * (time.perf_counter() - begin))

    cpu = door.server.cpu_s() if door.server is not None else None
    begin = time.perf_counter()
    await asyncio.gather(*(caller(number, talk) for number, talk in enumerate(talks)))
    seconds = time.perf_counter() - begin
    used = door.server.cpu_s() - cpu if door.server is not None and cpu is not None else None
    await asyncio.gather(*(talk.close() for talk in talks))
    for connection in connections:
        connection.close()
    spent.sort()
    return Round(len(spent), failed, seconds, used, statistics.median(spent), spent[int(0.99 * (len(spent) - 1))])


async def lost(
    pairs: list[tuple[Door, Door]],
    callers: int,
    turns: int,
    rounds: int,
    spread_s: float,
    before_each: Callable[[], Awaitable[None]],
) -> dict[str, dict[str, Any]]:
    """Return, by door's name, the throughput lost in each pair (door, the engine itself). Rounds alternate between
    doors; a door's loss is the median over rounds."""
    doors = [*dict.fromkeys(door for pair in pairs for door in pair)]
    rounds_by_door: dict[Door, list[Round]] = {door: [] for door in doors}
    for _ in range(rounds):
        for door in doors:
            await before_each()
            rounds_by_door[door].append(await measured(door, callers, turns, spread_s))
    results = {}
    for door, engine in pairs:
        door_rounds, engine_rounds = rounds_by_door[door], rounds_by_door[engine]
        losses = [1 - each.rate / other.rate for each, other in zip(door_rounds, engine_rounds, strict=True)]
        results[door.name] = {
            "lost_share": round(statistics.median(losses), 4),
            "lost_share_by_round": [round(loss, 4) for loss in losses],
            "calls_per_s": round(statistics.median(each.rate for each in door_rounds), 1),
            "engine_calls_per_s": round(statistics.median(each.rate for each in engine_rounds), 1),
            "p50_ms": round(statistics.median(each.p50_ms for each in door_rounds), 1),
            "p99_ms": round(statistics.median(each.p99_ms for each in door_rounds), 1),
            "engine_p50_ms": round(statistics.median(each.p50_ms for each in engine_rounds), 1),
            "engine_p99_ms": round(statistics.median(each.p99_ms for each in engine_rounds), 1),
            "failed": sum(each.failed for each in door_rounds),
        }
        if door.server is not None:
            cpu = statistics.median(1000 * (each.cpu_s or 0.0) / each.calls for each in door_rounds)
            results[door.name]["cpu_ms_per_call"] = round(cpu, 3)
    return results
