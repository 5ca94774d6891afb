"""Histories written with a written_beforery are what they are without one."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway import text_backend
from nemo_gym.gateway.text_backend import HistoryJson
from tests.properties import examples

_MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text(max_size=4)})


@st.composite
def _requests(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Histories that go on, fall back, are rewritten at some place, or start anew; their messages the same objects or
    equal ones."""
    histories: list[list[dict[str, Any]]] = [[]]
    for _ in range(draw(st.integers(1, 10))):
        history = [*draw(st.sampled_from(histories))]
        if draw(st.booleans()):
            history = [{**message} for message in history]
        keep = len(history) if draw(st.booleans()) else draw(st.integers(0, len(history)))
        histories.append([*history[:keep], *draw(st.lists(_MESSAGES, max_size=8)), *history[keep + 1 :]])
    return histories


@examples(300)
@given(_requests())
def test_array_says_what_the_messages_do_whatever_came_before(histories: list[list[dict[str, Any]]]) -> None:
    written_before = HistoryJson()
    for history in histories:
        assert orjson.loads(written_before.array(history)) == history


def test_old_messages_are_not_written_again_when_a_history_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class Counted:
        @staticmethod
        def dumps(value: Any) -> bytes:
            written.append(value)
            return orjson.dumps(value)

    monkeypatch.setattr(text_backend, "orjson", Counted)
    written_before = HistoryJson()
    history: list[dict[str, Any]] = []
    for turn in range(20):
        history = [*history, {"role": "user", "content": f"{turn}"}]
        written_before.array(history)
    assert written == history


def test_nothing_is_kept_of_a_message_that_cannot_be_written() -> None:
    written_before = HistoryJson()
    good = [{"role": "user", "content": "a"}]
    written_before.array(good)
    with pytest.raises(TypeError):
        written_before.array([*good, {"role": "user", "content": "b"}, {"role": "user", "content": object()}])
    assert written_before.array([*good, {"role": "user", "content": "c"}]) == orjson.dumps(
        [*good, {"role": "user", "content": "c"}]
    )


def test_only_the_latest_history_is_kept() -> None:
    written_before = HistoryJson()
    for number, size in enumerate((10, 2_000_000, 3_000_000, 100_000, 10)):
        latest = written_before.array([{"role": "user", "content": f"{number}" + "x" * size}])
        assert sum(map(len, written_before._texts)) == len(latest) - 2
