"""What a turn costs as its conversation grows: a harness sends all of it each time.

The engine's own time for a prompt of the same length is taken off the wall time. Of the gateway's CPU time, the part
that no gateway can do without is measured beside it on the same bytes, in this process: to parse the body, to write
the engine's prompt, and to parse its answer (an engine that returns token ids returns those of the prompt, too).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import orjson

from tests.bench.gateway_parts.conversations import completion_body
from tests.bench.gateway_parts.doors import CHAT, ChatTalk, Door
from tests.bench.gateway_parts.wire import Connection

EARLY, LATE = 10, 200
AROUND = 2
SAME_TOKEN = 1234


async def growth(door: Door, engine_url: str, rounds: int, *, tokens: bool) -> dict[str, Any]:
    """Figures at turns 10, 100 and 200, and their ratios. ``tokens``: the engine is asked with ids."""
    turns: list[list[dict[str, float]]] = []
    for number in range(rounds + 1):
        found = await _conversation(door, engine_url, number, LATE if number else EARLY, tokens=tokens)
        if number:  # the first warms
            turns.append(found)
    keys = turns[0][0].keys()
    table = {turn: {key: round(_around(turns, turn, key), 3) for key in keys} for turn in (EARLY, LATE // 2, LATE)}
    early, late = table[EARLY], table[LATE]
    return {
        "rounds": rounds,
        "turns": {str(turn): row for turn, row in table.items()},
        "wall_ratio": round(late["wall_ms"] / early["wall_ms"], 3),
        "cpu_ratio": round(late["cpu_ms"] / early["cpu_ms"], 3),
        "cpu_ratio_without_json": round(
            (late["cpu_ms"] - late["json_cpu_ms"]) / (early["cpu_ms"] - early["json_cpu_ms"]), 3
        ),
        "json_share_of_cpu_at_late_turn": round(late["json_cpu_ms"] / late["cpu_ms"], 3),
    }


def _around(turns: list[list[dict[str, float]]], turn: int, key: str) -> float:
    near = range(max(0, turn - 1 - AROUND), min(len(turns[0]), turn + AROUND))
    return statistics.median(one[at][key] for one in turns for at in near)


async def _conversation(
    door: Door, engine_url: str, number: int, turns: int, *, tokens: bool
) -> list[dict[str, float]]:
    assert door.server is not None
    connection, direct = Connection(door.url), Connection(engine_url)
    talk = await door.open(connection, number)
    assert isinstance(talk, ChatTalk)
    found = []
    for _ in range(turns):
        body = talk.chat.body()
        cpu, begin = door.server.cpu_s(), time.perf_counter()
        usage = await talk.ask(body)
        wall, used = time.perf_counter() - begin, door.server.cpu_s() - cpu
        same = completion_body([SAME_TOKEN] * usage["prompt_tokens"]) if tokens else body
        begin = time.perf_counter()
        reply = await direct.post("/v1/completions" if tokens else CHAT, same)
        engine = time.perf_counter() - begin
        asked = orjson.loads(same)
        began = time.thread_time()
        orjson.loads(body)
        orjson.dumps(asked)
        orjson.loads(reply.body)
        json_cpu = time.thread_time() - began
        found.append(
            {
                "wall_ms": 1000 * (wall - engine),
                "cpu_ms": 1000 * used,
                "engine_ms": 1000 * engine,
                "json_cpu_ms": 1000 * json_cpu,
                "body_kib": len(body) / 1024,
                "engine_body_kib": len(same) / 1024,
                "prompt_tokens": float(usage["prompt_tokens"]),
            }
        )
    closed = await talk.close()
    if closed is not None and len(closed["trajectories"]) != 1:
        raise RuntimeError(f"one conversation became {len(closed['trajectories'])} trajectories")
    connection.close()
    direct.close()
    return found
