"""Real agent CLIs through the gateway; `campaign.py` runs all of them over every template family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.clis.campaign import FAMILIES
from tests.acceptance.clis.drivers import CLIS
from tests.acceptance.clis.plans import FAULTS
from tests.acceptance.clis.trial import MIN_TURNS, trial


@pytest.mark.timeout(600)  # the first run installs the CLI
@pytest.mark.parametrize(("cli", "family"), [("claude-code", "chatml_think"), ("codex", "bar_tokens")])
async def test_cli_run_with_sub_agent_and_compaction_has_every_sampled_token_once(
    cli: str, family: str, tmp_path: Path
) -> None:
    found = await trial(tmp_path / "run", cli, family)
    assert found.completed, found
    assert not found.violations
    assert found.turns >= MIN_TURNS
    assert found.asked["side"] > 0 and found.asked["summary"] > 0


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("number", "cli"), [*enumerate(sorted(CLIS))], ids=sorted(CLIS))
async def test_cli_run_among_faults_has_every_sampled_token_once(number: int, cli: str, tmp_path: Path) -> None:
    found = await trial(tmp_path / "run", cli, FAMILIES[number % len(FAMILIES)], FAULTS)
    assert found.completed, found
    assert not found.violations
    assert found.turns >= MIN_TURNS
    assert {"engine Status", "engine CutOff", "engine Abort", "wire Cut"} <= {*found.injected}
