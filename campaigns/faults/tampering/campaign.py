"""Plays the tampering corpus against real boxes and prints what it earned.

``python campaigns/faults/tampering/campaign.py [--sandbox local] [--only ID*,…] [--source redteam] [--concurrency 2]
[--harness N] [--json]``

Figures: ``gains`` (attacks that were rewarded), ``false_findings`` (honest work with a finding, with the rate's 95 %
upper bound), ``lost_rewards`` (honest work without its reward), ``broken_grader`` (no valid verdict),
``missed_findings`` (plays of attacks that the official run resolved without a finding, rewarded or not), ``vain``
(attacks marked as fooling the official run, of which no play fooled it or had a finding: bad luck, or the attack no
longer works), ``control_cost_ratio`` (seconds of the controls over seconds of the official run, median of the resolved
plays), ``loop_blocked_s`` (the longest time that grading blocked the event loop). With ``--harness N``, N entries are
also played end to end by ``ng_run``; see `harness.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # run as a script, too

from campaigns.bench.report import Bar, print_report
from campaigns.faults.tampering.corpus import SOURCES, VERSION, Entry, load_corpus, select
from campaigns.faults.tampering.harness import play_through_harness
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxResources, SandboxRole, SandboxSpec
from nemo_gym.contract.session import Artifact, GitDiffHarvest
from nemo_gym.sandbox.base import BoxLabel, SandboxProvider, box_labels
from nemo_gym.sandbox.facade import AsyncSandbox, create_provider
from nemo_gym.sandbox.harvest import harvest_all
from resources_servers.swe_bench.confirm.controls import ControlStore, RowControls
from resources_servers.swe_bench.confirm.making import Maker
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import TESTBED, PreparedImage, SweBenchRow, read_rows, resolve_image
from resources_servers.swe_bench.verdicts import judge

HERE = Path(__file__).parent
ROWS = HERE.parents[2] / "resources_servers" / "swe_bench" / "data" / "example.jsonl"
RUN = "tampering"
EVAL_TIMEOUT_S = 60.0
BARS = dict.fromkeys(("gains", "false_findings", "lost_rewards", "broken_grader", "missed_findings", "boxes_left"), 0)
RESOURCES = SandboxResources(memory_mib=1536, pids=512)


@dataclass
class Played:
    """The result of playing an entry once."""

    id: str
    kind: str
    source: str
    attempt: int
    reward: float | None = None
    official: bool | None = None
    findings: list[str] = field(default_factory=list)
    controls: dict[str, str] = field(default_factory=dict)
    problem: str | None = None
    note: str | None = None
    official_s: float | None = None
    """Seconds of the official run."""
    controls_s: float | None = None
    """Seconds of all controls together; ``None`` if none ran."""
    seconds: float = 0.0
    """Seconds of the whole play, the work included."""


class LoopWatch:
    """The longest time that nothing else could run on the event loop."""

    TICK_S = 0.05

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            try:
                yield
            finally:
                watch.cancel()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - before - self.TICK_S)


def example_rows() -> dict[str, dict[str, Any]]:
    """The rows of the example tasks, by instance."""
    return {row["instance_id"]: row for _, row in read_rows(ROWS)}


async def play(
    provider: SandboxProvider, rows: Mapping[str, dict[str, Any]], entry: Entry, *, run: str = RUN, attempt: int = 1
) -> Played:
    """Play the entry in a work box, harvest and judge the result; ``run`` labels the boxes."""
    started = time.monotonic()
    raw = entry.row_of(rows)
    row = SweBenchRow.from_mapping(raw)
    image = await resolve_image(provider, raw)
    played = Played(entry.id, entry.kind, entry.source, attempt)
    try:
        artifact = await _artifact(provider, image, row, entry, run)
        labels = box_labels(run=run, rollout=entry.id, attempt=attempt, role=SandboxRole.EVAL)
        site = EvalSite(provider, image.name, image.env, labels, RESOURCES, timeout_s=EVAL_TIMEOUT_S)
        controls = await _controls(provider, image, row)
        verdict = (await judge(site, row, artifact, controls)).verdict
        details = verdict.details
        played.reward = verdict.reward
        played.official = bool(verdict.official.get("resolved"))
        played.findings = [finding.kind for finding in verdict.findings]
        played.controls = details.get("controls", {})
        played.official_s = details.get("evaluation", {}).get("seconds")
        shares = details.get("control_seconds")
        played.controls_s = round(sum(shares.values()), 3) if shares else None
        played.note = artifact.error or details.get("run") or details.get("apply_log")
    except NemoGymError as error:
        played.problem = f"{type(error).__name__}: {error}"
    played.seconds = round(time.monotonic() - started, 1)
    return played


_making = asyncio.Lock()


async def _controls(provider: SandboxProvider, image: PreparedImage, row: SweBenchRow) -> RowControls:
    """Return the row's controls. Controls of a derived row are made when the row is first played."""
    store = ControlStore()
    async with _making:
        controls = store.load(row, image.content)
        if controls is None:
            labels = box_labels(run="tampering-controls", rollout=row.instance_id, attempt=1, role=SandboxRole.EVAL)
            site = EvalSite(provider, image.name, image.env, labels, RESOURCES, timeout_s=EVAL_TIMEOUT_S)
            controls = await Maker(site, row, image.content).make()
            store.save(row, controls)
    return controls


