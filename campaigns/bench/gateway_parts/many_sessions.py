"""Run a thousand sessions at once, each from open to finalize, and measure the memory that they take meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from campaigns.bench.gateway_parts.doors import Door, Talk
from campaigns.bench.gateway_parts.wire import Connection, WireError
from nemo_gym.stack.endpoints import pss_mib

LANES = 64
"""How many sessions are opened or closed at the same time."""


async def held(door: Door, sessions: int, turns: int, sampled: int | None) -> dict[str, Any]:
    """``sampled``: the number of tokens of one response, if trajectories must hold all of them."""
    assert door.server is not None
    await _through(door, 8, turns, [], None)  # warm-up: the first session proves the shapes of the policy's template
    before = pss_mib([door.server.pid])
    cpu = door.server.cpu_s()
    errors: list[str] = []
    memory: dict[str, float] = {}

    async def remember(when: str) -> None:
        assert door.server is not None
        memory[when] = round(1024 * (pss_mib([door.server.pid]) - before) / sessions, 1)

    begin = time.perf_counter()
    closed = await _through(door, sessions, turns, errors, remember)
    seconds = time.perf_counter() - begin
    bad = 0
    for summary in closed:
        rows = (summary or {}).get("trajectories")
        bad += not isinstance(rows, list) or len(rows) != 1 or summary is None or summary["turns"] != turns
        if isinstance(rows, list) and rows and sampled is not None:
            bad += sum(rows[0]["response_mask"]) != turns * sampled
    return {
        "sessions": sessions,
        "turns": turns,
        "errors": len(errors),
        "first_errors": errors[:3],
        "wrong_trajectories": bad + sessions - len(closed),
        "sessions_per_s": round(sessions / seconds, 1),
        "calls_per_s": round(sessions * turns / seconds, 1),
        "cpu_ms_per_session": round(1000 * (door.server.cpu_s() - cpu) / sessions, 2),
        "pss_before_mib": round(before, 1),
        "pss_kib_per_session": memory,
    }


async def _through(door: Door, sessions: int, turns: int, errors: list[str], measure_memory: Any) -> list[Any]:
    connections = [Connection(door.url) for _ in range(sessions)]
    lanes = asyncio.Semaphore(LANES)

    async def guarded(work: Any) -> Any:
        try:
            return await work
        except (WireError, TimeoutError, OSError) as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])
            return None

    async def opened(number: int) -> Any:
        async with lanes:
            return await guarded(door.open(connections[number], number))

    async def run(talk: Talk) -> None:
        for _ in range(turns):
            await guarded(talk.turn())

    async def close(talk: Talk) -> Any:
        async with lanes:
            return await guarded(talk.close())

    talks = [talk for talk in await asyncio.gather(*map(opened, range(sessions))) if talk is not None]
    if measure_memory is not None:
        await measure_memory("opened")
    await asyncio.gather(*map(run, talks))
    if measure_memory is not None:
        await measure_memory("after_last_turn")
    closed = await asyncio.gather(*map(close, talks))
    if measure_memory is not None:
        await measure_memory("finalized")
    for connection in connections:
        connection.close()
    return [one for one in closed if one is not None]
