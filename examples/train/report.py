"""Figures of a run: intervals, the time of all its processes, and the curve."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.count}"


def interval(rewards: Sequence[float]) -> Interval:
    """Return the mean of rewards that are 0 or 1, with Wilson's interval."""
    count, mean, z = len(rewards), statistics.fmean(rewards), 1.96
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return Interval(mean, middle - half, middle + half, count)


class Usage:
    """Wall-clock and CPU seconds since `start`, of this process and all its descendants."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._ended: dict[int, float] = {}
        self.start()

    def start(self) -> None:
        self._started, self._before = time.monotonic(), self._cpu()

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def cpu_s(self) -> float:
        return self._cpu() - self._before

    def _cpu(self) -> float:
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._ended[process.pid] = times.user + times.system
        return sum(self._ended.values())


PANELS = (
    ("held_out", "held-out reward"),
    ("reward", "reward of training rollouts"),
    ("effective", "effective groups"),
    ("staleness_mean", "staleness (versions)"),
    ("tokens_per_s", "sampled tokens/s"),
)


def plot(outcomes: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot the curves of one or several runs, one panel for each figure; runs of one arm share a colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    arms = list(dict.fromkeys(arm_of(outcome) for outcome in outcomes))
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for panel, (key, title) in zip(panels, PANELS, strict=True):
        for outcome in outcomes:
            arm = arm_of(outcome)
            first = outcome is next(each for each in outcomes if arm_of(each) == arm)
            points = [(step["step"], step[key]) for step in outcome["steps"] if step[key] is not None]
            if key == "held_out":
                points.insert(0, (0, outcome["before"]["mean"]))
            panel.plot(
                *zip(*points, strict=True),
                color=f"C{arms.index(arm)}",
                label=arm if first else None,
                marker="." if key == "held_out" else None,
                linewidth=1.2,
            )
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1 if key in ("held_out", "reward", "effective") else None)
        panel.grid(alpha=0.3)
    panels[0].axhline(outcomes[0]["target"], color="grey", linestyle=":")
    panels[0].legend(fontsize=7, loc="lower right")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def arm_of(outcome: Mapping[str, Any]) -> str:
    settings = outcome["settings"]
    return f"{settings['tokens']} tokens, {settings['batches']} batches"


def name_of(outcome: Mapping[str, Any]) -> str:
    return f"seed {outcome['settings']['seed']}, {arm_of(outcome)}"


def compared(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with one line for each run."""
    head = (
        *("run", "held-out before [95 %]", "after [95 %]", "mean on the way"),
        *("target at step", "s", "CPU s", "rollouts", "s in all", "CPU s in all"),
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for outcome in outcomes:
        reached = outcome["reached"] or {}
        at_target = [str(reached.get(key, "–")) for key in ("step", "wall_s", "cpu_s", "rollouts")]
        before, after = Interval(**outcome["before"]), Interval(**outcome["after"])
        held_out = [step["held_out"] for step in outcome["steps"] if step["held_out"] is not None]
        on_the_way = f"{statistics.fmean(held_out):.3f}" if held_out else "–"
        whole = [f"{outcome[key]:.0f}" for key in ("wall_s", "cpu_s")]
        cells = [name_of(outcome), str(before), str(after), on_the_way, *at_target, *whole]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.train.report", description="Runs side by side.")
    parser.add_argument("folder", type=Path, help="the --output of the runs")
    parser.add_argument("--plot", type=Path, help="a PNG with the curves of all of them")
    given = parser.parse_args()
    files = sorted(given.folder.glob("*/outcome.json"))
    if not files:
        sys.exit(f"error: there is no */outcome.json in {given.folder}; run examples.train.arithmetic first")
    outcomes = [json.loads(file.read_text()) for file in files]
    print(compared(outcomes))
    if given.plot:
        plot(outcomes, given.plot)


if __name__ == "__main__":
    main()
