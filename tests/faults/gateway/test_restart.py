"""The restart campaign in small: every bar of it, except how often a kill hit the fraction of a millisecond between a
commit and its delivery."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from campaigns.bench.report import Bar
from campaigns.faults.gateway.bodies import ROLLOUT
from campaigns.faults.gateway.processes import GatewayProcess, policy_in
from campaigns.faults.gateway_restart import full_disk, kills
from nemo_gym.gateway.journal import RecordKind, SessionRecord, encode
from nemo_gym.gateway.journal_log import framed
from nemo_gym.gateway.live_session import encode_committed
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerUsage


def missed(bars: list[Bar]) -> list[Bar]:
    assert len(bars) >= 9
    return [bar for bar in bars if not bar.ok and "given again" not in bar.name]


@pytest.mark.parametrize("durability", ["process", "power_loss"])
async def test_killed_gateway_loses_and_doubles_no_token(tmp_path: Path, durability: str) -> None:
    figures, bars = await kills(tmp_path, seed=11, sessions=12, turns=5, wanted=5, durability=durability)
    assert missed(bars) == [], json.dumps(figures, indent=1)
    assert figures["kills"] >= 3 and figures["answers_received"] == 60
    assert figures["requests_hit"] > 0 and figures["torn_tails"] > 0


async def test_full_disk_is_said_and_costs_no_committed_turn(tmp_path: Path) -> None:
    figures, bars = await full_disk(tmp_path, seed=11, sessions=6, turns=60)
    assert missed(bars) == [], json.dumps(figures, indent=1)
    assert figures["answers_received"] == 360


def test_journal_that_cannot_be_read_is_named_to_whoever_starts_the_gateway(tmp_path: Path) -> None:
    policy = policy_in(tmp_path)
    gateway = GatewayProcess(tmp_path, [], policy)
    try:
        for damage, said in ((b"x" * 100, "is damaged at byte"), (b"", "cannot be read")):
            gateway.journal.mkdir(exist_ok=True)
            (gateway.journal / "00000001.log").write_bytes(damage + foreign_turn())
            with pytest.raises(RuntimeError, match=rf"did not start \(b.error .*{said}"):
                gateway.start()
    finally:
        gateway.close()


def foreign_turn() -> bytes:
    """A whole journal of one session whose turn has nothing in it that this version knows."""
    record = SessionRecord("s1", ROLLOUT, "i", "c", 0.0, 4e9, {}, {"now": "2026-01-01T00:00:00+00:00"})
    answer = Answer("a", 0.0, "m", {"role": "assistant", "content": "x"}, AnswerEnd.STOP, AnswerUsage())
    turn = b"".join(encode_committed(answer, {"turn_id": 0, "tokens_of_another_version": []}))
    opened = encode(RecordKind.OPENED, "s1", record=asdict(record))
    committed = encode(RecordKind.TURN, "s1", turn, index=0, fingerprint="f", key=None)
    return b"".join([*framed((opened,)), *framed((committed,))])
