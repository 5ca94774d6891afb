from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import chat
from nemo_gym.gateway.dialects.chat import ConversationCache, request_fingerprint

ELEMENTS = st.lists(st.fixed_dictionaries({"content": st.sampled_from(["a", "b", "c"])}), max_size=6)


@given(requests=st.lists(st.tuples(st.booleans(), ELEMENTS), min_size=1, max_size=8))
def test_fingerprint_with_a_cache_is_the_one_without(requests: list[tuple[bool, list[dict[str, Any]]]]) -> None:
    cache, before = ConversationCache(), []
    for goes_on, new in requests:
        history = [*before, *new] if goes_on else new
        body = json.loads(json.dumps({"messages": history, "tools": [], "stream": goes_on}))
        assert request_fingerprint("r", body, cache) == request_fingerprint("r", body)
        before = history


@pytest.mark.parametrize("key", ["messages", "input"])
def test_histories_that_differ_anywhere_have_other_fingerprints(key: str) -> None:
    histories: list[Any] = [[], [{}], [{}, {}], ["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], "ab", None]
    found = {request_fingerprint("r", {key: history}) for history in histories}
    assert len(found) == len(histories)


def test_only_what_is_new_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    digest = chat._digest

    def counting(data: bytes) -> bytes:
        done.append(len(data))
        return digest(data)

    monkeypatch.setattr(chat, "_digest", counting)
    cache = ConversationCache()
    history: list[dict[str, str]] = []
    for turn in range(50):
        history.append({"content": f"{turn:1000}"})
        done.clear()
        request_fingerprint("r", json.loads(json.dumps({"messages": history})), cache)
        assert len(done) == (2 if turn else 3)  # with the parameters, which there are none of, once


def test_parameters_are_told_apart_however_alike_and_whatever_their_order() -> None:
    cache = ConversationCache()
    tools = [{"name": "f"}]
    bodies: list[dict[str, Any]] = [
        {"tools": tools, "seed": seed, "top_k": top_k, "messages": []}
        for seed, top_k in ((1, 2), (2, 1), (True, 2), (1.0, 2), (1, None))
    ]
    found = [request_fingerprint("r", body, cache) for body in bodies]
    assert len({*found}) == len(found)
    assert [request_fingerprint("r", body) for body in bodies] == found
    assert [request_fingerprint("r", dict(reversed(body.items())), cache) for body in bodies] == found
    assert request_fingerprint("another", bodies[0], cache) not in found


@pytest.mark.parametrize("key", ["messages", "tools"])
def test_body_that_cannot_be_written_again_is_refused(key: str) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    with pytest.raises(InvalidBodyError, match="nested too deeply"):
        request_fingerprint("r", {key: deep})
