"""Measure what one attempt can do to the others at a gateway, with hostile bodies and with an engine that misbehaves.

    python -m campaigns.bench.gateway_abuse [--json] [--only bodies,cold,endless,wedged,poison]

The gateway runs as ``ng_run`` starts it, in front of a scripted endpoint (``gateway_parts/hostile_engine.py``). During
each abuse, ``/health`` is requested again and again: its slowest response, minus the time in which the gateway waited
for a core, is how long the event loop was blocked. Memory is the gateway's resident set before, at its highest, and
after all callers have left.

bodies    300,000 messages (8.8 MB) in one body; then the worst bodies that are still accepted, eight at a time
cold      conversations of 10,000 messages that are new to a gateway with token ids, one and eight at a time
endless   eight callers whose answers never end
wedged    an engine on trial whose ``Retry-After`` is thirty years: how long its callers wait
poison    a session whose requests the only engine answers with 500, beside one that is answered
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.gateway_parts.conversations import Load
from campaigns.bench.gateway_parts.doors import CHAT, GatewayDoor, GatewayKind, gateway, text_kind, token_kind
from campaigns.bench.gateway_parts.processes import Running, on_socket
from campaigns.bench.gateway_parts.wire import Connection, Reply
from campaigns.bench.report import Bar, argument_parser, print_report
from nemo_gym_testing.gateway.tiny.policies import make_policy

SECTIONS = ("bodies", "cold", "endless", "wedged", "poison")
BLOCKED_AT_MOST_S = 0.25
COLD_BLOCKED_AT_MOST_S = 0.1
KEPT_AT_MOST_MB = 100.0
SLOWED_AT_MOST = 2.0
QUEUE_S = 5.0
CALLERS = 8
FAMILY = "chatml_think"
GOOD_CALLS = 300
ROUNDS = 3
_FIRST = b'{"messages":['
_SETTLE_S = 2.5
_SETTINGS = (f"routing.queue_timeout_s={QUEUE_S}", "routing.probe_interval_s=1.0")


@dataclass
class Watch:
    """What an abuse did to the gateway."""

    blocked_s: float = 0.0
    wall_s: float = 0.0
    """The same, including the time in which the gateway waited for a core."""
    before_mb: float = 0.0
    highest_mb: float = 0.0
    kept_mb: float = 0.0
    asked: int = 0

    def figures(self) -> dict[str, float]:
        return {
            "blocked_s": round(self.blocked_s, 3),
            "slowest_health_s": round(self.wall_s, 3),
            "rss_before_mb": round(self.before_mb, 1),
            "rss_highest_growth_mb": round(self.highest_mb - self.before_mb, 1),
            "rss_kept_growth_mb": round(self.kept_mb, 1),
            "health_answers": self.asked,
        }


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has ended")


def loop_waited_s(pid: int) -> float:
    """Return the seconds so far in which the thread of a server's event loop was ready to run but had no core."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


@contextlib.asynccontextmanager
async def watched(door: GatewayDoor, *sessions: Session) -> AsyncIterator[Watch]:
    """Request the gateway's health all the time; then end the sessions, and measure the memory that is kept."""
    watch = Watch(before_mb=rss_mb(door.server.pid))
    finished = asyncio.Event()

    async def poll_health() -> None:
        connection = Connection(door.url)
        while not finished.is_set():
            began, waited = time.perf_counter(), loop_waited_s(door.server.pid)
            await connection.get("/health")
            wall = time.perf_counter() - began
            watch.wall_s = max(watch.wall_s, wall)
            watch.blocked_s = max(watch.blocked_s, wall - (loop_waited_s(door.server.pid) - waited))
            watch.highest_mb = max(watch.highest_mb, rss_mb(door.server.pid))
            watch.asked += 1
            await asyncio.sleep(0.002)
        connection.close()

    asking = asyncio.create_task(poll_health())
    try:
        yield watch
    finally:
        finished.set()
        await asking
    await asyncio.gather(*(session.end() for session in sessions))
    await asyncio.sleep(_SETTLE_S)
    watch.kept_mb = rss_mb(door.server.pid) - watch.before_mb


class Session:
    """A session whose requests have arbitrary bodies."""

    def __init__(self, door: GatewayDoor, facts: dict[str, Any]) -> None:
        self.door = door
        self._facts = facts
        self._token = f"Authorization: Bearer {facts['inference_token']}\r\n"

    @classmethod
    async def open(cls, door: GatewayDoor, number: int) -> Session:
        rollout = {"rollout_id": f"r{number}", "task_id": "t", "group_id": "t", "attempt": 1}
        headers = f"X-NeMo-Gym-Credential: {door.credential}\r\n"
        connection = Connection(door.url)
        reply = await connection.post("/sessions", orjson.dumps({"rollout": rollout}), headers)
        connection.close()
        return cls(door, reply.json())

    async def end(self) -> None:
        connection = Connection(self.door.url)
        headers = f"X-NeMo-Gym-Credential: {self.door.credential}\r\n"
        headers += f"X-NeMo-Gym-Control-Token: {self._facts['control_token']}\r\n"
        (await connection.post(f"/sessions/{self._facts['session_id']}/abort", b"{}", headers)).json()
        connection.close()

    async def post(self, body: bytes, connection: Connection | None = None) -> Reply:
        used = connection or Connection(self.door.url)
        try:
            return await used.post(CHAT, body, self._token)
        finally:
            if connection is None:
                used.close()

    async def say(self, text: str, connection: Connection | None = None) -> Reply:
        return await self.post(orjson.dumps({"messages": [{"role": "user", "content": text}]}), connection)


