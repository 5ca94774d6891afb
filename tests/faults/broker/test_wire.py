"""The campaign of broken connections in small: every bar of it."""

from __future__ import annotations

import json
from pathlib import Path

from campaigns.faults.broker_wire import every_route, shaken_work


async def test_effect_is_there_once_on_every_route_when_connections_break_and_requests_repeat(tmp_path: Path) -> None:
    figures, bars = await every_route(tmp_path, provider="local", settings={}, seed=3, cuts=1)
    assert figures["wrong_effects"] == []
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures, indent=1)
    assert figures["routes"] >= 26


async def test_owners_over_a_network_that_breaks_lose_nothing(tmp_path: Path) -> None:
    figures, bars = await shaken_work(tmp_path, provider="local", settings={}, seed=3, boxes=6)
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures, indent=1)
