"""The export of trajectories as a user runs it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_gym.gateway.tokens import trajectories_of
from nemo_gym.gateway.tokens.trajectories import as_row, read_jsonl, read_npz
from tests.gateway.tokens.conversations import said, user
from tests.gateway.tokens.sessions import Session
from tests.stack.stacks import command, no_traceback

MODULE = "profile:main_export"


def held() -> list[dict[str, Any]]:
    """What a gateway leaves of one session: a conversation of two turns, and another beside it."""
    session = Session()
    session.ask([user("a")], said("b"))
    session.ask([user("a"), said("b"), user("c")], said("d"))
    session.ask([user("other")], said("e"))
    return [as_row(one) for one in trajectories_of(session.forest.turns, "s1")]


def row(index: int, **fields: Any) -> dict[str, Any]:
    return {
        "_ng_rollout_id": f"run.{index}-0",
        "task_id": f"task-{index}",
        "_ng_task_index": index,
        "_ng_rollout_index": 0,
        "_ng_attempt_index": 1,
        "agent_ref": {"name": "adder"},
        "valid": True,
        "mask_sample": False,
        "reward": 0.5,
        "response": {},
        "ng_trajectory": held(),
        **fields,
    }


def write_result(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows))
    return path


@pytest.mark.parametrize("form", ["jsonl", "npz"])
def test_trajectories_get_the_reward_and_the_identity_of_their_row(root: Path, form: str) -> None:
    source = write_result(
        root / "rows.jsonl",
        row(0),
        row(1, reward=None, valid=False, mask_sample=True, failure_kind="sandbox_lost"),
        row(2, ng_trajectory=None),
    )
    target = root / f"out.{form}"
    done = command(root, MODULE, f"input={source}", f"output={target}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"4 trajectories of 2 rows in {target} (2 with a reward)",
        "1 of 3 rows hold no trajectories",
    ]
    found = {"jsonl": read_jsonl, "npz": read_npz}[form](target)
    assert [one.reward for one in found] == [0.5, 0.5, None, None]
    assert [one.identity["rollout_id"] for one in found] == ["run.0-0", "run.0-0", "run.1-0", "run.1-0"]
    assert found[0].identity == {
        "rollout_id": "run.0-0",
        "task_id": "task-0",
        "task_index": 0,
        "rollout_index": 0,
        "attempt_index": 1,
        "agent": "adder",
    }
    assert [one.response_ids.tolist() for one in found[:2]] == [each["response_ids"] for each in held()]


def test_last_line_that_is_still_being_written_is_left_out(root: Path) -> None:
    source = write_result(root / "rows.jsonl", row(0))
    source.write_text(source.read_text() + json.dumps(row(1))[:-9])
    done = command(root, MODULE, f"input={source}", f"output={root / 'out.jsonl'}")
    assert (done.returncode, len(read_jsonl(root / "out.jsonl"))) == (0, 2), done.stderr
    assert "the last line has no end" in done.stderr


def test_arrays_hold_no_reward_where_the_verdict_is_invalid(root: Path) -> None:
    source = write_result(root / "rows.jsonl", row(0, reward=1), row(1, valid=False, reward=None))
    done = command(root, MODULE, f"input={source}", f"output={root / 'out.npz'}")
    assert done.returncode == 0, done.stderr
    with np.load(root / "out.npz", allow_pickle=False) as file:
        rewards = file["rewards"].tolist()
    assert rewards[:2] == [1.0, 1.0]
    assert all(math.isnan(one) for one in rewards[2:])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        (row(1, reward=None), "line 2: 'reward' is not a finite number"),
        (row(1, reward=True), "line 2: 'reward' is not a finite number"),
        (row(1, ng_trajectory={}), "line 2: 'ng_trajectory' is not a list"),
        (row(1, ng_trajectory=[1]), "line 2: 'ng_trajectory[0]' is no JSON object"),
        (row(1, ng_trajectory=[{}]), "line 2: 'ng_trajectory[0]': trajectory: KeyError"),
        (
            row(1, ng_trajectory=[{**held()[0], "response_mask": [1]}]),
            "line 2: 'ng_trajectory[0]': trajectory: response_ids, response_mask and logprobs differ in length",
        ),
        *(
            (row(1, ng_trajectory=[{**held()[0], **damage}]), f"line 2: 'ng_trajectory[0]': trajectory: {says}")
            for damage, says in (
                ({"turns": []}, "its turns are no spans of response_ids"),
                ({"turns": [{**held()[0]["turns"][0], "end": 999}]}, "its turns are no spans of response_ids"),
                ({"turns": [{**held()[0]["turns"][0], "details": 1}]}, "AttributeError"),
                ({"turns": [{**held()[0]["turns"][0], "weights_version": 1}]}, "a weights_version is no text"),
                ({"turns": [{**held()[0]["turns"][0], "weights_version": []}]}, "TypeError"),
                ({"response_mask": 10**12}, "TypeError"),
                ({"response_mask": [2] * len(held()[0]["response_mask"])}, "response_mask holds other numbers than"),
                ({"prompt_ids": [-1]}, "prompt_ids holds a negative token id"),
                ({"response_ids": [-1] * len(held()[0]["response_ids"])}, "response_ids holds a negative token id"),
                ({"reward_info": 1}, "TypeError"),
                ({"multimodal": [1]}, "TypeError"),
            )
        ),
        (
            row(1, ng_trajectory=[{**held()[0], "prompt_ids": [], "messages": [user("a")]}]),
            "line 2: 'ng_trajectory[0]' holds text and no token ids",
        ),
    ],
)
def test_row_that_is_none_is_named_and_nothing_is_written(root: Path, bad: Any, says: str) -> None:
    source = write_result(root / "rows.jsonl", row(0), bad, row(2))
    done = command(root, MODULE, f"input={source}", f"output={root / 'out.jsonl'}")
    assert done.returncode == 2
    assert says in done.stderr
    assert no_traceback(done.stderr)
    assert [file.name for file in root.glob("*out*")] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "input=: is missing"),
        (["input=rows.jsonl"], "output=: is missing"),
        (["input=nowhere.jsonl", "output=o.npz"], "'nowhere.jsonl' is not a file"),
        (["input=rows.jsonl", "output=o.csv"], "must end in .jsonl or .npz"),
        (["input=rows.jsonl", "output=rows.jsonl"], "is the input itself"),
        (["input=rows.jsonl", "output=no/o.npz"], "there is no directory 'no'"),
        (["inputs=rows.jsonl", "output=o.npz"], "did you mean 'input'"),
    ],
)
def test_wrong_usage_says_what_to_give(root: Path, words: list[str], says: str) -> None:
    write_result(root / "rows.jsonl", row(0))
    done = command(root, MODULE, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert (root / "rows.jsonl").read_text().count("\n") == 1
