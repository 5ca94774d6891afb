#!/usr/bin/env python3
"""Kill -9 the gateway again and again while harnesses talk to it, and compare clients, trajectories and engine.

    python -m campaigns.faults.gateway_restart --json [--seed 1] [--sessions 48] [--turns 12] [--kills 25]

Every other kill waits for the journal to grow, to land between a turn's commit and its delivery; every third leaves a
torn record at the journal's end. Then the same with a disk that is full. Prints figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.faults.gateway.clients import Client, clients, connector
from campaigns.faults.gateway.ledger import Ledger, compare
from campaigns.faults.gateway.processes import EngineProcess, GatewayProcess, policy_in
from nemo_gym_testing.gateway.tiny.log import read_log

GROWTH_BYTES = 400
"""A turn's record is longer; the record of a delivered response is shorter."""
KILL_ON_GROWTH = """
import os, sys, time
pid, path, growth, within_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
deadline, size = time.monotonic() + within_s, os.stat(path).st_size
while time.monotonic() < deadline:
    now = os.stat(path).st_size
    if now - size > growth:
        os.kill(pid, 9)
        sys.exit(0)
    size = now
sys.exit(1)
"""
"""A separate process, because the window between a turn's commit and its delivery is a fraction of a millisecond."""


@dataclass
class Killer:
    """Kills and restarts a gateway while its clients work."""

    gateway: GatewayProcess
    clients: Sequence[Client]
    log: Path
    draw: random.Random
    kills: int = 0
    on_growth: int = 0
    torn: int = 0
    starts_s: list[float] = field(default_factory=list)

    async def once(self) -> None:
        if self.kills % 2:
            self.on_growth += await asyncio.to_thread(self._kill_on_growth)
        else:
            await asyncio.sleep(self.draw.uniform(0.02, 0.4))
            self.gateway.kill()
        self.kills += 1
        begun = frozenset(str(call.request_id)[:32] for call in read_log(self.log))
        for client in self.clients:
            if client.asking:
                client.hits += 1
                client.begun_before_hit = begun
        if self.kills % 3 == 0:
            self._tear()
        self.starts_s.append(await asyncio.to_thread(self.gateway.start))

    def _kill_on_growth(self) -> bool:
        """Kill the gateway at the moment its journal gets a turn; return whether one came in time."""
        within_s = self.draw.uniform(0.5, 2.0)
        arguments = [str(self.gateway.pid), str(self._segment()), str(GROWTH_BYTES), str(within_s)]
        done = subprocess.run([sys.executable, "-S", "-c", KILL_ON_GROWTH, *arguments], check=False)
        self.gateway.kill()
        return done.returncode == 0

    def _segment(self) -> Path:
        return max(self.gateway.journal.glob("*.log"))

    def _tear(self) -> None:
        """Leave the journal as a machine that dies in the middle of a write leaves it."""
        with self._segment().open("r+b") as file:
            beginning = file.read(self.draw.randrange(1, 60))
            file.seek(0, os.SEEK_END)
            file.write(beginning)
        self.torn += 1


async def kills(
    folder: Path, *, seed: int, sessions: int, turns: int, wanted: int, durability: str
) -> tuple[dict[str, Any], list[Bar]]:
    """The campaign for one durability mode."""
    draw = random.Random(seed)
    policy = policy_in(folder)
    engine = EngineProcess(policy, folder / "engine.jsonl", "--first-token-delay", "0.03")
    gateway = GatewayProcess(folder, [engine.url], policy, durability=durability)
    try:
        gateway.start()
        async with aiohttp.ClientSession(connector=connector()) as http:
            harnesses = clients(sessions, gateway, http, draw)
            await asyncio.gather(*(client.open() for client in harnesses))
            killer = Killer(gateway, harnesses, engine.log, draw)
            working = asyncio.gather(*(client.run(turns, lambda: draw.uniform(0, 0.3)) for client in harnesses))
            try:
                while killer.kills < wanted and not working.done():
                    await killer.once()
                await working
            finally:
                working.cancel()
            summaries = [await client.finalize() for client in harnesses]
            # Finalizing again returns the same summary, from a restarted gateway too.
            gateway.kill()
            gateway.start()
            changed = [c.tag for c, before in zip(harnesses, summaries, strict=True) if await c.finalize() != before]
    finally:
        gateway.close()
        engine.stop()
    ledger = compare(harnesses, summaries, engine.log, policy)
    figures = {
        "durability": durability,
        "kills": killer.kills,
        "kills_on_commit": killer.on_growth,
        "torn_tails": killer.torn,
        "sessions": sessions,
        "answers_received": sum(len(client.received) for client in harnesses),
        "requests_hit": sum(client.hits for client in harnesses),
        "sampled_before_and_delivered_after_a_kill": sum(client.given_again for client in harnesses),
        "died_uncommitted_and_sampled_anew": ledger.resampled,
        "sampled_tokens": ledger.truth.sampled_tokens,
        "largest_logprob_error": ledger.truth.largest_logprob_error,
        "start_s": round(max(killer.starts_s), 2) if killer.starts_s else None,
        "outcomes": dict(sum((client.statuses for client in harnesses), Counter())),
        **_shown(ledger),
    }
    mode = f"{durability}: "
    refused = [refusal for client in harnesses for refusal in client.refusals]
    if refused:
        figures["refusals"] = [repr(refusal)[:300] for refusal in refused[:5]]
    bars = [
        *_bars(mode, ledger),
        Bar.at_most(f"{mode}requests refused", len(refused), 0),
        Bar.at_most(f"{mode}finalized sessions that a restart changed", len(changed), 0),
        Bar.at_least(f"{mode}answers given again after a kill", sum(client.given_again for client in harnesses), 1),
    ]
    return figures, bars


