"""Measure what a turn costs in the token code as its conversation grows.

    python -m campaigns.bench.token_forest [--json] [--turns 200] [--rounds 5]

One session of a tool loop: each turn sends the whole history again, parsed anew from JSON as a server gets it, with
four more messages (a response with its calls, three results, 1 to 2 KB each), and samples a response. Four parts are
timed, in CPU time of the thread: ``prepare``, the prompt as JSON for the engine, ``commit`` and the journal's record;
the parsing of the body and its lowering are reported beside them. ``lowered``: messages that were sent before are the
same objects as in the previous request, as `ConversationCache` gives them to the gateway's server; ``parsed``: all are
new objects, the worst case. Before each turn a buffer larger than the processor's caches is overwritten, because on a
real gateway other sessions run meanwhile. A turn's figure is the median over rounds and its four neighbours.

Whoever gets new objects has to read the history once to know that it is the old one, and that grows with its bytes:
``reading`` is the time of one ``==`` between the messages and an equal copy that is not in the caches either. As in
the bench of the gateway, the bar of ``parsed`` holds for the cost beyond it; the ratio with it is a figure.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.gateway_parts.conversations import text
from campaigns.bench.report import Bar, argument_parser, print_report
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.chat import ConversationCache
from nemo_gym.gateway.tokens import History, IncrementalEncoder, PolicyTokenizer, Sampled, TokenForest
from nemo_gym.gateway.tokens.trajectories import record_of
from nemo_gym_testing.gateway.tiny.policies import make_policy

RATIO_AT_MOST = 1.5
EARLY, MIDDLE = 10, 100
AROUND = 2
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "runs", "parameters": {"type": "object"}}}]
BEFORE = ("parse_body", "lower")
"""The parts that run before the token code; they are not counted."""
PARTS = ("prepare", "prompt_json", "commit", "record")
COLD = bytearray(64 << 20)


def turns_of(
    policy: PolicyTokenizer, encoder: IncrementalEncoder, turns: int, seed: int, *, lowered: bool
) -> list[dict[str, float]]:
    """Return the CPU nanoseconds of each part of each turn of one session."""
    adapter, cache = ADAPTERS[Dialect.CHAT], ConversationCache()
    source = random.Random(seed)
    forest = TokenForest(encoder, policy, History.VERBATIM, datetime(2026, 3, 1, tzinfo=UTC))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(source, 4000)},
        {"role": "user", "content": text(source, 2000)},
    ]
    stop = policy.stops[policy.turn_end] if policy.turn_end is not None else None
    costs: list[dict[str, float]] = []
    copy: list[dict[str, Any]] = []
    for turn in range(turns):
        calls: list[dict[str, Any]] = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": "shell", "arguments": orjson.dumps({"command": text(source, 300)}).decode()},
            }
            for number in range(3)
        ]
        content = text(source, 1000)
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        ids = policy.encode(content + "".join(str(call["function"]["arguments"]) for call in calls))
        sampled = Sampled(ids if stop is None else [*ids, stop], [-0.5] * (len(ids) + (stop is not None)), "stop", "1")
        body = orjson.dumps({"messages": messages, "tools": TOOLS})
        COLD[::64] = bytes(len(COLD) // 64)
        marks = [time.thread_time_ns()]
        request = cache.parse(body) if lowered else orjson.loads(body)
        marks.append(time.thread_time_ns())
        sent = adapter.lower(request, cache).messages if lowered else request["messages"]
        marks.append(time.thread_time_ns())
        prepared = forest.prepare(sent, request["tools"])
        marks.append(time.thread_time_ns())
        prompt = prepared.prompt.json()
        marks.append(time.thread_time_ns())
        committed = forest.commit(prepared, sampled, answer)
        marks.append(time.thread_time_ns())
        orjson.dumps(record_of(committed))
        marks.append(time.thread_time_ns())
        assert len(prompt) > 2
        spent = dict(zip((*BEFORE, *PARTS), (b - a for a, b in itertools.pairwise(marks)), strict=True))
        spent["reading"], copy = reading(body, copy)
        spent["total"] = sum(spent[part] for part in PARTS)
        spent["beyond_reading"] = spent["total"] - spent["reading"]
        costs.append({**spent, "prompt_tokens": len(prepared.prompt)})
        messages += [answer] + [
            {"role": "tool", "tool_call_id": call["id"], "content": text(source, source.randint(1000, 2000))}
            for call in calls
        ]
    return costs


def reading(body: bytes, copy: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the CPU nanoseconds of comparing a body's messages with a copy of its first ones, and a copy of all."""
    COLD[::64] = bytes(len(COLD) // 64)
    messages: list[dict[str, Any]] = orjson.loads(body)["messages"]
    begin = time.thread_time_ns()
    assert messages[: len(copy)] == copy
    return time.thread_time_ns() - begin, messages


def around(rounds: list[list[dict[str, float]]], turn: int, part: str) -> float:
    """The median of a part over all rounds, for turn number ``turn`` (from 1) and its neighbours."""
    near = range(max(0, turn - 1 - AROUND), min(len(rounds[0]), turn + AROUND))
    return statistics.median(costs[at][part] for costs in rounds for at in near)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--family", default="chatml_think")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = PolicyTokenizer.load(make_policy(Path(folder) / "policy", arguments.family))
    encoder = IncrementalEncoder(policy)
    turns_of(policy, encoder, 12, 0, lowered=True)  # warm-up: shapes are proven once per policy
    gc.collect()
    gc.freeze()  # as the gateway's server does: what is imported is never garbage
    figures: dict[str, Any] = {}
    bars = []
    for how in ("lowered", "parsed"):
        rounds = [
            turns_of(policy, encoder, arguments.turns, seed, lowered=how == "lowered")
            for seed in range(1, arguments.rounds + 1)
        ]
        for turn in sorted({EARLY, MIDDLE, arguments.turns}):
            for part in (*BEFORE, *PARTS, "total", "reading", "beyond_reading"):
                figures[f"{how}_turn_{turn}_{part}_us"] = round(around(rounds, turn, part) / 1000, 1)
            figures[f"{how}_turn_{turn}_prompt_tokens"] = int(around(rounds, turn, "prompt_tokens"))
        ratio, beyond = (
            around(rounds, arguments.turns, part) / around(rounds, EARLY, part) for part in ("total", "beyond_reading")
        )
        name = f"cost of turn {arguments.turns} over turn {EARLY}, messages {how}"
        if how == "parsed":
            figures["parsed_ratio_with_reading"] = round(ratio, 3)
            name, ratio = f"{name}, beyond reading them once", beyond
        bars.append(Bar.at_most(name, ratio, RATIO_AT_MOST, "x"))
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
