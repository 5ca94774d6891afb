"""Measure what the model gateway costs, compared with the engine itself, raw proxies, and other gateways.

    python -m campaigns.bench.gateway [--json] [--only latency,throughput,peers,sessions,history,relay]
                                      [--uni-agent DIR]

The engine (``gateway_parts/engine.py``) is a process that returns one prepared response, at once or after a set time.
Gateways are started by ``ng_run``: *tokens* takes Chat Completions and sends the engine token ids, *text* passes them
on as text. Every figure is compared with its baseline in the same run, in turns.

latency      one caller; a conversation of eight turns through the gateway, and the same calls to the engine
throughput   256 callers; an engine that takes 1 s ± 25 % for an answer, and, without a bar, one that answers at once
peers        the same two for LiteLLM's proxy and for uni-agent's gateway (its checkout: ``--uni-agent``, or
             UNI_AGENT_SOURCE); peers are installed once, outside this environment
sessions     1,000 sessions of eight turns at once, from open to finalize; memory of each
history      one session of 200 turns: the cost of turn 200 over that of turn 10, beyond moving the bytes
relay        one answer of 65,536 tokens with ids and logprobs, beside a proxy that inspects nothing (``raw``) and one
             that parses and writes each body once (``reading``)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.gateway_parts import latency, long_history, many_sessions, peers, relay, throughput
from campaigns.bench.gateway_parts.conversations import Load
from campaigns.bench.gateway_parts.doors import (
    Door,
    GatewayDoor,
    PlainDoor,
    PromptDoor,
    gateway,
    text_kind,
    token_kind,
)
from campaigns.bench.gateway_parts.engine import Scenario
from campaigns.bench.gateway_parts.processes import Running, on_socket
from campaigns.bench.gateway_parts.wire import Connection, WireError
from campaigns.bench.report import Bar, argument_parser, print_report
from nemo_gym.http.webserver import keep_memory, raise_file_limit
from nemo_gym_testing.gateway.tiny.policies import make_policy

SECTIONS = ("latency", "throughput", "peers", "sessions", "history", "relay")
FAMILY = "chatml_think"
ENGINE_S, JITTER = 1.0, 0.25
ADDED_P50_AT_MOST_MS = 1.5
LOST_AT_MOST = 0.15
HISTORY_RATIO_AT_MOST = 1.5
RELAY_RATIO_AT_MOST = 2.0


@dataclass(frozen=True)
class Amounts:
    """The amounts of work to measure."""

    conversations: int = 100
    """Conversations of eight turns, for latency."""
    callers: int = 256
    turns: int = 6
    """Turns of each caller."""
    peer_turns: int = 3
    rounds: int = 3
    sessions: int = 1000
    session_turns: int = 8
    history_rounds: int = 3
    relay_rounds: int = 9


@dataclass
class Bench:
    """The servers, amounts and results that all sections share."""

    folder: Path
    policy: Path
    load: Load
    engine: Running
    amounts: Amounts
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    async def play(self, scenario: Scenario) -> None:
        """Set the engine's response to all following calls."""
        connection = Connection(self.engine.url)
        (await connection.post("/scenario", scenario.to_json())).json()
        connection.close()

    async def at_once(self) -> None:
        await self.play(self.load.tool_answer())

    async def realistic(self) -> None:
        await self.play(self.load.tool_answer(delay_s=ENGINE_S, jitter=JITTER))

    @property
    def token_engine(self) -> PromptDoor:
        return PromptDoor("engine_tokens", self.engine.url, self.load)

    @property
    def text_engine(self) -> PlainDoor:
        return PlainDoor("engine_text", self.engine.url)

    @contextlib.asynccontextmanager
    async def gateways(self) -> AsyncIterator[tuple[GatewayDoor, GatewayDoor]]:
        """Run both gateways; yield (tokens, text)."""
        with contextlib.ExitStack() as resources:
            starts = token_kind(self.engine.url, self.policy), text_kind(self.engine.url)
            tokens, text = [await asyncio.to_thread(resources.enter_context, gateway(kind)) for kind in starts]
            yield tokens, text
            # Stop them in a thread, as they were started: this loop has the connections that they hold open.
            await asyncio.to_thread(resources.close)

    # -- sections ------------------------------------------------------------------------------------------------

    async def latency(self) -> None:
        async with self.gateways() as (tokens, text):
            with on_socket("raw_proxy.py", self.engine.url) as proxy:
                raw = PlainDoor("raw_proxy", proxy.url, proxy)
                engines: list[tuple[Door, Door]] = [(tokens, self.token_engine), (text, self.text_engine)]
                await self.at_once()
                latencies = await latency.added([*engines, (raw, self.text_engine)], self.amounts.conversations)
        self.figures["latency"] = {**latencies}
        for door, _ in engines:
            label = f"{door.name}: added per call at concurrency 1, p50"
            self.bars.append(Bar.at_most(label, latencies[door.name]["added_p50_ms"], ADDED_P50_AT_MOST_MS, "ms"))

    async def throughput(self) -> None:
        async with self.gateways() as (tokens, text):
            pairs: list[tuple[Door, Door]] = [(tokens, self.token_engine), (text, self.text_engine)]
            results = await self._lost(pairs, self.amounts.turns, self.amounts.rounds)
        self.figures["throughput"] = results
        for name, result in results["realistic_engine"].items():
            label = f"{name}: throughput lost at {self.amounts.callers} concurrent"
            self.bars.append(Bar.at_most(label, result["lost_share"], LOST_AT_MOST))
            self.bars.append(Bar.at_most(f"{name}: failed calls", result["failed"], 0))

    async def _lost(self, pairs: list[tuple[Door, Door]], turns: int, rounds: int) -> dict[str, Any]:
        callers = self.amounts.callers
        return {
            "callers": callers,
            "engine_answer_s": ENGINE_S,
            "engine_jitter": JITTER,
            "realistic_engine": await throughput.lost(pairs, callers, turns, rounds, ENGINE_S, self.realistic),
            "instant_engine": await throughput.lost(pairs, callers, turns, rounds, 0.0, self.at_once),
        }

    async def beside_peers(self, uni_agent_source: str | None) -> None:
        """Measure each peer in turns with our gateway of the same kind."""
        results = self.figures["peers"] = {}
        for name in ("litellm", "uni_agent"):
            try:
                with contextlib.ExitStack() as resources:
                    if name == "litellm":
                        opening: Any = peers.litellm(self.engine.url, self.folder)
                    else:
                        opening = peers.uni_agent(self.engine.url, self.policy, self.folder, uni_agent_source)
                    peer: Door = await asyncio.to_thread(resources.enter_context, opening)
                    results[name] = {"available": True, **await self._beside(peer)}
            except (peers.PeerMissingError, WireError) as error:
                results[name] = {"available": False, "reason": str(error)}

    async def _beside(self, peer: Door) -> dict[str, Any]:
        async with self.gateways() as (tokens, text):
            # uni-agent's gateway sends the engine token ids, LiteLLM text: compare each with ours of that kind.
            same: tuple[Door, Door] = (
                (tokens, self.token_engine) if peer.name == "uni_agent" else (text, self.text_engine)
            )
            pairs = [same, (peer, same[1])]
            await self.at_once()
            added = await latency.added(pairs, max(10, self.amounts.conversations // 4))
            own_added, peer_added = added[same[0].name], added[peer.name]
            lost = await self._lost(pairs, self.amounts.peer_turns, 1)
            ratio = peer_added["added_p50_ms"] / own_added["added_p50_ms"]
            return {"latency": added, "throughput": lost, "added_p50_over_ours": round(ratio, 2)}

    async def sessions(self) -> None:
        amounts, answer = self.amounts, self.load.tool_answer(delay_s=ENGINE_S, jitter=JITTER)
        self.figures["sessions"] = {}
        async with self.gateways() as doors:
            for door, sampled in zip(doors, (len(answer.ids), None), strict=True):
                await self.play(answer)
                result = await many_sessions.held(door, amounts.sessions, amounts.session_turns, sampled)
                self.figures["sessions"][door.name] = result
                label = f"{door.name}: {amounts.sessions} sessions x {amounts.session_turns} turns, "
                self.bars.append(Bar.at_most(f"{label}errors", result["errors"], 0))
                self.bars.append(Bar.at_most(f"{label}wrong trajectories", result["wrong_trajectories"], 0))

    async def history(self) -> None:
        await self.at_once()
        self.figures["history"] = {}
        rounds = self.amounts.history_rounds
        async with self.gateways() as doors:
            for door, tokens in zip(doors, (True, False), strict=True):
                with on_socket("raw_proxy.py", self.engine.url) as proxy:
                    result = await long_history.growth(door, self.engine.url, proxy, rounds, tokens=tokens)
                self.figures["history"][door.name] = result
                label = f"{door.name}: turn {long_history.LATE} over turn {long_history.EARLY}, "
                # Every gateway has to move more bytes and parse a longer body: the bar excludes that cost.
                label += "engine, transport and JSON subtracted"
                self.bars.append(Bar.at_most(label, result["own_wall_ratio"], HISTORY_RATIO_AT_MOST, "x"))

    async def relayed(self) -> None:
        await self.play(self.load.long_answer(relay.TOKENS))
        self.figures["relay"] = {}
        kinds = (token_kind(self.engine.url, self.policy), text_kind(self.engine.url, logprobs=True))
        with contextlib.ExitStack() as resources:
            proxies = {
                "raw_proxy": resources.enter_context(on_socket("raw_proxy.py", self.engine.url)),
                "reading_proxy": resources.enter_context(on_socket("raw_proxy.py", self.engine.url, "read")),
            }
            for kind, tokens in zip(kinds, (True, False), strict=True):
                with contextlib.ExitStack() as stack:
                    door = await asyncio.to_thread(stack.enter_context, gateway(kind))
                    query = {"return_token_ids": True, **({} if tokens else {"logprobs": True})}
                    result = await relay.compared(door, proxies, self.amounts.relay_rounds, tokens=tokens, asked=query)
                self.figures["relay"][door.name] = result
                for proxy in proxies:
                    for cost in ("wall", "cpu"):
                        label = f"{door.name}: {relay.TOKENS} tokens, {cost} over {proxy}"
                        self.bars.append(Bar.at_most(label, result[f"{cost}_over_{proxy}"], RELAY_RATIO_AT_MOST, "x"))


async def run(wanted: set[str], uni_agent_source: str | None, amounts: Amounts) -> tuple[dict[str, Any], list[Bar]]:
    raise_file_limit()
    with contextlib.ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        policy = make_policy(folder / "policy", FAMILY)
        engine = resources.enter_context(on_socket("engine.py"))
        bench = Bench(folder, policy, Load(policy), engine, amounts)
        await bench.at_once()
        sections: dict[str, Callable[[], Awaitable[None]]] = {
            "latency": bench.latency,
            "throughput": bench.throughput,
            "peers": lambda: bench.beside_peers(uni_agent_source),
            "sessions": bench.sessions,
            "history": bench.history,
            "relay": bench.relayed,
        }
        for name, section in sections.items():
            if name in wanted:
                begin = time.monotonic()
                await section()
                bench.figures[name]["section_s"] = round(time.monotonic() - begin, 1)
    return bench.figures, bench.bars


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas; default: all")
    parser.add_argument("--uni-agent", default=os.environ.get(peers.UNI_AGENT_SOURCE), help="a checkout of uni-agent")
    parser.add_argument("--rounds", type=int, default=Amounts.rounds, help="of throughput")
    parser.add_argument("--sessions", type=int, default=Amounts.sessions)
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    if unknown := wanted - set(SECTIONS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    amounts = Amounts(rounds=arguments.rounds, sessions=arguments.sessions)
    keep_memory()  # as the gateway does: else the cost of large bodies here would count as the gateway's
    figures, bars = uvloop.run(run(wanted, arguments.uni_agent, amounts))
    return print_report(figures, bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
