#!/usr/bin/env python3
"""Kill -9 the broker at every boundary of a write or a backend call, and at random points of a workload of many boxes.

    python -m campaigns.faults.broker_crash --json [--database sqlite] [--provider local] [--seed 1] [--boxes 200]
        [--kills 100] [--boundaries N]

After each kill the broker is started again and reconciles once; then the backend's own inventory (what it lists, its
directories or containers) is compared with the records and with what clients were told, and each command's own count
of its runs with its end. At the end every output is read again, every box destroyed, and what is left on the machine
(processes, mounts, cgroups, namespaces, files, containers) counted. Prints figures and bars as JSON, last.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from campaigns.faults.broker.client import Client, client
from campaigns.faults.broker.ledger import Ledger
from campaigns.faults.broker.lives import WHOLE, Life, Promises, reread, script
from campaigns.faults.broker.stage import DATABASES, PROVIDERS, Stage, database, stage

_MORE_TRIES = 12
AT_ONCE = 24
"""Boxes that are worked with at the same time."""
SETTLING_S = 45.0
"""For what was under way when the broker was looked at: leases that end, destructions that were asked for."""


@dataclass
class Play:
    """One broker that is killed, its clients, and what they know."""

    stage: Stage
    client: Client
    ledger: Ledger = field(default_factory=Ledger)
    promises: Promises = field(default_factory=Promises)
    kills: int = 0
    kills_while_starting: int = 0
    starts_s: list[float] = field(default_factory=list)
    compared: int = 0
    killed_at: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """What the broker says of boxes that are not as promised."""

    def life(self, draw: random.Random, steps: tuple[str, ...]) -> Life:
        return Life(self.stage, self.client, self.ledger, self.promises, random.Random(draw.random()), steps)

    async def start(self, draw: random.Random | None = None, kill_step: int = 0) -> None:
        """Until it is ready; with ``draw``, now and then killed in the middle of coming back."""
        broker = self.stage.broker
        while True:
            broker.env |= {"KILL_NAME": "", "KILL_STEP": str(kill_step)}
            began = time.monotonic()
            await asyncio.to_thread(broker.start, wait=False)
            if draw is not None and draw.random() < 0.15:
                await asyncio.sleep(draw.uniform(0.5, 1.5) * (self.starts_s[-1] if self.starts_s else 1.0))
                await asyncio.to_thread(broker.kill)
                self.kills_while_starting += 1
                continue
            await asyncio.to_thread(broker.wait_ready)
            self.starts_s.append(time.monotonic() - began)
            return

    async def kill(self) -> None:
        self.client.may_ask.clear()
        await asyncio.to_thread(self.stage.broker.kill)
        self.kills += 1

    async def compare(self) -> None:
        """Backend and records, with every request held back; then requests go on."""
        self.client.may_ask.clear()
        await self.client.quiet()
        inventory = self.stage.inventory
        deadline = time.monotonic() + SETTLING_S
        while True:
            recorded = await self._recorded()
            found, physical = await inventory.boxes(), await asyncio.to_thread(inventory.physical)
            agreed = self.ledger.agree(found, physical, recorded, self.promises.closed)
            if agreed or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.ledger.compare(found, physical, recorded, self.promises.closed)
        if not agreed:
            await self._look_into(self.ledger.named)
        self.compared += 1
        self.client.may_ask.set()

    async def _look_into(self, sandbox_ids: set[str]) -> None:
        for sandbox_id in sorted(sandbox_ids)[:5]:
            async with self.client.session.get(
                f"{self.stage.broker.url}/v1/sandboxes/{sandbox_id}", headers=self.stage.broker.caller()
            ) as response:
                self.notes.append(f"at {time.time():.1f}: {await response.text()}")
            log = self.stage.broker.log.read_text(errors="replace").splitlines()
            self.notes += [line[:500] for line in log if sandbox_id in line][-10:]

    async def _recorded(self) -> set[str]:
        async with self.client.session.get(
            f"{self.stage.broker.url}/v1/sandboxes?limit=1000", headers=self.stage.broker.caller()
        ) as response:
            assert response.status == 200, await response.text()
            return {view["sandbox_id"] for view in (await response.json())["sandboxes"]}

    async def finish(self) -> dict[str, list[str]]:
        """Read all again, count runs, destroy every box; what is left on the machine."""
        await self.compare()
        await reread(self.client, self.promises, self.ledger)
        self.ledger.count_runs(self.stage.counter.ran, self.promises.ended)
        await asyncio.to_thread(self.stage.broker.stop)
        await self.stage.inventory.provider.aclose()
        return await self.stage.inventory.residue()

    def figures(self) -> dict[str, Any]:
        outcomes = Counter(self.promises.ended.values())
        return {
            "kills": self.kills,
            "kills_while_starting": self.kills_while_starting,
            "comparisons": self.compared,
            "requests": self.client.asked,
            "requests_broken": self.client.broken,
            "execs": dict(outcomes),
            "runs_counted": sum(self.stage.counter.ran.values()),
            "boxes_told_gone": len(self.promises.closed),
            "start_s": {"median": round(sorted(self.starts_s)[len(self.starts_s) // 2], 2), "max": max(self.starts_s)},
            **({"wrong": self.ledger.wrong, "notes": self.notes} if self.ledger.wrong else {}),
        }


def judged(play: Play, mode: str, left: dict[str, list[str]]) -> tuple[dict[str, Any], list[Bar]]:
    figures = {**play.figures(), **({"left": {kind: things[:5] for kind, things in left.items()}} if left else {})}
    bars = [*play.ledger.bars(mode), Bar.at_most(f"{mode}: things left on the machine", len(left), 0)]
    return figures, bars


async def random_points(
    folder: Path, *, provider: str, settings: dict[str, Any], seed: int, boxes: int, kills: int
) -> tuple[dict[str, Any], list[Bar]]:
    """Kills at seeded points of the workload, counted in steps of its boxes."""
    draw = random.Random(seed)
    async with stage(folder, provider, settings) as set_up, client(set_up.broker.url) as calls:
        play = Play(set_up, calls)
        lives = [play.life(draw, script(draw)) for _ in range(boxes)]
        steps = sum(len(life.steps) for life in lives)
        points = sorted(draw.sample(range(1, steps), kills))
        await play.start()
        room = asyncio.Semaphore(AT_ONCE)

        async def one(life: Life) -> None:
            async with room:
                await life.play()

        work = asyncio.gather(*(one(life) for life in lives))
        try:
            for point in points:
                # Every step asks at least once, so the points lie within the workload.
                while calls.asked < point and not work.done():  # noqa: ASYNC110 - a count has no event
                    await asyncio.sleep(0.002)
                await asyncio.sleep(draw.uniform(0, 0.05))
                await play.kill()
                await play.start(draw)
                await play.compare()
            await work
        except BaseException:
            work.cancel()
            raise
        left = await play.finish()
    figures, bars = judged(play, f"{boxes} boxes", left)
    bars.append(Bar.at_least(f"{boxes} boxes: kills", play.kills, kills))
    return {"boxes": boxes, "steps": steps, **figures}, bars


async def every_boundary(
    folder: Path, *, provider: str, settings: dict[str, Any], seed: int, at: range | None, wanted: int | None
) -> tuple[dict[str, Any], list[Bar]]:
    """Kills before and after each commit and each backend call of one owner's whole work, and, now and then, again
    while the broker makes good what the first kill left.

    Args:
        at: the boundaries; ``None`` is all.
        wanted: kill at so many of them, seeded; ``None`` is at each.
    """
    draw = random.Random(seed)
    async with stage(folder, provider, settings) as set_up, client(set_up.broker.url) as calls:
        play = Play(set_up, calls)
        await play.start()
        await play.life(draw, WHOLE).play()
        crossed = set_up.boundaries.read_text().splitlines()
        steps = [*(at or range(1, len(crossed) + 1))]
        if wanted is not None:
            steps = sorted(draw.sample(steps, min(wanted, len(steps))))
        wanted_kinds = _kinds(crossed[step - 1] for step in steps)
        for _ in range(_MORE_TRIES):
            for step in steps:
                await asyncio.to_thread(set_up.broker.stop)
                name = crossed[step - 1]
                await _killed_at(play, draw, name, crossed[:step].count(name))
            # What is committed together differs from run to run, and with it what a boundary is called.
            missed = wanted_kinds - _kinds(play.killed_at)
            steps = [
                draw.choice([n for n, name in enumerate(crossed, 1) if kind in _kinds([name])])
                for kind in sorted(missed)
            ]
        left = await play.finish()
    figures, bars = judged(play, "boundaries", left)
    killed_at = len(wanted_kinds & _kinds(play.killed_at))
    bars.append(Bar.at_least("boundaries: kinds killed at", killed_at, len(wanted_kinds)))
    figures |= {"boundaries": len(crossed), "kinds": len(_kinds(crossed)), "killed_at": dict(play.killed_at)}
    return figures, bars


def _kinds(names: Iterable[str]) -> set[str]:
    """What is crossed at boundaries of those names. Which writes share a commit is chance."""
    found = set()
    for name in names:
        before, is_commit, writes = name.partition("commit of ")
        found |= {f"{before}{is_commit}{write}" for write in writes.split("+")}
    return found


async def _killed_at(play: Play, draw: random.Random, name: str, count: int) -> None:
    """One owner's work with the broker killed where it crosses a boundary for the ``count``-th time, and brought back
    until the work is done."""
    broker = play.stage.broker

    def died() -> None:
        play.kills += 1
        play.killed_at[play.stage.boundaries.read_text().splitlines()[-1]] += 1

    broker.env |= {"KILL_NAME": name, "KILL_STEP": str(count)}
    broker.start(wait=False)
    again = [draw.randrange(1, 12)] if draw.random() < 0.3 else []
    # Readiness reads the database too. It is asked beside the owner's work, which so begins while the broker starts.
    work = asyncio.gather(play.life(draw, WHOLE).play(), play.client.ready())
    try:
        while not work.done():
            if not broker.runs:
                died()
                broker.env |= {"KILL_NAME": "", "KILL_STEP": str(again.pop() if again else 0)}
                broker.start(wait=False)
            await asyncio.sleep(0.01)
        await work
    finally:
        work.cancel()
    if broker.env["KILL_STEP"] != "0":
        # It may still come to that boundary, also while it is asked whether it is ready.
        await asyncio.to_thread(broker.stop)
    if not broker.runs:
        if broker.killed:
            died()
        await play.start()
    await asyncio.to_thread(broker.wait_ready)
    await play.compare()


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--provider", choices=PROVIDERS, default="local")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100, help="at random points of the workload; 0 does without it")
    parser.add_argument("--boundaries", type=int, help="kill at so many of them, seeded; all by default, 0 at none")
    chosen = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(3600, exit=True)  # a campaign that hangs says where
    figures: dict[str, Any] = {name: getattr(chosen, name) for name in ("database", "provider", "seed")}
    bars: list[Bar] = []
    common = {"provider": chosen.provider, "seed": chosen.seed}
    if chosen.boundaries != 0:
        with tempfile.TemporaryDirectory(prefix="broker-crash-") as place, database(chosen.database) as settings:
            found, met = asyncio.run(
                every_boundary(Path(place), settings=settings, at=None, wanted=chosen.boundaries, **common)
            )
        figures["every_boundary"], bars = found, bars + met
    if chosen.kills:
        with tempfile.TemporaryDirectory(prefix="broker-crash-") as place, database(chosen.database) as settings:
            found, met = asyncio.run(
                random_points(Path(place), settings=settings, boxes=chosen.boxes, kills=chosen.kills, **common)
            )
        figures["random_points"], bars = found, bars + met
    return print_report(figures, bars, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
