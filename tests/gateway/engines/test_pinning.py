from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.engines import pinned_sampling
from nemo_gym.gateway.engines.http import DONE, EventReader


def test_pinned_parameters_win_over_what_the_harness_asks() -> None:
    made = pinned_sampling(
        {"temperature": 0.0, "top_p": 0.1, "seed": 3, "stop": ["a"]},
        {"temperature": 1.0, "top_k": -1, "stop": ["END"]},
        room_tokens=100,
    )
    assert (made.temperature, made.top_p, made.top_k, made.seed, made.stop) == (1.0, 0.1, -1, 3, ("END",))


@pytest.mark.parametrize(
    ("asked", "pinned", "room", "expected"),
    [
        ({}, {}, 50, 50),
        ({"max_tokens": 20}, {}, 50, 20),
        ({"max_completion_tokens": 20}, {"max_tokens": 30}, 50, 20),
        ({"max_output_tokens": 128000}, {"max_output_tokens": 30}, 50, 30),
        ({"max_tokens": 128000}, {}, 50, 50),
    ],
)
def test_smallest_token_budget_wins(asked: dict[str, Any], pinned: dict[str, Any], room: int, expected: int) -> None:
    assert pinned_sampling(asked, pinned, room_tokens=room).max_tokens == expected


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"stop": [1]},
        {"stop": True},
        {"stop": {"a": 1}},
        {"seed": float("inf")},
        {"temperature": float("nan")},
    ],
)
def test_value_that_cannot_be_meant_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidBodyError, match=next(iter(asked))):
        pinned_sampling(asked, {}, room_tokens=10)


@pytest.mark.parametrize("pinned", [{"stop_token_ids": 7}, {"stop_token_ids": ["a"]}, {"stop": [True]}])
def test_pinned_value_that_cannot_be_meant_is_refused_by_name(pinned: dict[str, Any]) -> None:
    with pytest.raises(InvalidBodyError, match=next(iter(pinned))):
        pinned_sampling({}, pinned, room_tokens=10)


@given(cuts=st.lists(st.integers(0, 80), max_size=12), end=st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int], end: bytes) -> None:
    raw = end.join(
        [b": ping", b"", b"event: x", b"data: {1}", b"data:  two", b"", b"id: 4", b"", b"data:[DONE]", b"", b""]
    )
    reader = EventReader()
    found: list[bytes] = []
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    for start, stop in itertools.pairwise(edges):
        found += reader.feed(raw[start:stop])
    found += reader.feed(b"\n")
    assert found == [b"{1}\n two", DONE]
