"""Measure what a door adds to a call when nothing else runs: calls go in turns to the door and to the engine."""

from __future__ import annotations

import statistics
import time
from typing import Any

from campaigns.bench.gateway_parts.doors import Door
from campaigns.bench.gateway_parts.wire import Connection

TURNS = 8


async def added(pairs: list[tuple[Door, Door]], conversations: int) -> dict[str, dict[str, Any]]:
    """Return, by door's name, the milliseconds of each pair (door, the engine itself), and their difference."""
    doors = [*dict.fromkeys(door for pair in pairs for door in pair)]
    spent: dict[Door, list[float]] = {door: [] for door in doors}
    cpu: dict[Door, float] = {}
    waited: dict[Door, float] = {}
    connections = {door: Connection(door.url) for door in doors}
    for number in range(conversations + 1):
        if number == 1:  # the first is a warm-up
            spent = {door: [] for door in doors}
            cpu = {door: door.server.cpu_s() for door in doors if door.server is not None}
            waited = {door: door.server.waited_s() for door in cpu if door.server is not None}
        talks = {door: await door.open(connections[door], number) for door in doors}
        for _ in range(TURNS):
            for door, talk in talks.items():
                begin = time.perf_counter()
                await talk.turn()
                spent[door].append(1000 * (time.perf_counter() - begin))
        for talk in talks.values():
            await talk.close()
    for connection in connections.values():
        connection.close()
    results: dict[str, dict[str, Any]] = {}
    for door, engine in pairs:
        through, direct = _quantiles(spent[door]), _quantiles(spent[engine])
        results[door.name] = {
            "added_p50_ms": round(through["p50"] - direct["p50"], 3),
            "added_p99_ms": round(through["p99"] - direct["p99"], 3),
            "through_ms": through,
            "engine_ms": direct,
            "calls": len(spent[door]),
        }
        if door.server is not None:
            used, lacked = door.server.cpu_s() - cpu[door], door.server.waited_s() - waited[door]
            # Opening and closing the conversations is included.
            results[door.name]["cpu_ms_per_call"] = round(1000 * used / len(spent[door]), 3)
            results[door.name]["waited_for_a_core_ms_per_call"] = round(1000 * lacked / len(spent[door]), 3)
    return results


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
    }