async def _artifact(
    provider: SandboxProvider, image: PreparedImage, row: SweBenchRow, entry: Entry, run: str
) -> Artifact:
    if entry.patch is not None:
        return Artifact.of("patch", "git_diff", entry.patch.encode())
    labels = box_labels(run=run, rollout=entry.id, attempt=1, role=SandboxRole.WORK)
    spec = SandboxSpec(
        image=image.name,
        workdir=TESTBED,
        env=dict(image.env),
        resources=RESOURCES,
        ttl_s=300,
        network=NetworkPolicy.NONE,
        metadata=labels,
    )
    async with AsyncSandbox(provider, spec) as box:
        if entry.gold:
            applied = await box.exec(["git", "apply", "-"], cwd=TESTBED, stdin=row.patch.encode())
            assert applied.ok, applied.stderr
        # The script's exit status does not matter: attacks may destroy the shell they run in.
        await box.exec(["/bin/bash", "-c", entry.run], cwd=TESTBED, timeout_s=60, env={"HOME": "/root"})
        items = [GitDiffHarvest(path=TESTBED, base_commit=row.base_commit)]
        return (await harvest_all(provider, box.handle, spec, items, labels))[0]


def upper_bound(found: int, tries: int) -> float:
    """Return the 95 % upper bound of a rate, given ``found`` of ``tries`` (Clopper-Pearson, one-sided)."""
    if tries == 0 or found >= tries:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        below = sum(math.comb(tries, n) * rate**n * (1 - rate) ** (tries - n) for n in range(found + 1))
        low, high = (rate, high) if below > 0.05 else (low, rate)
    return high


def figures(played: Sequence[Played], entries: Sequence[Entry]) -> dict[str, Any]:
    fooling = {entry.id for entry in entries if entry.finding}
    attacks = [case for case in played if case.kind == "attack"]
    honest = [case for case in played if case.kind == "honest"]
    false_findings = sum(bool(case.findings) for case in honest)
    attacked = {case.id for case in attacks}
    gained = {case.id: case.source for case in attacks if case.reward}
    costs = [
        case.controls_s / case.official_s for case in played if case.official and case.controls_s and case.official_s
    ]
    return {
        "attacks": len(attacked),
        "attacks_by_source": dict(Counter(source for _, source in {(case.id, case.source) for case in attacks})),
        "attack_plays": len(attacks),
        "gains": len(gained),
        "open_gains": sum(entry.open and entry.id in gained for entry in entries),
        "gains_by_source": dict(Counter(gained.values())),
        # An attack that the official run did not resolve earns nothing: a play with bad luck needs no finding.
        "missed_findings": sum(bool(case.official) and not case.findings for case in attacks),
        "vain": len(fooling & attacked - {case.id for case in attacks if case.official or case.findings}),
        "official_fooled": sum(bool(case.official) for case in attacks),
        "honest": len(honest),
        "false_findings": false_findings,
        "false_finding_rate": round(false_findings / len(honest), 4) if honest else 0.0,
        "false_finding_rate_95": round(upper_bound(false_findings, len(honest)), 4),
        "lost_rewards": sum(case.reward != 1.0 for case in honest),
        "broken_grader": sum(case.problem is not None for case in played),
        "control_cost_ratio": round(statistics.median(costs), 2) if costs else 0.0,
    }


