"""The restart campaign in small: every bar of it, except how often a kill hit the fraction of a millisecond between a
commit and its delivery."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.report import Bar
from tests.faults.gateway_restart import full_disk, kills


def missed(bars: list[Bar]) -> list[Bar]:
    assert len(bars) >= 9
    return [bar for bar in bars if not bar.ok and "given again" not in bar.name]


@pytest.mark.parametrize("durability", ["process", "power_loss"])
async def test_killed_gateway_loses_and_doubles_no_token(tmp_path: Path, durability: str) -> None:
    figures, bars = await kills(tmp_path, seed=11, sessions=12, turns=5, wanted=5, durability=durability)
    assert missed(bars) == [], figures
    assert figures["kills"] >= 3 and figures["answers_received"] == 60
    assert figures["requests_hit"] > 0 and figures["torn_tails"] > 0


async def test_full_disk_is_said_and_costs_no_committed_turn(tmp_path: Path) -> None:
    figures, bars = await full_disk(tmp_path, seed=11, sessions=6, turns=60)
    assert missed(bars) == [], figures
    assert figures["answers_received"] == 360
