"""The fuzz campaign in small."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from campaigns.faults.gateway.answers import WrongAnswerError, check
from campaigns.faults.gateway_fuzz import BACKENDS, INFERENCE, PARTS, campaign, fuzzed


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_a_caller_sends_is_answered_with_5xx_or_without_form(tmp_path: Path, backend: str) -> None:
    figures, bars = campaign(tmp_path, list(PARTS), examples=20, seed=7, backend=backend)
    assert [bar for bar in bars if not bar.ok] == [], json.dumps(figures, indent=1)
    assert all(figures[part]["requests"] > 50 for part in PARTS)
    assert figures["mutated"]["answers"]["4xx"] > 50 and figures["mutated"]["answers"]["2xx"] > 10


def test_bodies_that_are_varied_are_right_to_begin_with(tmp_path: Path) -> None:
    with fuzzed(tmp_path) as target:
        for path, body in INFERENCE.items():
            target.try_body(path, orjson.dumps(body))
        assert target.statuses == {"2xx": len(INFERENCE)}


@pytest.mark.parametrize(
    ("path", "status", "kind", "body"),
    [
        ("/v1/messages", 502, "application/json", b'{"type":"error","error":{"type":"api_error","message":"m"}}'),
        ("/v1/messages", 400, "application/json", b'{"error":{"type":"t","message":"m","param":null,"code":"c"}}'),
        ("/v1/responses", 400, "text/plain", b"Bad Request"),
        ("/v1/chat/completions", 400, "application/json", b'{"detail":"x"}'),
        ("/sessions", 422, "application/json", b'{"detail":"x"}'),
    ],
)
def test_campaign_sees_an_answer_that_should_not_be(path: str, status: int, kind: str, body: bytes) -> None:
    with pytest.raises(WrongAnswerError):
        check(path, status, {"content-type": kind}, body)
