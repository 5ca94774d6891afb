"""Measure a response of 65,536 tokens with ids and logprobs, through a gateway and through two proxies of the engine.
One proxy inspects nothing, one parses and writes each body. The gateway checks, decodes, keeps and journals them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import orjson

from campaigns.bench.gateway_parts.conversations import Chat, completion_body
from campaigns.bench.gateway_parts.doors import CHAT, ChatTalk, Door
from campaigns.bench.gateway_parts.processes import Running
from campaigns.bench.gateway_parts.wire import Connection, Reply

TOKENS = 65_536


async def compared(
    door: Door, proxies: Mapping[str, Running], rounds: int, *, tokens: bool, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure wall time and CPU of the door and of each proxy, in turns; return both and the door's ratios to the
    proxies. ``asked``: the parameters with which a caller requests ids and logprobs from the door."""
    assert door.server is not None
    through = Connection(door.url)
    direct = {name: Connection(proxy.url) for name, proxy in proxies.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ("gateway", *proxies)}
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):
        talk = await door.open(through, number, **asked)
        assert isinstance(talk, ChatTalk)
        cost, reply = await _timed(door.server, through, talk.path, talk.chat.body(), talk.headers)
        _check(reply)
        sizes["reply_kib"] = len(reply.body) // 1024
        raw = completion_body([1234] * 1500) if tokens else Chat(number, logprobs=True).body()
        spent = {"gateway": cost}
        for name, proxy in proxies.items():
            spent[name], reply = await _timed(proxy, direct[name], "/v1/completions" if tokens else CHAT, raw, "")
            sizes["engine_kib"] = len(reply.body) // 1024
        await talk.close()
        for name, cost in spent.items():
            if number:  # the first is a warm-up
                samples[name].append(cost)
    for connection in (through, *direct.values()):
        connection.close()
    figures: dict[str, Any] = {"tokens": TOKENS, **sizes, "rounds": rounds}
    for at, measure in enumerate(("wall", "cpu")):
        medians = {name: statistics.median(pair[at] for pair in pairs) for name, pairs in samples.items()}
        for name, median in medians.items():
            figures[f"{name}_{measure}_ms"] = round(1000 * median, 2)
            if name != "gateway":
                figures[f"{measure}_over_{name}"] = round(medians["gateway"] / median, 3)
    return figures


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
    """Raise `RuntimeError` unless all ids and logprobs have arrived."""
    choice = orjson.loads(reply.body)["choices"][0]
    message = choice["message"]
    ids = message.get("generation_token_ids") or choice.get("token_ids") or ()
    logprobs = message.get("generation_log_probs") or (choice.get("logprobs") or {}).get("content") or ()
    if (len(ids), len(logprobs)) != (TOKENS, TOKENS):
        raise RuntimeError(f"{len(ids)} ids and {len(logprobs)} logprobs arrived instead of {TOKENS}")
