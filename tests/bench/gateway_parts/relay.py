"""One answer of 65,536 tokens with ids and logprobs, through a gateway and through a raw proxy of the same engine's
bytes. The gateway parses, parses calls, keeps and journals what it relays; the proxy looks at nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import orjson

from tests.bench.gateway_parts.conversations import Chat, completion_body
from tests.bench.gateway_parts.doors import CHAT, ChatTalk, Door
from tests.bench.gateway_parts.processes import Running
from tests.bench.gateway_parts.wire import Connection, Reply

TOKENS = 65_536


async def compared(
    door: Door, proxy: Running, rounds: int, *, tokens: bool, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Wall and CPU of both, and their ratios. ``asked``: how a caller asks the door for logprobs."""
    assert door.server is not None
    through, past = Connection(door.url), Connection(proxy.url)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):
        talk = await door.open(through, number, **asked)
        assert isinstance(talk, ChatTalk)
        chat = talk.chat.body()
        raw = completion_body([1234] * 1500) if tokens else Chat(number, logprobs=True).body()
        one, reply = await _timed(door.server, through, talk.path, chat, talk.headers)
        other, raw_reply = await _timed(proxy, past, "/v1/completions" if tokens else CHAT, raw, "")
        sizes = {"reply_kib": len(reply.body) // 1024, "engine_kib": len(raw_reply.body) // 1024}
        _check(reply)
        await talk.close()
        if number:  # the first warms
            ours.append(one)
            theirs.append(other)
    through.close()
    past.close()
    wall, cpu = [statistics.median(pair[at] for pair in ours) for at in (0, 1)]
    raw_wall, raw_cpu = [statistics.median(pair[at] for pair in theirs) for at in (0, 1)]
    return {
        "tokens": TOKENS,
        **sizes,
        "wall_ms": round(1000 * wall, 2),
        "cpu_ms": round(1000 * cpu, 2),
        "raw_proxy_wall_ms": round(1000 * raw_wall, 2),
        "raw_proxy_cpu_ms": round(1000 * raw_cpu, 2),
        "wall_ratio": round(wall / raw_wall, 3),
        "cpu_ratio": round(cpu / raw_cpu, 3),
        "rounds": rounds,
    }


async def _timed(
    server: Running, connection: Connection, path: str, body: bytes, headers: str
) -> tuple[tuple[float, float], Reply]:
    cpu, begin = server.cpu_s(), time.perf_counter()
    reply = await connection.post(path, body, headers)
    wall = time.perf_counter() - begin
    if reply.status != 200:
        reply.json()
    return (wall, server.cpu_s() - cpu), reply


def _check(reply: Reply) -> None:
    """That ids and logprobs have arrived."""
    choice = orjson.loads(reply.body)["choices"][0]
    message = choice["message"]
    ids = message.get("generation_token_ids") or choice.get("token_ids") or ()
    logprobs = message.get("generation_log_probs") or (choice.get("logprobs") or {}).get("content") or ()
    if (len(ids), len(logprobs)) != (TOKENS, TOKENS):
        raise RuntimeError(f"{len(ids)} ids and {len(logprobs)} logprobs arrived instead of {TOKENS}")
