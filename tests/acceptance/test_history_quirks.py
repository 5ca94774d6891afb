"""What harnesses do to the assistant's turns costs no trajectory: twenty turns stay one chain, and no token more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.gateway.tokens.trajectories import from_row
from nemo_gym_testing.gateway.tiny.log import read_log
from nemo_gym_testing.gateway.tiny.script import CallView
from nemo_gym_testing.gateway.tiny.truth import check_truth
from tests.acceptance.harness import CARELESS, HARNESSES, TOOL, Carelessness
from tests.acceptance.stage import staged

TURNS = 20


def twenty_turns(view: CallView) -> Mapping[str, Any]:
    """Text with space all around it, and arguments that no two programs write alike."""
    at = view.answers
    if at + 1 >= TURNS:
        return {"content": "That was all.\n"}
    options = {"b": [1.0, 2, -0.0], "a": {"ü": "é\u2028", "n": None}, "large": 10**15, "at": at}
    arguments = {"options": options, "command": f"echo '{at}'  \"ä\" \\ \n # end "}
    calls = [{"name": TOOL, "arguments": arguments}]
    return {"content": f"  Step {at}\tgoes on.\n\n  Like this. \n", "tool_calls": calls}


def printed(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}: {arguments['options']['at']}\n"


KINDS = [
    kind if kind.name in ("faithful", "all_at_once") else pytest.param(kind, marks=pytest.mark.full)
    for kind in CARELESS
]


@pytest.mark.parametrize("careless", KINDS, ids=lambda careless: careless.name)
@pytest.mark.parametrize("dialect", sorted(HARNESSES))
async def test_careless_harness_keeps_one_chain_of_twenty_turns(
    dialect: str, careless: Carelessness, tmp_path: Path
) -> None:
    async with staged(tmp_path, "chatml_think", twenty_turns) as stage:
        session = await stage.open()
        harness = HARNESSES[dialect](session.base_url, session.token, printed, careless)
        await harness.work("Take twenty steps.")
        finished = await stage.finalize(session)
    assert harness.turns == finished["turns"] == TURNS
    trajectories = [from_row(row) for row in finished["trajectories"]]
    assert [each.split_reason for each in trajectories] == ["initial"]
    calls = read_log(tmp_path / "engine.jsonl")
    # What the policy read and wrote at the end is all there is: nothing twice, nothing encoded anew.
    assert trajectories[0].prompt_ids + trajectories[0].response_ids == calls[-1].prompt_ids + calls[-1].token_ids
    report = check_truth(trajectories, calls, stage.policy)
    assert report.true, report
    assert report.answered == TURNS
