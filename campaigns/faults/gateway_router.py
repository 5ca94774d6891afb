#!/usr/bin/env python3
"""Test the router with engines that come, go, die, hang and refuse: fair shares, bounded probing, no session lost.

    python -m campaigns.faults.gateway_router --json [--cases shares dead killed …] [--doors library gateway]

Engines are processes (a tiny real model each) that are killed with SIGKILL and stopped with SIGSTOP. Requests are
counted in the engine's own log, or at the socket that replaces a dead engine. No harness here retries: every error
that reaches one counts as a lost session. Prints one JSON object last: ``figures`` and ``bars``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

import structlog

from campaigns.bench.report import Bar, print_report
from campaigns.faults.router_doors import Door, GatewayDoor, LibraryDoor, Load, TurnError, gateway, library, until
from campaigns.faults.router_engines import EngineProcess, Listener, engines
from nemo_gym_testing.gateway.tiny import check_truth, make_policy

INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 0.5
FAILURES = 3
DETECTION_S = INTERVAL_S + FAILURES * (INTERVAL_S + PROBE_TIMEOUT_S)
"""How long a hang can stay unnoticed: one interval after a probe that succeeded, then `FAILURES` probes that fail."""
SLACK_S = 2.0
"""Extra time for a busy machine."""
JOINING_DELAY_S = 0.2
"""The duration of every response when shares are measured. In a closed loop a slower engine would rightly get less."""
ROUTING = {"probe_interval_s": INTERVAL_S, "failures_to_down": FAILURES, "queue_timeout_s": 60.0}


@dataclass
class Report:
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)


@dataclass
class Case:
    """The setting in which a case runs."""

    name: str
    kind: str
    policy: Path
    workspace: Path
    report: Report

    def engine(self, name: str, **options: Any) -> EngineProcess:
        return EngineProcess(name, self.policy, self.workspace, **options)

    @asynccontextmanager
    async def door(
        self,
        running: Sequence[EngineProcess],
        *,
        routing: Mapping[str, Any] | None = None,
        retries: Mapping[str, Any] | None = None,
        max_tokens: int = 16,
    ) -> AsyncIterator[Door]:
        configs = [engine.config(probe_timeout_s=PROBE_TIMEOUT_S) for engine in running]
        options: dict[str, Any] = {"routing": {**ROUTING, **(routing or {})}, "retries": retries or {}}
        if self.kind == "library":
            async with library(configs, max_tokens=max_tokens, **options) as door:
                yield door
        else:
            async with gateway(
                configs, policy=self.policy, workspace=self.workspace, max_tokens=max_tokens, **options
            ) as served:
                yield served

    def figure(self, name: str, value: Any) -> None:
        self.report.figures[f"{self.name}, {self.kind}: {name}"] = value

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self.report.bars.append(Bar.at_most(f"{self.name}, {self.kind}: {name}", value, limit, unit))

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self.report.bars.append(Bar.at_least(f"{self.name}, {self.kind}: {name}", value, limit, unit))

    def nothing_lost(self, load: Load, sessions: int, turns: int) -> None:
        self.at_most("sessions lost", len(load.lost), 0)
        self.at_least("turns answered", load.turns_done, sessions * turns)
        if load.lost:
            self.figure("errors", sorted(set(load.lost))[:5])

    def truth(self, door: Door, running: Sequence[EngineProcess], excused: Sequence[str] = ()) -> None:
        """Check that harnesses received exactly what engines sampled."""
        logs = [engine.log for engine in running if engine.log.exists()]
        if isinstance(door, GatewayDoor):
            report = check_truth(door.rows, logs, self.policy, excused=excused)
            self.at_most("untrue tokens or answers", len(report.violations), 0)
            self.figure("tokens compared", report.sampled_tokens)
            self.figure("largest logprob error", report.largest_logprob_error)
            if report.violations:
                self.figure("violations", report.violations[:5])
        elif isinstance(door, LibraryDoor):
            invented = [answer.call for answer in door.answers if not _sampled(answer, running)]
            self.at_most("answers no engine sampled", len(invented), 0)
            self.figure("answers compared", len(door.answers))
            self.figure("answers continued on another engine", sum(len(a.parts) > 1 for a in door.answers))


def _sampled(answer: Any, running: Sequence[EngineProcess]) -> bool:
    """Whether each part of a response is the beginning of what some engine sampled for it."""
    calls = [call for engine in running for call in _by_call(engine).get(answer.call, ())]
    start = 0
    for part in answer.parts:
        expected = list(answer.token_ids[start : start + part])
        if not any(call[:part] == expected for call in calls):
            return False
        start += part
    return start == len(answer.token_ids)


_BY_CALL: dict[Path, dict[str, list[list[int]]]] = {}


def _by_call(engine: EngineProcess) -> dict[str, list[list[int]]]:
    if engine.log not in _BY_CALL:
        tokens_by_call = _BY_CALL[engine.log] = {}
        for call in engine.calls():
            tokens_by_call.setdefault(str(call.request_id).split("-")[0], []).append(call.token_ids.tolist())
    return _BY_CALL[engine.log]


# -- fair shares -----------------------------------------------------------------------------------------------------


async def shares(case: Case) -> None:
    """Let an engine join under load, where sticky sessions go on and new ones open."""
    for label, weight in (("equal weights", 1.0), ("double weight", 2.0)):
        old = [case.engine(f"{label[:2]}{n}", steady_delay_s=JOINING_DELAY_S) for n in range(3)]
        new = case.engine(f"{label[:2]}-new", steady_delay_s=JOINING_DELAY_S)
        async with engines(*old, new) as running, case.door(old, max_tokens=2) as door:
            load = Load(door)
            task = asyncio.create_task(load.run(10_000, 8, width=48))
            await load.reached(500)
            await door.add(new.config(weight=weight))
            before, done = [engine.count() for engine in running], load.turns_done
            await load.reached(done + 3000)
            placed = [engine.count() - count for engine, count in zip(running, before, strict=True)]
            load.stopped = True
            await task
        fair = weight / (3 + weight)
        share = placed[-1] / sum(placed)
        case.figure(f"calls after the joining, {label}", placed)
        case.at_most(f"deviation from the fair share of {fair:.0%}, {label}", abs(share / fair - 1) * 100, 5, "%")
        case.at_most(f"sessions lost, {label}", len(load.lost), 0)


async def long_sessions(case: Case) -> None:
    """Let an engine join when all sessions stick to the others and no new ones open."""
    old = [case.engine(f"long{n}", steady_delay_s=JOINING_DELAY_S) for n in range(3)]
    new = case.engine("long-new", steady_delay_s=JOINING_DELAY_S)
    async with engines(*old, new) as running, case.door(old, max_tokens=2) as door:
        load = Load(door)
        task = asyncio.create_task(load.run(48, 10_000))
        await load.reached(480)
        await door.add(new.config())
        before, done = [engine.count() for engine in running], load.turns_done
        await load.reached(done + 2000)
        placed = [engine.count() - count for engine, count in zip(running, before, strict=True)]
        load.stopped = True
        await task
    case.figure("calls after the joining", placed)
    case.at_most("deviation from the fair share of 25%", abs(placed[-1] / sum(placed) / 0.25 - 1) * 100, 5, "%")
    case.at_most("sessions lost", len(load.lost), 0)


# -- a dead engine ---------------------------------------------------------------------------------------------------

_UNWELL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
_WELL_UNTIL_ASKED: dict[str, bytes | None] = {"closes": b"", "is silent": None, "answers 500": _UNWELL}


async def dead(case: Case) -> None:
    """Kill an engine, and at once count the requests that still reach its port."""
    for label, answer in _WELL_UNTIL_ASKED.items():
        running = [case.engine(f"{label[:5]}{n}".replace(" ", ""), first_token_delay_s=0.02) for n in range(4)]
        async with engines(*running), case.door(running, max_tokens=4) as door:
            load = Load(door)
            task = asyncio.create_task(load.run(10_000, 8, width=32))
            await load.reached(200)
            victim = running[0]
            victim.kill()
            async with Listener().at(victim.port, answer) as listener:
                detected_s = await until(functools.partial(_state, door, victim.name, "down"))
                detected_at = time.monotonic()
                await asyncio.sleep(INTERVAL_S)  # for calls that were placed before and connect only now
                counted, began = listener.seen["requests"], time.monotonic()
                intervals = 24
                await asyncio.sleep(intervals * INTERVAL_S)
                passed = (time.monotonic() - began) / INTERVAL_S
                requests = listener.seen["requests"] - counted
                turns = load.turns_done
            load.stopped = True
            await task
        late = max(0.0, (listener.last_call_at or 0.0) - detected_at)
        case.figure(f"the port {label}: requests until one interval after it was found dead", counted)
        case.figure(f"the port {label}: last call to it, s after it was found dead", round(late, 3))
        case.at_most(f"s after it was found dead of the last call to it, the port {label}", late, INTERVAL_S, "s")
        case.figure(f"the port {label}: found dead after s", round(detected_s, 2))
        case.figure(f"the port {label}: requests in {passed:.1f} intervals", dict(listener.seen))
        case.figure(f"the port {label}: turns answered by the others", turns)
        case.at_most(f"requests per probe interval, the port {label}", requests / passed, 1 + 1 / passed)
        case.at_most(f"sessions lost, the port {label}", len(load.lost), 0)


async def _state(door: Door, name: str, state: str) -> bool:
    return any(engine["name"] == name and engine["state"] == state for engine in (await door.status())["engines"])


# -- engines that fail under load ------------------------------------------------------------------------------------


async def killed(case: Case) -> None:
    """Kill one of four engines in the middle of 64 sessions × 8 turns, with its responses half sampled."""
    for label, keep in (("sampled again", False), ("continued", True)):
        running = [case.engine(f"k{label[0]}{n}", tokens_per_second=60.0) for n in range(4)]
        async with engines(*running), case.door(running, retries={"keep_partial_answers": keep}) as door:
            load = Load(door)
            task = asyncio.create_task(load.run(64, 8))
            await load.reached(120)
            flying = {engine["name"]: engine["in_flight"] for engine in (await door.status())["engines"]}
            running[0].kill()
            await task
            part = replace(case, name=f"{case.name}, {label}")
            part.figure("calls on the engine when it was killed", flying[running[0].name])
            part.nothing_lost(load, 64, 8)
            part.truth(door, running)


async def hung(case: Case) -> None:
    """Stop one of four engines (SIGSTOP): its sockets stay open and send nothing. Later let it continue."""
    running = [case.engine(f"h{n}", tokens_per_second=60.0) for n in range(4)]
    victim = running[0]
    async with engines(*running), case.door(running) as door:
        load = Load(door)
        task = asyncio.create_task(load.run(64, 8))
        await load.reached(120)
        victim.send(signal.SIGSTOP)
        unfinished = [str(call.request_id) for call in victim.calls() if call.outcome == "killed"]
        detected_s = await until(lambda: _state(door, victim.name, "down"))
        await task
        count = victim.count()
        victim.send(signal.SIGCONT)
        back = await until(lambda: _in_trial_or_up(door, victim.name))
        more = Load(door)
        await more.run(32, 4)
        case.figure("calls it had when it stopped", len(unfinished))
        case.figure("calls it got after it went on", victim.count() - count)
        case.figure("in service again after s", round(back, 2))
        case.at_most("s until the hang was found", detected_s, DETECTION_S + SLACK_S, "s")
        case.nothing_lost(load, 64, 8)
        case.at_most("sessions lost afterwards", len(more.lost), 0)
        case.at_least("calls it got after it went on", victim.count() - count, 1)
        # The engine finishes responses whose callers have long disconnected: sampled, but received by no one.
        case.truth(door, running, excused=unfinished)


async def _in_trial_or_up(door: Door, name: str) -> bool:
    return not await _state(door, name, "down")


async def drained(case: Case) -> None:
    """Drain and undrain each of four engines in turn, as an update of weights does; remove one for good."""
    running = [case.engine(f"d{n}", tokens_per_second=120.0) for n in range(4)]
    async with engines(*running), case.door(running) as door:
        load = Load(door)
        task = asyncio.create_task(load.run(64, 12))
        await load.reached(100)
        late = 0
        for engine in running:
            await door.drain(engine.name, 60.0)
            count = engine.count()
            await asyncio.sleep(0.3)
            late += engine.count() - count
            await door.undrain(engine.name)
        await door.remove(running[0].name, 60.0)
        running[0].kill()
        await task
        case.at_most("calls to a drained engine", late, 0)
        case.nothing_lost(load, 64, 12)
        case.truth(door, running)


# -- no engine up, no engine with capacity ---------------------------------------------------------------------------


async def all_down(case: Case) -> None:
    """Kill every engine: calls wait for a bounded time and get a ``Retry-After``. Then restart the engines."""
    running = [case.engine(f"a{n}") for n in range(2)]
    async with engines(*running), case.door(running, routing={"queue_timeout_s": 1.0}) as door:
        session = await door.session()
        await session.turn()
        for engine in running:
            engine.kill()
        errors: list[TurnError] = []
        began = time.monotonic()
        for _ in range(2):
            try:
                await session.turn()
            except TurnError as error:
                errors.append(error)
        case.figure(
            "what a harness was told", [f"{error.status}, Retry-After {error.retry_after}" for error in errors]
        )
        case.figure("s until both were told", round(time.monotonic() - began, 2))
        case.at_least("503 with Retry-After", sum(e.status == 503 and bool(e.retry_after) for e in errors), 2)
        waiting = Load(door)
        task = asyncio.create_task(_patient(door, waiting))
        for engine in running:
            engine.start()
        for engine in running:
            await engine.up()
        await task
        await session.turn()
        await session.close()
        case.at_least("turns answered afterwards by sessions that came back", waiting.turns_done, 16)


async def _patient(door: Door, load: Load) -> None:
    """Run harnesses that retry half a second after each 503."""

    async def harness() -> None:
        session = await door.session()
        for _ in range(120):
            try:
                await session.turn()
            except TurnError as error:
                assert error.status == 503, error
                await asyncio.sleep(0.5)
            else:
                load.turns_done += 1
                return await session.close()

    await asyncio.gather(*(harness() for _ in range(16)))


async def limited(case: Case) -> None:
    """Let every engine respond with 429: the harness gets a 429 at once, and the engines stay in service."""
    from campaigns.faults.router_limits import limited_engine

    async with limited_engine(2) as first, limited_engine(2) as second:
        configs = [case.engine("l0", port=first.port), case.engine("l1", port=second.port)]
        async with case.door(configs) as door:
            session = await door.session()
            errors: list[TurnError] = []
            for _ in range(4):
                try:
                    await session.turn()
                except TurnError as error:
                    errors.append(error)
            states = {engine["state"] for engine in (await door.status())["engines"]}
            case.figure("what a harness was told", [f"{e.status}, Retry-After {e.retry_after}" for e in errors])
            case.figure("requests the engines got", first.asked + second.asked)
            case.at_least("429 with Retry-After", sum(e.status == 429 and bool(e.retry_after) for e in errors), 4)
            case.at_most("requests to engines that asked to wait", first.asked + second.asked, 2)
            case.at_most("engines out of service", float(states != {"up"}), 0)


CASES: dict[str, Callable[[Case], Awaitable[None]]] = {
    "shares": shares,
    "long_sessions": long_sessions,
    "dead": dead,
    "killed": killed,
    "hung": hung,
    "drained": drained,
    "all_down": all_down,
    "limited": limited,
}
THROUGH_THE_LIBRARY_ONLY = {"long_sessions"}


async def campaign(cases: Sequence[str], doors: Sequence[str], *, quiet: bool) -> Report:
    report = Report()
    with tempfile.TemporaryDirectory(prefix="router-") as folder:
        policy = make_policy(Path(folder) / "policy", "chatml_think")
        for kind in doors:
            for name in cases:
                if kind != "library" and name in THROUGH_THE_LIBRARY_ONLY:
                    continue
                workspace = Path(folder) / f"{kind}-{name}"
                workspace.mkdir()
                began = time.monotonic()
                await CASES[name](Case(name, kind, policy, workspace, report))
                if not quiet:
                    print(f"{kind} {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--doors", nargs="+", choices=["library", "gateway"], default=["library", "gateway"])
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    report = asyncio.run(campaign(options.cases, options.doors, quiet=options.json))
    return print_report(report.figures, report.bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
