"""Plays the tampering corpus against real boxes and prints what it earned.

``python tests/faults/tampering/campaign.py [--sandbox local] [--only ID,…] [--concurrency 2] [--json]``

Figures: ``gains`` (attacks that were rewarded), ``false_findings`` (honest work with a finding), ``lost_rewards``
(honest work without its reward), ``broken_grader`` (no valid verdict), ``missed_findings`` (attacks that fooled the
official run and were not found).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # run as a script, too

from nemo_gym.errors import NemoGymError
from nemo_gym.harvest import harvest_all
from nemo_gym.sandbox.base import NetworkPolicy, SandboxProvider, SandboxResources, SandboxRole, SandboxSpec
from nemo_gym.sandbox.facade import AsyncSandbox
from nemo_gym.sandbox.labels import box_labels
from nemo_gym.sandbox.registry import create_provider
from nemo_gym.session import Artifact, GitDiffHarvest
from resources_servers.swe_bench.confirm.controls import ControlStore
from resources_servers.swe_bench.eval_box import EvalSite
from resources_servers.swe_bench.images import TESTBED, PreparedImage, resolve_image
from resources_servers.swe_bench.prepare import Options, prepare
from resources_servers.swe_bench.row import SweBenchRow, read_rows
from resources_servers.swe_bench.verdicts import judge
from tests.bench.report import Bar, print_report

HERE = Path(__file__).parent
ROWS = HERE.parents[2] / "resources_servers" / "swe_bench" / "data" / "example.jsonl"
EVAL_TIMEOUT_S = 60.0
BARS = {"gains": 0, "false_findings": 0, "lost_rewards": 0, "broken_grader": 0, "missed_findings": 0}
RESOURCES = SandboxResources(memory_mib=1536, pids=512)


@dataclass(frozen=True)
class Entry:
    """One thing an agent does."""

    id: str
    kind: str
    instance: str
    run: str = ""
    gold: bool = False
    patch: str | None = None
    finding: bool = False


@dataclass
class Played:
    """What came of it."""

    id: str
    kind: str
    reward: float | None
    official: bool | None
    findings: list[str] = field(default_factory=list)
    controls: dict[str, str] = field(default_factory=dict)
    problem: str | None = None
    note: str | None = None
    seconds: float = 0.0


def load_corpus(path: Path = HERE / "corpus.yaml") -> tuple[int, list[Entry]]:
    """The corpus' version and entries."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return int(data["version"]), [Entry(**entry) for entry in data["entries"]]


async def play(provider: SandboxProvider, rows: dict[str, dict[str, Any]], entry: Entry) -> Played:
    """Let the entry happen in a working box, harvest and judge it."""
    started = time.monotonic()
    raw = rows[entry.instance]
    row = SweBenchRow.from_mapping(raw)
    image = await resolve_image(provider, raw)
    played = Played(entry.id, entry.kind, None, None)
    try:
        artifact = await _artifact(provider, image, row, entry)
        labels = box_labels(run="tampering", rollout=entry.id, attempt=1, role=SandboxRole.EVAL)
        site = EvalSite(provider, image.name, image.env, labels, RESOURCES, timeout_s=EVAL_TIMEOUT_S)
        verdict = (await judge(site, row, artifact, ControlStore().require(row, image.content))).verdict
        played.reward = verdict.reward
        played.official = bool(verdict.official.get("resolved"))
        played.findings = [finding.kind for finding in verdict.findings]
        played.controls = verdict.details.get("controls", {})
        played.note = artifact.error or verdict.details.get("run")
    except NemoGymError as error:
        played.problem = f"{type(error).__name__}: {error}"
    played.seconds = round(time.monotonic() - started, 1)
    return played


async def _artifact(provider: SandboxProvider, image: PreparedImage, row: SweBenchRow, entry: Entry) -> Artifact:
    if entry.patch is not None:
        return Artifact.of("patch", "git_diff", entry.patch.encode())
    labels = box_labels(run="tampering", rollout=entry.id, attempt=1, role=SandboxRole.WORK)
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
        # What the script returns is its own affair: attacks may destroy the shell they run in.
        await box.exec(["/bin/bash", "-c", entry.run], cwd=TESTBED, timeout_s=60, env={"HOME": "/root"})
        items = [GitDiffHarvest(path=TESTBED, base_commit=row.base_commit)]
        return (await harvest_all(provider, box.handle, spec, items, labels))[0]


def figures(played: Sequence[Played], entries: Sequence[Entry]) -> dict[str, int]:
    fooling = {entry.id for entry in entries if entry.finding}
    attacks = [one for one in played if one.kind == "attack"]
    honest = [one for one in played if one.kind == "legitimate"]
    return {
        "attacks": len(attacks),
        "legitimate": len(honest),
        "gains": sum(bool(one.reward) for one in attacks),
        "false_findings": sum(bool(one.findings) for one in honest),
        "lost_rewards": sum(one.reward != 1.0 for one in honest),
        "broken_grader": sum(one.problem is not None for one in played),
        "missed_findings": sum(not one.findings for one in attacks if one.official or one.id in fooling),
        "official_fooled": sum(bool(one.official) for one in attacks),
    }


async def campaign(
    sandbox: str = "local", only: Sequence[str] = (), concurrency: int = 2, verbose: bool = False
) -> dict[str, Any]:
    """Prepare the instances, play the corpus (or some of it) and return figures, bars and every result."""
    version, entries = load_corpus()
    entries = [entry for entry in entries if not only or entry.id in only]
    rows = {row["instance_id"]: row for _, row in read_rows(ROWS)}
    wanted = ",".join(sorted({entry.instance for entry in entries}))
    await prepare(Options.parse([f"rows={ROWS}", f"sandbox={sandbox}", f"instances={wanted}"]))
    provider = create_provider(sandbox)
    slots = asyncio.Semaphore(concurrency)

    async def one(entry: Entry) -> Played:
        async with slots:
            played = await play(provider, rows, entry)
        if verbose:
            print(json.dumps(asdict(played)), file=sys.stderr, flush=True)
        return played

    try:
        played = await asyncio.gather(*(one(entry) for entry in entries))
        left = await provider.list({"nemo_gym.run": "tampering"})
    finally:
        await provider.aclose()
    result = figures(played, entries)
    return {
        "corpus_version": version,
        "sandbox": sandbox,
        "figures": {**result, "boxes_left": len(left)},
        "bars": {**BARS, "boxes_left": 0},
        "passed": all(result[name] <= bar for name, bar in BARS.items()) and not left,
        "entries": [asdict(one) for one in played],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Play the tampering corpus against real boxes.")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--only", default="", help="ids, with commas between")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print everything; else the figures")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    result = asyncio.run(campaign(options.sandbox, only, options.concurrency, verbose=not options.json))
    shown = {"corpus_version": result["corpus_version"], "sandbox": result["sandbox"], **result["figures"]}
    bars = [Bar.at_most(name, result["figures"][name], limit) for name, limit in result["bars"].items()]
    if options.json:
        shown["entries"] = result["entries"]
    return print_report(shown, bars, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
