"""Measure what a turn costs as its conversation grows: a harness sends the whole conversation each time.

The engine's own time for a prompt of the same length is subtracted from the wall time. What remains grows even if
nothing is inspected, since more bytes come in and go out: ``raw_proxy`` measures by how much, for the same bytes. A
gateway must also parse the body once, and, if it sends the engine text, write and parse the engine's JSON. What is
left without these is its *own* time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import orjson

from campaigns.bench.gateway_parts.conversations import completion_body
from campaigns.bench.gateway_parts.doors import CHAT, ChatTalk, Door
from campaigns.bench.gateway_parts.processes import Running
from campaigns.bench.gateway_parts.wire import Connection, Reply

EARLY, LATE = 10, 200
AROUND = 4
SAME_TOKEN = 1234


async def growth(door: Door, engine_url: str, proxy: Running, rounds: int, *, tokens: bool) -> dict[str, Any]:
    """Return figures at turns 10, 100 and 200, and their ratios. ``tokens``: the engine gets token ids."""
    turns: list[list[dict[str, float]]] = []
    for number in range(rounds + 1):
        rows = await _conversation(door, engine_url, proxy, number, LATE if number else EARLY, tokens=tokens)
        if number:  # the first is a warm-up
            turns.append(rows)
    keys = turns[0][0].keys()
    table = {turn: {key: round(_around(turns, turn, key), 3) for key in keys} for turn in (EARLY, LATE // 2, LATE)}
    early, late = table[EARLY], table[LATE]
    beyond = [
        row["wall_ms"] - row["raw_proxy_wall_ms"] - row["body_parse_cpu_ms"] - row["engine_json_cpu_ms"]
        for row in (early, late)
    ]
    return {
        "rounds": rounds,
        "turns": {str(turn): row for turn, row in table.items()},
        "wall_ratio": round(late["wall_ms"] / early["wall_ms"], 3),
        "own_wall_ratio": round(beyond[1] / beyond[0], 3),
        "cpu_ratio": round(late["cpu_ms"] / early["cpu_ms"], 3),
        "body_parse_share_of_cpu_late": round(late["body_parse_cpu_ms"] / late["cpu_ms"], 3),
        "engine_json_share_of_cpu_late": round(late["engine_json_cpu_ms"] / late["cpu_ms"], 3),
    }


def _around(turns: list[list[dict[str, float]]], turn: int, key: str) -> float:
    near = range(max(0, turn - 1 - AROUND), min(len(turns[0]), turn + AROUND))
    return statistics.median(rows[at][key] for rows in turns for at in near)


async def _conversation(
    door: Door, engine_url: str, proxy: Running, number: int, turns: int, *, tokens: bool
) -> list[dict[str, float]]:
    assert door.server is not None
    connection, direct, raw = Connection(door.url), Connection(engine_url), Connection(proxy.url)
    talk = await door.open(connection, number)
    assert isinstance(talk, ChatTalk)
    rows = []
    for _ in range(turns):
        body = talk.chat.body()
        cpu, begin = door.server.cpu_s(), time.perf_counter()
        usage = await talk.ask(body)
        wall, used = time.perf_counter() - begin, door.server.cpu_s() - cpu
        engine_body = completion_body([SAME_TOKEN] * usage["prompt_tokens"]) if tokens else body
        engine, reply = await _timed(direct, "/v1/completions" if tokens else CHAT, engine_body)
        chat, _ = await _timed(direct, CHAT, body)
        proxied, _ = await _timed(raw, CHAT, body)
        engine_request = orjson.loads(engine_body)
        marks = [time.thread_time()]
        orjson.loads(body)
        marks.append(time.thread_time())
        # With token ids a gateway spends nothing on this: it keeps prompts as JSON, and compares echoes as bytes.
        if not tokens:
            orjson.dumps(engine_request)
            orjson.loads(reply.body)
        marks.append(time.thread_time())
        rows.append(
            {
                "wall_ms": 1000 * (wall - engine),
                "cpu_ms": 1000 * used,
                "engine_ms": 1000 * engine,
                "raw_proxy_wall_ms": 1000 * (proxied - chat),
                "body_parse_cpu_ms": 1000 * (marks[1] - marks[0]),
                "engine_json_cpu_ms": 1000 * (marks[2] - marks[1]),
                "body_kib": len(body) / 1024,
                "engine_body_kib": len(engine_body) / 1024,
                "prompt_tokens": float(usage["prompt_tokens"]),
            }
        )
    closed = await talk.close()
    if closed is not None and len(closed["trajectories"]) != 1:
        raise RuntimeError(f"one conversation became {len(closed['trajectories'])} trajectories")
    for opened in (connection, direct, raw):
        opened.close()
    return rows


async def _timed(connection: Connection, path: str, body: bytes) -> tuple[float, Reply]:
    begin = time.perf_counter()
    reply = await connection.post(path, body)
    return time.perf_counter() - begin, reply
