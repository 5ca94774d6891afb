"""The disconnect campaign in small: some bytes of each stream instead of every one."""

from __future__ import annotations

import json
from pathlib import Path

from campaigns.faults.gateway_disconnect import every_byte, while_sampling, while_streaming
from nemo_gym.gateway.dialects import Dialect


async def test_cut_off_answer_is_given_again_and_sampled_once(tmp_path: Path) -> None:
    figures, bars = await every_byte(tmp_path / "a", [*Dialect], stride=151)
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures, indent=1)
    assert sum(figures[f"{dialect}/close"]["cuts"] for dialect in Dialect) > 40


async def test_caller_that_leaves_before_its_answer_changes_nothing(tmp_path: Path) -> None:
    figures, bars = await while_sampling(tmp_path / "b", [*Dialect], rounds=18)
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures, indent=1)
    assert figures["clean"] == 18 and figures["of_them_after_headers"] > 3


async def test_stream_cut_between_pings_keeps_one_turn(tmp_path: Path) -> None:
    figures, bars = await while_streaming(tmp_path / "c", [*Dialect], stride=301)
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures)
    assert figures["one_turn"] == figures["cuts"] > 10
    assert figures["left_after_the_answer_had_begun"] > 3
