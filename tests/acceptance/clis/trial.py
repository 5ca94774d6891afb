"""One run of one CLI through the gateway, calm or among faults, and what its trajectories are worth."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gym_testing.gateway.tiny.engine import Wire
from nemo_gym_testing.gateway.tiny.truth import check_truth
from tests.acceptance.clis.drivers import CLIS, Cli
from tests.acceptance.clis.place import Endpoint, Place
from tests.acceptance.clis.plans import CALM, Plan
from tests.acceptance.clis.runs import Finished, run_cli
from tests.acceptance.clis.script import START, Script, script_for
from tests.acceptance.clis.wire import BadWire
from tests.acceptance.stage import MODEL, Stage, split_reasons, staged

TASK = f"Make the conversion work both ways, and write notes about it. {START}"
ON = "Go on where you stopped."
BULK_LINES = 900
MIN_TURNS = 10
WIRES: Mapping[str, Wire] = {"bar_tokens": "sglang"}
"""The engine's wire by template family; the others speak vLLM's."""


@dataclass
class Trial:
    """Figures of one trial."""

    cli: str
    family: str
    plan: str
    completed: bool = False
    detail: str = ""
    turns: int = 0
    """Committed, those of sub-agents and summaries included."""
    resumed: int = 0
    """Broken engine calls whose tokens are in a trajectory, because another call went on from them."""
    trajectories: int = 0
    sampled_tokens: int = 0
    max_logprob_error: float = 0.0
    splits: dict[str, int] = field(default_factory=dict)
    injected: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    """Answers begun by the engine: ``main``, ``side`` (a sub-agent's), ``summary`` (compaction), ``aside``."""
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.completed and self.turns >= MIN_TURNS and not self.violations


async def trial(directory: Path, cli: str, family: str, plan: Plan = CALM, *, timeout_s: float = 400.0) -> Trial:
    """Run it below ``directory``, which must not exist; ``timeout_s`` is for each of its runs."""
    started = time.monotonic()
    directory.mkdir(parents=True)
    place = Place.make(directory / "place")
    found = Trial(cli, family, plan.name)
    compacting = CLIS[cli].compact_above_tokens is not None and plan.calm
    script = script_for(cli, str(place.work), family=family, bulk_lines=BULK_LINES if compacting else 0)
    served: dict[str, Any] = {"tokens_per_second": plan.tokens_per_second, **plan.gateway}
    async with staged(directory, family, script, wire=WIRES.get(family, "vllm"), **served) as stage:
        session = await stage.open()
        stage.engine.chance = lambda: plan.engine(len(stage.engine.calls))
        async with BadWire(stage.port, plan.wire) as wire:
            driver = CLIS[cli](
                place,
                Endpoint(wire.url + session.base_url.removesuffix("/v1")[len(stage.url) :], session.token, MODEL),
                compact_at_tokens=CLIS[cli].compact_above_tokens if compacting else None,
                timeout_s=plan.timeout_s,
            )
            ended = await _run(driver, script, plan, timeout_s)
            found.injected = _injected(stage, wire, ended)
        finished = await stage.finalize(session)
    last = ended[-1]
    (directory / "output.txt").write_text("\n\n".join(one.output for one in ended))
    found.completed = last.outcome.completed and script.last in script.asked
    found.detail = last.outcome.detail if not found.completed else ""
    _judge(found, finished, directory, stage)
    found.asked = dict(Counter(what.partition(":")[0] for what in script.asked))
    found.seconds = round(time.monotonic() - started, 1)
    return found


async def _run(driver: Cli, script: Script, plan: Plan, timeout_s: float) -> list[Finished]:
    """The runs of one conversation. Among faults it is killed in the middle, and resumed while it gives up over
    them; where it cannot be resumed, it has to come through in one run."""
    runs: list[Finished] = []
    thread = None
    while not runs or (not runs[-1].outcome.completed and len(runs) < (plan.max_runs if driver.resumes else 1)):
        kill_at = None
        if driver.resumes and len(runs) < len(plan.kill_after):
            kill_at = len(script.asked) + plan.kill_after[len(runs)]

        def due(kill_at: int | None = kill_at) -> bool:
            return kill_at is not None and len(script.asked) >= kill_at

        runs.append(await run_cli(driver, ON if thread else TASK, resume=thread, timeout_s=timeout_s, kill_when=due))
        # Killed before it had said what its conversation is called, there is none to resume.
        thread = thread or runs[-1].outcome.thread
    return runs


def _judge(found: Trial, finished: Mapping[str, Any], directory: Path, stage: Stage) -> None:
    rows = finished["trajectories"]
    report = check_truth(rows, directory / "engine.jsonl", stage.policy)
    found.turns, found.trajectories = finished["turns"], len(rows)
    found.sampled_tokens, found.resumed = report.sampled_tokens, report.resumed
    found.max_logprob_error = report.largest_logprob_error
    found.splits = split_reasons(rows)
    found.violations = [*report.violations]
    if found.sampled_tokens != finished["usage"]["output_tokens"]:
        found.violations.append(
            f"{found.sampled_tokens} tokens are marked as sampled, {finished['usage']['output_tokens']} were accounted"
        )


def _injected(stage: Stage, wire: BadWire, ended: list[Finished]) -> dict[str, int]:
    """The faults that happened, by kind."""
    happened: Counter[str] = Counter()
    happened.update(f"engine {type(call.fault).__name__}" for call in stage.engine.calls if call.fault is not None)
    happened.update(f"wire {type(fault).__name__}" for fault in wire.done)
    happened["engine calls cancelled"] = sum(call.outcome == "cancelled" for call in stage.engine.calls)
    happened["CLI killed"] = sum(one.killed for one in ended)
    happened["CLI gave up"] = sum(not one.killed and not one.outcome.completed for one in ended)
    return {kind: number for kind, number in sorted(happened.items()) if number}
