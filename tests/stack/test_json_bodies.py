"""Values of a JSON body, counted before anything is parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.http import requests
from nemo_gym.http.requests import TooManyValuesError, check_values, has_more_values

_TEXTS = st.text(alphabet=st.sampled_from('\\"[]{},:a\u00e9\n'), max_size=30)
_VALUES = st.recursive(
    st.none() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXTS, inner, max_size=6),
    max_leaves=40,
)


def signs(value: object) -> int:
    """Commas and opening brackets of a value as JSON, outside of its strings."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(signs, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(signs, value))
    return 0


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1 << 18])
@given(value=_VALUES, less=st.integers(1, 5))
def test_values_are_counted_whatever_strings_hold_and_wherever_the_body_is_cut(
    piece_bytes: int, value: object, less: int
) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode()
    count = signs(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_HELD_AT_ONCE_BYTES", piece_bytes)
        assert not has_more_values(raw, count)
        if count:
            assert has_more_values(raw, max(0, count - less))


async def test_text_is_no_value_and_a_short_body_is_not_looked_at() -> None:
    text = json.dumps({"messages": [{"content": 'a, [b], {"c": "d"}\\ ' * 200_000}]}).encode()
    await check_values(text, 1000)
    await check_values(b"," * 2000, 1000)


@pytest.mark.parametrize("body", [b"[]," * 3_000_000, b'"",' * 3_000_000, b'",' * 4_500_000, b'{"a":' * 2_000_000])
async def test_many_values_are_refused_by_name_whether_it_is_json_or_not(body: bytes) -> None:
    with pytest.raises(TooManyValuesError, match="max_body_values"):
        await check_values(b"[" + body, 200_000)
