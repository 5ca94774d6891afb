"""What every benchmark prints: figures, and bars that are met or not."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One acceptance bar. ``bar`` is the limit as text, such as ``<= 3``."""

    name: str
    value: float
    unit: str
    bar: str
    ok: bool

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, unit: str = "") -> Bar:
        return cls(name, round(value, 4), unit, f"<= {limit:g}", value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, unit: str = "") -> Bar:
        return cls(name, round(value, 4), unit, f">= {limit:g}", value >= limit)


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity, in one unit."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self, digits: int = 2) -> dict[str, float | int]:
        ordered = sorted(self.values)
        return {
            "median": round(self.median, digits),
            "min": round(ordered[0], digits),
            "p90": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))], digits),
            "n": len(ordered),
        }


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    return parser


def machine() -> dict[str, Any]:
    """What a figure depends on: cores and load at the end of the run."""
    return {"cpus": len(os.sched_getaffinity(0)), "load": [round(x, 2) for x in os.getloadavg()]}


def print_report(figures: Mapping[str, Any], bars: Sequence[Bar], *, as_json: bool) -> int:
    """Print figures and bars, as one JSON object on the last line; the exit status says whether every bar is met."""
    if not as_json:
        for name, value in figures.items():
            print(f"{name:40} {value}")
        for bar in bars:
            print(f"{'ok  ' if bar.ok else 'MISS'} {bar.name:50} {bar.value:g} {bar.unit} ({bar.bar})")
    report = {"figures": {**figures, "machine": machine()}, "bars": [asdict(bar) for bar in bars]}
    print(json.dumps(report))
    sys.stdout.flush()
    return 0 if all(bar.ok for bar in bars) else 1
