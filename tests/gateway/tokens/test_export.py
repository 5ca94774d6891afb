from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_gym.contract.errors import RowError
from nemo_gym.gateway.tokens import Sampled, Trajectory, trajectories_of
from nemo_gym.gateway.tokens.trajectories import read_jsonl, read_npz, write_jsonl, write_npz
from tests.gateway.tokens.conversations import call, result, said, user
from tests.gateway.tokens.sessions import Session


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Two conversations: one with an image, one whose engine gave no logprobs."""
    session = Session()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    start = [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    session.ask(start, said("é", call(1, {})))
    session.ask([*start, said("é", call(1, {})), result(1, "x")], said("done"))
    prepared = session.forest.prepare([user("other")])
    session.forest.commit(prepared, Sampled([7, 8, 9], None, "length", "w9", {"engine": "b"}), said("?"))
    return trajectories_of(session.forest.turns, "s1", reward=0.5, reward_info={"tests": {"passed": 3}})


@pytest.mark.parametrize("form", ["jsonl", "npz"])
def test_exported_trajectories_read_back_equal(tmp_path: Path, form: str, trajectories: list[Trajectory]) -> None:
    write, read = {"jsonl": (write_jsonl, read_jsonl), "npz": (write_npz, read_npz)}[form]
    write(tmp_path / f"t.{form}", trajectories)
    assert read(tmp_path / f"t.{form}") == trajectories
    assert [file.name for file in tmp_path.iterdir()] == [f"t.{form}"]


@pytest.mark.parametrize("form", ["jsonl", "npz"])
def test_no_trajectories_read_back_as_none(tmp_path: Path, form: str) -> None:
    write, read = {"jsonl": (write_jsonl, read_jsonl), "npz": (write_npz, read_npz)}[form]
    write(tmp_path / "t", [])
    assert read(tmp_path / "t") == []


def test_npz_has_the_documented_shapes_and_types(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    write_npz(tmp_path / "t.npz", trajectories)
    with np.load(tmp_path / "t.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    prompt, response = (
        sum(len(getattr(one, f"{part}_ids")) for one in trajectories) for part in ("prompt", "response")
    )
    assert {name: (str(value.dtype), value.shape) for name, value in arrays.items() if name != "metadata"} == {
        "prompt_ids": ("int32", (prompt,)),
        "prompt_offsets": ("int64", (3,)),
        "response_ids": ("int32", (response,)),
        "response_mask": ("uint8", (response,)),
        "logprobs": ("float32", (response,)),
        "response_offsets": ("int64", (3,)),
        "rewards": ("float32", (2,)),
    }
    start, end = arrays["response_offsets"][1:]
    assert np.isnan(arrays["logprobs"][start:end]).all()
    assert not np.isnan(arrays["logprobs"][:start]).any()
    assert arrays["response_ids"][start:end].tolist() == [7, 8, 9]
    assert (arrays["logprobs"][:start][arrays["response_mask"][:start] == 0] == 0).all()


def test_images_are_in_the_trajectory_of_their_conversation(trajectories: list[Trajectory]) -> None:
    with_image, without = trajectories
    assert with_image.multimodal == ({"kind": "image", "source": "data:image/png;base64,AA", "message": 0},)
    assert without.multimodal == ()


def test_finish_reason_and_weights_are_the_turns(trajectories: list[Trajectory]) -> None:
    assert trajectories[1].finish_reason == "length"
    assert trajectories[1].weights_versions == ("w9",)
    assert trajectories[1].turns[0].details == {"engine": "b"}


def test_versions_name_the_weights_with_which_a_turn_began(trajectories: list[Trajectory]) -> None:
    """Of a turn that was under way when the weights changed: a trainer counts its age from its first token."""
    one = trajectories[1]
    turn = replace(one.turns[0], details={**one.turns[0].details, "first_weights_version": "w8"})
    assert replace(one, turns=(turn,)).weights_versions == ("w8", "w9")


def test_missing_reward_stays_missing(tmp_path: Path) -> None:
    session = Session()
    session.ask([user("a")], said("b"))
    write_npz(tmp_path / "t.npz", trajectories_of(session.forest.turns, "s"))
    with np.load(tmp_path / "t.npz") as file:
        assert math.isnan(file["rewards"][0])
    assert read_npz(tmp_path / "t.npz")[0].reward is None


def test_line_with_lengths_that_differ_is_named(tmp_path: Path, trajectories: list[Trajectory]) -> None:
    write_jsonl(tmp_path / "t.jsonl", trajectories)
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    row["response_mask"].pop()
    (tmp_path / "t.jsonl").write_text(f"{lines[0]}\n{json.dumps(row)}\n")
    with pytest.raises(RowError, match=r"line 2: .*differ in length"):
        read_jsonl(tmp_path / "t.jsonl")
