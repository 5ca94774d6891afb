#!/usr/bin/env python3
"""Grade real tasks again and again: on every provider, the gold patch must resolve each task, and no patch none.

    python -m campaigns.bench.real_tasks --rows ROWS.jsonl [--repos DIR --environments FILE] [--sandbox local docker]
        [--repeats 3] [--workers 2] [--instances ID …] [--through-ng-run N] [--keep FILE] [--json]

With ``--repos`` the images are prepared first; finished images are reused. Every verdict is made by the swe_bench
environment's own ``grade``, in fresh boxes. ``--through-ng-run N`` also sends the first N rows through
``ng_run agent=oracle``, which includes box, harvest and pipeline. ``--keep`` appends each verdict to a file and does
not repeat verdicts that the file holds, so that a long campaign can be stopped. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, too

from campaigns.bench.report import Bar, Samples, argument_parser, print_report
from nemo_gym.config.compose import compose
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.session import Artifact, RolloutIdentity
from nemo_gym.contract.verdict import Verdict
from nemo_gym.server_utils import ServerClient
from resources_servers.swe_bench.app import SweBenchConfig, SweBenchServer
from resources_servers.swe_bench.row import read_rows

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gold", "nothing")


@dataclass(frozen=True)
class Case:
    """One verdict to make."""

    sandbox: str
    instance_id: str
    kind: str
    repeat: int

    @property
    def key(self) -> str:
        return f"{self.sandbox}/{self.instance_id}/{self.kind}/{self.repeat}"


@dataclass(frozen=True)
class Outcome:
    """The result of a case."""

    case: Case
    valid: bool
    reward: float | None
    resolved: bool | None
    findings: list[str]
    tests: str
    """Digest of every expected test's status."""
    seconds: float
    error: str = ""
    failed_tests: list[str] = field(default_factory=list)

    @property
    def as_expected(self) -> bool:
        is_gold = self.case.kind == "gold"
        return self.valid and self.resolved is is_gold and self.reward == float(is_gold) and not self.findings

    @property
    def verdict(self) -> tuple[object, ...]:
        """Everything that must be the same in each repetition."""
        return (self.valid, self.reward, self.resolved, tuple(self.findings), self.tests)


def _outcome(case: Case, verdict: Verdict, seconds: float) -> Outcome:
    status = verdict.official.get("tests_status", {})
    failed = sorted(test for group in status.values() for test in group.get("failure", []))
    return Outcome(
        case=case,
        valid=verdict.valid,
        reward=verdict.reward,
        resolved=verdict.official.get("resolved"),
        findings=sorted(finding.kind for finding in verdict.findings),
        tests=hashlib.sha256(json.dumps(status, sort_keys=True).encode()).hexdigest()[:16],
        seconds=seconds,
        error=verdict.failure_reason or "",
        failed_tests=failed[:5] if case.kind == "gold" else [],
    )


async def grade_once(server: SweBenchServer, case: Case, row: dict[str, Any]) -> Outcome:
    patch = row["patch"] if case.kind == "gold" else ""
    name = f"real-{hashlib.sha256(case.key.encode()).hexdigest()[:16]}"
    rollout = RolloutIdentity(rollout_id=name, task_id=case.instance_id, group_id=case.instance_id, run_id="real")
    started = time.monotonic()
    try:
        verdict = await server.grade(row, {}, [Artifact.of("patch", "git_diff", patch.encode())], rollout)
    except NemoGymError as error:
        seconds = round(time.monotonic() - started, 2)
        return Outcome(case, False, None, None, [], "", seconds, error=f"{type(error).__name__}: {error}")
    return _outcome(case, verdict, round(time.monotonic() - started, 2))


async def campaign(
    sandbox: str,
    settings: Sequence[str],
    rows: Sequence[dict[str, Any]],
    repeats: int,
    workers: int,
    kept: dict[str, Outcome],
    keep: Path | None,
) -> list[Outcome]:
    """Grade every row, with the gold patch and with none, ``repeats`` times; reuse the outcomes in ``kept``."""
    client = ServerClient(global_config_dict=compose([f"sandbox={sandbox}", *settings]).values)
    config = SweBenchConfig(
        host="127.0.0.1", port=0, entrypoint="app.py", name="swe_bench", sandbox_provider="sandbox"
    )
    server = SweBenchServer(config=config, server_client=client)
    slots = asyncio.Semaphore(workers)

    async def grade(case: Case, row: dict[str, Any]) -> Outcome:
        if case.key in kept:
            return kept[case.key]
        async with slots:
            outcome = await grade_once(server, case, row)
        mark = "ok  " if outcome.as_expected else "MISS"
        detail = outcome.error or "; ".join([*outcome.findings, *outcome.failed_tests])
        print(f"{mark} {case.key} {outcome.seconds:.1f} s {detail}", file=sys.stderr, flush=True)
        if keep is not None:
            with keep.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
        return outcome

    cases = [
        (Case(sandbox, row["instance_id"], kind, repeat), row)
        for repeat in range(repeats)
        for row in rows
        for kind in KINDS
    ]
    try:
        return list(await asyncio.gather(*(grade(case, row) for case, row in cases)))
    finally:
        await server.shutdown()


def _read_outcomes(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.exists():
        return {}
    outcomes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        outcome = Outcome(**{**data, "case": Case(**data["case"])})
        outcomes[outcome.case.key] = outcome
    return outcomes


def _command(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(Path(sys.executable).parent / name), *args], cwd=ROOT, capture_output=True, text=True)


