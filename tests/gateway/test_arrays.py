from __future__ import annotations

import math
from array import array
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.policy_request import LARGE, packed


@pytest.mark.parametrize("times", [1, LARGE])
@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5))
def test_long_and_short_ids_are_packed_alike(times: int, ids: list[int]) -> None:
    assert packed("i", ids * times) == array("i", ids * times)


@pytest.mark.parametrize("times", [1, LARGE])
@given(logprobs=st.lists(st.floats(width=32, allow_nan=False) | st.floats(-100, 0), min_size=1, max_size=5))
def test_long_and_short_logprobs_are_packed_alike(times: int, logprobs: list[float]) -> None:
    assert packed("f", logprobs * times).tobytes() == array("f", logprobs * times).tobytes()


@pytest.mark.parametrize("times", [1, LARGE])
@pytest.mark.parametrize(
    ("typecode", "wrong"), [("i", 2**31), ("i", 1.5), ("i", "1"), ("i", None), ("f", "1"), ("f", None)]
)
def test_what_does_not_fit_is_refused_at_any_length(typecode: Literal["i", "f"], wrong: Any, times: int) -> None:
    with pytest.raises((TypeError, OverflowError)):
        packed(typecode, [1] * times + [wrong])


def test_no_number_stays_none() -> None:
    assert math.isnan(packed("f", [math.nan] * LARGE)[0])