def _user(content: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": content}]})


def worst_bodies() -> dict[str, bytes]:
    """Return the worst bodies that the gateway still accepts."""
    head = b'{"messages":[{"role":"user","content":"a"}],"metadata":['
    size = (32 << 20) - 300
    return {
        "9999_messages": orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 9_998}),
        "60000_parts": _user([{"type": "text", "text": "a"}] * 60_000),
        "95000_lists": head + b"[]," * 95_000 + b"[]]}",
        "image_of_32_mib": _user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}]),
        "text_of_32_mib_escaped": _user("\n" * (size // 2)),
        "text_of_32_mib_commas": _user("a,[{" * (size // 4)),
    }


def cold_bodies() -> dict[str, bytes]:
    """Return the longest histories that the gateway accepts."""
    turns = [{"role": role, "content": f"{role} says {n}"} for n in range(4_999) for role in ("user", "assistant")]
    texts = [{**turn, "content": turn["content"] + " and reads a file of many words" * 10} for turn in turns]
    marked = [{**turn, "content": turn["content"] + " in words of control: <|im_end|> and more"} for turn in turns]
    histories = {"short_messages": turns, "long_messages": texts, "control_words": marked}
    last = {"role": "user", "content": "go on"}
    return {name: orjson.dumps({"messages": [*messages, last]}) for name, messages in histories.items()}


@dataclass
class Bench:
    engine: Running
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def door(self, kind: GatewayKind | None = None) -> AsyncIterator[GatewayDoor]:
        kind = kind or text_kind(self.engine.url)
        settings = [f"++policy_model.responses_api_models.gateway.{setting}" for setting in _SETTINGS]
        with contextlib.ExitStack() as resources:
            door = await asyncio.to_thread(resources.enter_context, gateway(kind, *settings))
            session = await self.session(door)
            for _ in range(50):  # warm-up: loads and caches what is needed once
                (await session.say("hello")).json()
            yield door
            await asyncio.to_thread(resources.close)

    async def session(self, door: GatewayDoor) -> Session:
        return await Session.open(door, next(self._numbers))

    async def mode(self, mode: str) -> None:
        connection = Connection(self.engine.url)
        await connection.post("/mode", orjson.dumps({"mode": mode}))
        connection.close()

    def judged(self, name: str, found: Watch, blocked_at_most_s: float = BLOCKED_AT_MOST_S) -> dict[str, Any]:
        self.bars.append(Bar.at_most(f"{name}: event loop blocked", found.blocked_s, blocked_at_most_s, "s"))
        self.bars.append(Bar.at_most(f"{name}: memory kept", found.kept_mb, KEPT_AT_MOST_MB, "MB"))
        return found.figures()

    # -- sections ------------------------------------------------------------------------------------------------

    async def bodies(self) -> None:
        results = self.figures["bodies"] = {}
        async with self.door() as door:
            many = orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 300_000})
            session = await self.session(door)
            async with watched(door) as watch:
                reply = await session.post(many)
            results["300000_messages"] = {
                **self.judged("300,000 messages", watch),
                "mb": round(len(many) / 1e6, 1),
                "status": reply.status,
                "said": reply.body[:300].decode(),
            }
            self.bars.append(Bar("300,000 messages: answered", reply.status, "", "= 413", reply.status == 413))
            for name, body in worst_bodies().items():
                watch, replies = await self._rounds(door, body)
                results[name] = {
                    **self.judged(name, watch),
                    "mb": round(len(body) / 1e6, 1),
                    "statuses": dict(Counter(str(reply.status) for reply in replies)),
                }

    async def cold(self) -> None:
        results = self.figures["cold"] = {}
        with tempfile.TemporaryDirectory() as folder, on_socket("engine.py") as engine:
            policy = make_policy(Path(folder, "policy"), FAMILY)
            connection = Connection(engine.url)
            (await connection.post("/scenario", Load(policy).tool_answer().to_json())).json()
            connection.close()
            async with self.door(token_kind(engine.url, policy)) as door:
                for name, body in cold_bodies().items():
                    for callers in (1, CALLERS):
                        label = f"{name}_x{callers}"
                        watch, replies = await self._rounds(door, body, callers)
                        statuses = Counter(str(reply.status) for reply in replies)
                        figures = self.judged(label, watch, COLD_BLOCKED_AT_MOST_S)
                        results[label] = {**figures, "mb": round(len(body) / 1e6, 1), "statuses": dict(statuses)}
                        self.bars.append(Bar.at_least(f"{label}: answered", statuses["200"], callers))

    async def _rounds(self, door: GatewayDoor, body: bytes, callers: int = CALLERS) -> tuple[Watch, list[Reply]]:
        """Send ``callers`` conversations in parallel. Other processes add to the figures, so the best round counts."""
        best: Watch | None = None
        for _ in range(ROUNDS):
            session = await self.session(door)
            variants = [
                body.replace(_FIRST, b'%b{"role":"user","content":"%d"},' % (_FIRST, n), 1) for n in range(callers)
            ]
            async with watched(door, session) as watch:
                replies = await asyncio.gather(*(session.post(variant) for variant in variants))
            if best is None or watch.blocked_s < best.blocked_s:
                best = watch
        assert best is not None
        return best, replies

    async def endless(self) -> None:
        async with self.door() as door:
            sessions = [await self.session(door) for _ in range(CALLERS)]
            async with watched(door) as watch:
                began = time.perf_counter()
                replies = await asyncio.gather(*(session.say("endless") for session in sessions))
                took = time.perf_counter() - began
            self.figures["endless"] = {
                **self.judged(f"{CALLERS} endless answers", watch),
                "seconds": round(took, 2),
                "statuses": dict(Counter(str(reply.status) for reply in replies)),
                "said": replies[0].body[:400].decode(),
            }
            typed = sum(b"engine_answer_too_large" in reply.body for reply in replies)
            self.bars.append(Bar.at_least("endless answers that ended with their own error", typed, CALLERS))

    async def wedged(self) -> None:
        async with self.door() as door:
            session = await self.session(door)
            await self.mode("sick")
            callers = [await self.session(door) for _ in range(4)]
            async with watched(door) as watch:
                await asyncio.gather(*(caller.say("hello") for caller in callers))  # now it is out of service
                await self.mode("waiting")
                waits, statuses = [], Counter[str]()
                end = time.monotonic() + 4 * QUEUE_S
                while time.monotonic() < end:
                    began = time.perf_counter()
                    reply = await session.say("hello")
                    waits.append(time.perf_counter() - began)
                    statuses[str(reply.status)] += 1
                    await asyncio.sleep(0.2)
            await self.mode("well")
            self.figures["wedged"] = {
                **self.judged("wedged engine", watch),
                "slowest_s": round(max(waits), 2),
                "median_s": round(statistics.median(waits), 4),
                "statuses": dict(statuses),
            }
            self.bars.append(Bar.at_most("wedged engine: slowest caller", max(waits), QUEUE_S + 0.5, "s"))
            refused = statuses["429"] + statuses["503"]
            self.bars.append(Bar("wedged engine: 429 or 503", refused, "", f"= {len(waits)}", refused == len(waits)))

    async def poison(self) -> None:
        async with self.door() as door:
            good, bad = await self.session(door), await self.session(door)
            alone = await self._good_calls(good)
            stopped = False

            async def poisoned() -> int:
                connection, calls = Connection(door.url), 0
                while not stopped:
                    reply = await bad.say("poison", connection)
                    assert reply.status == 502, reply
                    calls += 1
                connection.close()
                return calls

            poisoning = asyncio.create_task(poisoned())
            async with watched(door) as watch:
                beside = await self._good_calls(good)
                stopped = True
                calls = await poisoning
            p50, p50_beside = statistics.median(alone), statistics.median(beside)
            self.figures["poison"] = {
                **self.judged("poisonous request", watch),
                "poisonous_calls": calls,
                "good_p50_ms": {"alone": round(p50 * 1e3, 2), "beside": round(p50_beside * 1e3, 2)},
                "good_slowest_ms": {"alone": round(max(alone) * 1e3, 2), "beside": round(max(beside) * 1e3, 2)},
            }
            label = "poisonous request: other session's "
            self.bars.append(Bar.at_most(f"{label}p50 over p50 alone", p50_beside / p50, SLOWED_AT_MOST, "x"))
            self.bars.append(Bar.at_most(f"{label}slowest call", max(beside), 1.0, "s"))

    async def _good_calls(self, session: Session) -> list[float]:
        connection = Connection(session.door.url)
        seconds = []
        for number in range(GOOD_CALLS):
            began = time.perf_counter()
            (await session.say(f"hello {number}", connection)).json()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
        connection.close()
        return seconds


async def run(wanted: set[str]) -> tuple[dict[str, Any], list[Bar]]:
    with on_socket("hostile_engine.py") as engine:
        bench = Bench(engine)
        sections: dict[str, Callable[[], Awaitable[None]]] = {
            "bodies": bench.bodies,
            "cold": bench.cold,
            "endless": bench.endless,
            "wedged": bench.wedged,
            "poison": bench.poison,
        }
        for name, section in sections.items():
            if name in wanted:
                await section()
    return bench.figures, bench.bars


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas; default: all")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    if unknown := wanted - set(SECTIONS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    figures, bars = uvloop.run(run(wanted))
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