async def full_disk(folder: Path, *, seed: int, sessions: int, turns: int) -> tuple[dict[str, Any], list[Bar]]:
    """A journal on a disk that fills up, then has room again for a restarted gateway."""
    draw = random.Random(seed)
    policy = policy_in(folder)
    with small_disk(folder / "journal", "256k") as grow:
        engine = EngineProcess(policy, folder / "engine.jsonl")
        gateway = GatewayProcess(folder, [engine.url], policy)
        try:
            gateway.start()
            async with aiohttp.ClientSession(connector=connector()) as http:
                harnesses = clients(sessions, gateway, http, draw)
                await asyncio.gather(*(client.open() for client in harnesses))
                working = asyncio.gather(*(client.run(turns) for client in harnesses))
                while not all(client.refusals for client in harnesses):
                    assert not working.done(), "the disk never filled up; raise sessions or turns"
                    await asyncio.sleep(0.02)
                before = sum(len(client.received) for client in harnesses)
                await asyncio.sleep(0.5)
                during = sum(len(client.received) for client in harnesses) - before
                async with http.get(f"{gateway.url}/ready") as reply:
                    ready = reply.status
                gateway.kill()
                for client in harnesses:
                    # The response sampled for each refused request was lost with its commit, and so was the last one.
                    client.hits = len(client.refusals) + 1
                grow("64m")
                await asyncio.to_thread(gateway.start)
                await working
                summaries = [await client.finalize() for client in harnesses]
        finally:
            gateway.close()
            engine.stop()
        ledger = compare(harnesses, summaries, engine.log, policy)
    refusals = [refusal for client in harnesses for refusal in client.refusals]
    shapeless = [refusal for refusal in refusals if not _is_error(refusal)]
    figures = {
        "sessions": sessions,
        "answers_before_it_was_full": before,
        "answers_while_it_was_full": during,
        "refusals": dict(Counter(status for status, _, _ in refusals)),
        "first_refusal": refusals[0][2].decode(),
        "ready_status_while_full": ready,
        "answers_received": sum(len(client.received) for client in harnesses),
        "sampled_and_not_committed": ledger.resampled,
        **_shown(ledger),
    }
    mode = "full disk: "
    bars = [
        *_bars(mode, ledger),
        Bar.at_most(f"{mode}answers while nothing could be committed", during, 0),
        # The requests in flight when the disk filled up, and one more per session for the disk's last bytes.
        Bar.at_most(f"{mode}sampled for nothing", ledger.resampled, 2 * sessions),
        Bar.at_most(f"{mode}refusals that are no 5xx in the dialect", len(shapeless), 0),
        Bar(f"{mode}/ready while it was full", ready, "", "= 503", ready == 503),
    ]
    return figures, bars


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Any]:
    """Mount a file system of that size; yield a function that resizes it."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(at)], check=True)
    try:
        yield lambda other: subprocess.run(["mount", "-o", f"remount,size={other}", str(at)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def _is_error(refusal: tuple[int, dict[str, str], bytes]) -> bool:
    status, _, data = refusal
    try:
        error = json.loads(data)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return 500 <= status < 600 and bool(error.get("message")) and bool(error.get("type"))


def _shown(ledger: Ledger) -> dict[str, list[str]]:
    shown = {name: getattr(ledger, name)[:5] for name in ("lost", "doubled", "changed", "split", "unexplained")}
    shown["untrue"] = ledger.truth.violations[:5]
    return {name: examples for name, examples in shown.items() if examples}


def _bars(mode: str, ledger: Ledger) -> list[Bar]:
    return [
        Bar.at_most(f"{mode}received answers that are lost", len(ledger.lost), 0),
        Bar.at_most(f"{mode}answers doubled, or kept and never received", len(ledger.doubled), 0),
        Bar.at_most(f"{mode}answers that are not their tokens' text", len(ledger.changed), 0),
        Bar.at_most(f"{mode}conversations that split", len(ledger.split), 0),
        Bar.at_most(f"{mode}sampled answers that nothing explains", len(ledger.unexplained), 0),
        Bar.at_most(f"{mode}differences from the engine's log and model", len(ledger.truth.violations), 0),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--kills", type=int, default=25, help="per durability mode")
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(900, exit=True)  # a campaign that hangs prints where
    figures: dict[str, Any] = {"seed": chosen.seed}
    bars: list[Bar] = []
    for durability in ("process", "power_loss"):
        with tempfile.TemporaryDirectory(prefix="gateway-restart-") as folder:
            result, new_bars = asyncio.run(
                kills(
                    Path(folder),
                    seed=chosen.seed,
                    sessions=chosen.sessions,
                    turns=chosen.turns,
                    wanted=chosen.kills,
                    durability=durability,
                )
            )
        figures[durability], bars = result, bars + new_bars
    with tempfile.TemporaryDirectory(prefix="gateway-restart-") as folder:
        result, new_bars = asyncio.run(full_disk(Path(folder), seed=chosen.seed, sessions=12, turns=40))
    figures["full_disk"], bars = result, bars + new_bars
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
