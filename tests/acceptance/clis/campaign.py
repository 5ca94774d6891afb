"""Real agent CLIs through the gateway: is every sampled token in the trajectories, once, and no other?

python -m tests.acceptance.clis.campaign [--json] [--clis NAME…] [--families NAME…] [--faults | --calm | --seeds N…]

Every CLI runs headless over each template family: calm, with a sub-agent and compaction where it has them; and among
faults: engines that fail, hang up or give up, answers that break off on their way, answers that come too late, and a
kill in the middle after which the conversation is resumed. With ``--seeds`` faults come by chance instead, the same
ones for the same seed.
"""

from __future__ import annotations

import os

# Before numpy is loaded: two threads are slower than one for matrices as small as the tiny policy's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # run as a script, too

from campaigns.bench.report import Bar, argument_parser, print_report
from nemo_gym_testing.gateway.tiny.truth import TOLERANCE
from tests.acceptance.clis.drivers import CLIS
from tests.acceptance.clis.plans import CALM, FAULTS, Plan, by_chance
from tests.acceptance.clis.trial import MIN_TURNS, Trial, trial

FAMILIES = ("chatml_think", "bar_tokens", "llama_headers")


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--clis", nargs="+", choices=[*CLIS], default=[*CLIS], metavar="NAME")
    parser.add_argument("--families", nargs="+", default=[*FAMILIES], metavar="NAME")
    parser.add_argument("--faults", action="store_true", help="only the runs among faults")
    parser.add_argument("--calm", action="store_true", help="only the calm runs")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[], metavar="N", help="only runs with faults by chance"
    )
    parser.add_argument("--keep", type=Path, help="a new directory for everything that the runs write")
    return parser.parse_args()


def plans(given: argparse.Namespace, what: str) -> list[Plan]:
    if given.seeds:
        return [by_chance(seed, what) for seed in given.seeds]
    return [plan for plan, left_out in ((CALM, given.faults), (FAULTS, given.calm)) if not left_out]


async def measure(given: argparse.Namespace, directory: Path) -> list[Trial]:
    found = []
    for cli in given.clis:
        for family in given.families:
            for plan in plans(given, f"{cli} {family}"):
                place = directory / f"{cli}-{family}-{plan.name.replace(' ', '-')}"
                try:
                    found.append(await trial(place, cli, family, plan))
                except TimeoutError as error:
                    found.append(Trial(cli, family, plan.name, detail=str(error)))
                print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _line(one: Trial) -> str:
    verdict = "ok  " if one.passed else "MISS"
    shown = {key: value for key, value in asdict(one).items() if value not in ("", [], {}) and key != "cli"}
    return f"{verdict} {one.cli:15} {shown}"


def bars(found: Sequence[Trial], given: argparse.Namespace) -> list[Bar]:
    made = []
    for name in given.clis:
        own = [one for one in found if one.cli == name]
        made += [
            Bar.at_least(f"{name}: runs completed", sum(one.completed for one in own), len(own), "runs"),
            Bar.at_least(f"{name}: turns of the shortest run", min(one.turns for one in own), MIN_TURNS, "turns"),
            Bar.at_most(f"{name}: tokens lost, doubled or invented", sum(len(one.violations) for one in own), 0),
            Bar.at_most(f"{name}: largest logprob difference", max(one.max_logprob_error for one in own), TOLERANCE),
            Bar.at_least(f"{name}: sampled tokens checked", sum(one.sampled_tokens for one in own), 1, "tokens"),
        ]
        calm, rough = [one for one in own if one.plan == CALM.name], [one for one in own if one.plan == FAULTS.name]
        if calm and CLIS[name].delegates:
            made.append(Bar.at_least(f"{name}: runs with a sub-agent", _with(calm, "side"), len(calm), "runs"))
        if calm and CLIS[name].compact_above_tokens is not None:
            made.append(Bar.at_least(f"{name}: runs with compaction", _with(calm, "summary"), len(calm), "runs"))
        if rough:
            kinds = {kind for one in rough for kind in one.injected}
            made.append(Bar.at_least(f"{name}: kinds of faults that happened", len(kinds), 5, "kinds"))
    return made


def _with(runs: Sequence[Trial], what: str) -> int:
    return sum(one.asked.get(what, 0) > 0 for one in runs)


def main() -> int:
    given = arguments()
    if given.keep is not None:
        found = asyncio.run(measure(given, given.keep))
    else:
        with tempfile.TemporaryDirectory(prefix="clis-", ignore_cleanup_errors=True) as directory:
            found = asyncio.run(measure(given, Path(directory)))
    figures: dict[str, Any] = {
        f"{one.cli}, {one.family}, {one.plan}": {
            key: value for key, value in asdict(one).items() if key not in ("cli", "family", "plan")
        }
        for one in found
    }
    return print_report(figures, bars(found, given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