async def prepare_whole(sandbox: str, instances: Collection[str]) -> None:
    """Prepare the instances. Controls that a busy machine had left something out of, to keep to the usual budget, are
    made again without one: the corpus is judged by all of them."""
    options = [f"rows={ROWS}", f"sandbox={sandbox}"]
    done = await prepare(Options.parse([*options, f"instances={','.join(sorted(instances))}"]))
    if partial := [each.instance_id for each in done if each.left_out]:
        again = [f"instances={','.join(partial)}", "force=true", "controls_budget_s=3600"]
        await prepare(Options.parse([*options, *again]))


async def campaign(
    sandbox: str = "local",
    only: Sequence[str] = (),
    concurrency: int = 2,
    *,
    source: str | None = None,
    through_harness: int = 0,
    verbose: bool = False,
) -> dict[str, Any]:
    """Prepare the instances, play the corpus (or some of it) and return figures, bars and every result."""
    rows = example_rows()
    entries = select(load_corpus(sorted(rows)), only, source)
    await prepare_whole(sandbox, {entry.instance for entry in entries})
    provider = create_provider(sandbox)
    slots = asyncio.Semaphore(concurrency)
    loop_watch = LoopWatch()
    run = f"{RUN}-{uuid.uuid4().hex[:8]}"

    async def one(entry: Entry, attempt: int) -> Played:
        async with slots:
            played = await play(provider, rows, entry, run=run, attempt=attempt)
        if verbose:
            print(json.dumps(asdict(played)), file=sys.stderr, flush=True)
        return played

    try:
        async with loop_watch.watching():
            plays = [(entry, attempt) for entry in entries for attempt in range(1, entry.tries + 1)]
            played = await asyncio.gather(*(one(entry, attempt) for entry, attempt in plays))
        left = await provider.list({BoxLabel.RUN: run})
    finally:
        await provider.aclose()
    result = {**figures(played, entries), "boxes_left": len(left), "loop_blocked_s": round(loop_watch.longest_s, 2)}
    bars = dict(BARS)
    harnessed = []
    if through_harness:
        harnessed = await play_through_harness(sandbox, rows, entries, through_harness, concurrency)
        result["harness_attacks"] = sum(one["kind"] == "attack" for one in harnessed)
        result["harness_gains"] = sum(bool(one["reward"]) for one in harnessed if one["kind"] == "attack")
        result["harness_false_findings"] = sum(bool(one["findings"]) for one in harnessed if one["kind"] == "honest")
        result["harness_invalid"] = sum(one["reward"] is None for one in harnessed)
        bars |= dict.fromkeys(("harness_gains", "harness_false_findings", "harness_invalid"), 0)
    return {
        "corpus_version": VERSION,
        "sandbox": sandbox,
        "figures": result,
        "bars": bars,
        "passed": all(result[name] <= bar for name, bar in bars.items()),
        "entries": [asdict(one) for one in played],
        "harness": harnessed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Play the tampering corpus against real boxes.")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--only", default="", help="ids, their beginnings or patterns, with commas between")
    parser.add_argument("--source", choices=SOURCES, help="only entries of this source")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--harness", type=int, default=0, metavar="N", help="also play N entries through ng_run")
    parser.add_argument("--json", action="store_true", help="print everything; else the figures")
    options = parser.parse_args()
    result = asyncio.run(
        campaign(
            options.sandbox,
            [name for name in options.only.split(",") if name],
            options.concurrency,
            source=options.source,
            through_harness=options.harness,
            verbose=not options.json,
        )
    )
    shown = {"corpus_version": result["corpus_version"], "sandbox": result["sandbox"], **result["figures"]}
    bars = [Bar.at_most(name, result["figures"][name], limit) for name, limit in result["bars"].items()]
    if options.json:
        shown |= {"entries": result["entries"], "harness": result["harness"]}
    return print_report(shown, bars, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
