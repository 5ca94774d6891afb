"""The crash campaign in small: every bar of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.bench.report import Bar
from campaigns.faults.broker.stage import database
from campaigns.faults.broker_crash import every_boundary, random_points


def missed(bars: list[Bar]) -> list[Bar]:
    assert len(bars) >= 12
    return [bar for bar in bars if not bar.ok]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_killed_broker_loses_leaks_and_repeats_nothing_whatever_its_boxes_do(kind: str, tmp_path: Path) -> None:
    with database(kind) as settings:
        figures, bars = await random_points(tmp_path, provider="local", settings=settings, seed=3, boxes=8, kills=2)
    assert missed(bars) == [], json.dumps(figures, indent=1)
    assert figures["requests"] >= figures["steps"]
    assert figures["runs_counted"] > 0


async def test_broker_killed_at_a_boundary_finishes_what_it_began(tmp_path: Path) -> None:
    figures, bars = await every_boundary(tmp_path, provider="local", settings={}, seed=5, at=None, wanted=2)
    assert missed(bars) == [], json.dumps(figures, indent=1)
    assert figures["kinds"] >= 30