def prepare(options: argparse.Namespace, sandbox: str, settings: Sequence[str]) -> dict[str, Any]:
    args = [
        *settings,
        f"rows={options.rows}",
        f"sandbox={sandbox}",
        f"repos={options.repos}",
        f"workers={options.workers}",
    ]
    if options.environments:
        args.append(f"environments={options.environments}")
    if options.instances:
        args.append(f"instances={','.join(options.instances)}")
    started = time.monotonic()
    done = _command("ng_prepare", "swe_bench", *args, "--json")
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    summary = json.loads(done.stdout)
    failed = {row["instance_id"]: row["error"] for row in summary["rows"] if row["status"] == "failed"}
    return {
        "built": summary["built"],
        "cached": summary["cached"],
        "failed": failed,
        "seconds": round(time.monotonic() - started, 1),
    }


def through_ng_run(sandbox: str, settings: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the rewards of whole runs with the oracle, which include box, harvest and pipeline."""
    rewards: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="real-tasks-") as directory:
        path = Path(directory) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for kind in KINDS:
            output = Path(directory) / f"{kind}.jsonl"
            args = [f"oracle={kind}", f"input={path}", f"output={output}", "concurrency=2"]
            done = _command("ng_run", "agent=oracle", "environment=swe_bench", f"sandbox={sandbox}", *settings, *args)
            if done.returncode != 0 or not output.exists():
                raise SystemExit(
                    f"ng_run agent=oracle oracle={kind} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
                )
            results = [json.loads(line) for line in output.read_text().splitlines()]
            rewards[kind] = [result.get("reward") for result in results]
    return rewards


def report(outcomes: Sequence[Outcome], sandboxes: Sequence[str]) -> tuple[dict[str, Any], list[Bar]]:
    grouped: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        grouped[outcome.case.instance_id, outcome.case.kind].append(outcome)
    identical = sum(len({outcome.verdict for outcome in group}) == 1 for group in grouped.values())
    figures: dict[str, Any] = {}
    for sandbox in sandboxes:
        here = [outcome for outcome in outcomes if outcome.case.sandbox == sandbox]
        for kind in KINDS:
            seconds = [outcome.seconds for outcome in here if outcome.case.kind == kind]
            figures[f"{sandbox}_{kind}_verify_s"] = Samples(seconds).summary()
    figures["instances"] = {
        instance: {
            f"{sandbox}_{kind}": {
                "rewards": [o.reward for o in grouped[instance, kind] if o.case.sandbox == sandbox],
                "seconds": [o.seconds for o in grouped[instance, kind] if o.case.sandbox == sandbox],
            }
            for sandbox in sandboxes
            for kind in KINDS
        }
        for instance in sorted({outcome.case.instance_id for outcome in outcomes})
    }
    misses = [asdict(outcome) for outcome in outcomes if not outcome.as_expected]
    figures["misses"] = misses
    gold = [outcome for outcome in outcomes if outcome.case.kind == "gold"]
    nothing = [outcome for outcome in outcomes if outcome.case.kind == "nothing"]
    bars = [
        Bar.at_least("gold verdicts that resolve", sum(o.as_expected for o in gold), len(gold)),
        Bar.at_least("nothing verdicts that do not", sum(o.as_expected for o in nothing), len(nothing)),
        Bar.at_least("instance × kind with identical verdicts everywhere", identical, len(grouped)),
    ]
    return figures, bars


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--repos", help="prepare the images first, from these repositories")
    parser.add_argument("--environments")
    parser.add_argument("--sandbox", nargs="+", default=["local", "docker"])
    parser.add_argument("--setting", nargs="+", default=[], metavar="PROVIDER.KEY=VALUE", help="of the sandboxes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="verdicts, and images, made at the same time")
    parser.add_argument("--instances", nargs="+", default=[])
    parser.add_argument("--through-ng-run", type=int, default=0, metavar="N")
    parser.add_argument("--keep", type=Path, help="JSONL file of verdicts, appended to and continued from")
    options = parser.parse_args(arguments)
    rows = [
        row for _, row in read_rows(options.rows) if not options.instances or row["instance_id"] in options.instances
    ]
    kept = _read_outcomes(options.keep)
    outcomes: list[Outcome] = []
    figures: dict[str, Any] = {}
    bars: list[Bar] = []
    for sandbox in options.sandbox:
        settings = [f"++sandbox.{word}" for word in options.setting if word.startswith(f"{sandbox}.")]
        if options.repos:
            figures[f"{sandbox}_prepare"] = prepare(options, sandbox, settings)
        outcomes += asyncio.run(
            campaign(sandbox, settings, rows, options.repeats, options.workers, kept, options.keep)
        )
        if options.through_ng_run:
            rewards = through_ng_run(sandbox, settings, rows[: options.through_ng_run])
            figures[f"{sandbox}_ng_run_rewards"] = rewards
            count = min(options.through_ng_run, len(rows))
            for kind, expected in (("gold", 1.0), ("nothing", 0.0)):
                right = sum(reward == expected for reward in rewards[kind])
                bars.append(Bar.at_least(f"{sandbox}: ng_run oracle={kind} rewards of {expected:g}", right, count))
    graded, graded_bars = report(outcomes, options.sandbox)
    return print_report({**figures, **graded}, [*graded_bars, *bars], as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
