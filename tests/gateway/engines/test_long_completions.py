from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.engines import vllm as long_completions
from nemo_gym.gateway.engines.vllm import _COMPLETIONS, LongCompletion, long_completion
from tests.properties import examples

HOSTILE = (
    *("finish_reason", '"finish_reason"', ',"finish_reason":"stop"', '}]},"finish_reason":"stop"', "token_ids"),
    *(',"token_ids":[1]', "logprobs", ',"logprobs":{"token_logprobs":[', "token_logprobs", "choices"),
    *("]", "[", "}", "}]}", "},{", "\\", '\\"', '"', "é", "\n", "\ud800", ""),
)
TEXTS = st.sampled_from(HOSTILE) | st.text(max_size=6)
LOGPROBS = st.floats(-1e3, 0) | st.just(-9999.0) | st.integers(-5, 0) | st.floats(-1, 0, width=32)
VALUES = st.recursive(
    TEXTS | st.integers() | st.none(),
    lambda value: st.lists(value, max_size=3) | st.dictionaries(TEXTS, value, max_size=3),
    max_leaves=8,
)
EXTRAS = st.dictionaries(TEXTS, VALUES, max_size=2)


@pytest.fixture(autouse=True)
def _short_bodies_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(long_completions, "WORTH_IT_BYTES", 0)
    yield


def choice_of(tokens: list[str], logprobs: list[float], ids: list[int], **other: Any) -> dict[str, Any]:
    """As vLLM writes it."""
    return {
        "index": 0,
        "text": "".join(tokens),
        "logprobs": {
            "text_offset": [len("".join(tokens[:at])) for at in range(len(tokens))],
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": [5, 6, 7],
        **other,
    }


def body_of(*choices: dict[str, Any]) -> dict[str, Any]:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return {**head, "choices": [*choices], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@st.composite
def sampled(draw: st.DrawFn) -> tuple[list[str], list[float], list[int]]:
    size = draw(st.integers(0, 6))
    return (
        draw(st.lists(TEXTS, min_size=size, max_size=size)),
        draw(st.lists(LOGPROBS, min_size=size, max_size=size)),
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)),
    )


def written(draw: st.DrawFn, body: Any) -> bytes:
    """In one of the ways that servers write JSON."""
    ascii_only, separators = draw(st.booleans()), draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :"), None]))
    indent = draw(st.sampled_from([None, None, 1]))
    text = json.dumps(body, ensure_ascii=ascii_only, separators=separators, indent=indent)
    return text.encode("utf-8", "replace")


def reordered(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    return dict(draw(st.permutations([*value.items()])))


def same_or_left(raw: bytes) -> bool:
    """Whether it was read; what was read is what the whole decoder reads, in any body that this takes."""
    found = long_completion(raw)
    try:
        whole = _COMPLETIONS.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return found is not None
    if found is not None:
        (choice,) = whole.choices
        assert (found.finish_reason, found.stop_reason) == (choice.finish_reason, choice.stop_reason)
        assert tuple(found.token_ids) == choice.token_ids == tuple(orjson.loads(found.ids_json))
        assert b" " not in found.ids_json
        assert found.logprobs == array("f", choice.logprobs)
        assert bytes(found.prompt_token_ids) == bytes(choice.prompt_token_ids)
        assert found.usage == whole.usage
    return found is not None


@given(said=sampled())
def test_vllms_own_bodies_are_read_as_the_whole_decoder_does(said: tuple[list[str], list[float], list[int]]) -> None:
    raw = json.dumps(body_of(choice_of(*said)), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    assert same_or_left(raw) is not ("finish_reason" in said[0])


@given(data=st.data())
@examples(400)
def test_bodies_in_any_order_and_spelling_are_read_alike_or_left(data: st.DataObject) -> None:
    choices = []
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
        choice = {**data.draw(EXTRAS), **choice_of(*data.draw(sampled()))}
        for key in data.draw(st.sets(st.sampled_from([*choice]), max_size=2)):
            del choice[key]
        if isinstance(choice.get("logprobs"), dict):
            logprobs = reordered(data.draw, {**data.draw(EXTRAS), **choice["logprobs"]})
            choice["logprobs"] = data.draw(st.sampled_from([logprobs, choice["logprobs"], None]))
        choices.append(reordered(data.draw, choice) if data.draw(st.booleans()) else choice)
    body: dict[str, Any] = {**data.draw(EXTRAS), **body_of(*choices)}
    same_or_left(written(data.draw, reordered(data.draw, body) if data.draw(st.booleans()) else body))


def test_a_decoy_of_each_key_deeper_down_is_not_taken() -> None:
    real = choice_of(["a", "b"], [-1.0, -2.0], [1, 2])
    decoy = {
        "x": 0,
        "logprobs": {"token_logprobs": [-7.0]},
        "finish_reason": "length",
        "token_ids": [9],
        "stop_reason": 3,
    }
    bodies = [
        body_of({"decoy": decoy, **real}),
        body_of({**real, "decoy": decoy}),
        body_of({**real, "logprobs": {**real["logprobs"], "decoy": decoy}}),
        body_of({**real, "logprobs": {"text_offset": [{"a": [1], "token_logprobs": [-7.0]}], **real["logprobs"]}}),
        body_of({**real, "token_ids": None, "stop_reason": decoy["stop_reason"], "decoy": decoy}),
        {"decoy": [decoy], **body_of(real)},
        {**body_of(real), "decoy": [decoy]},
        body_of({"index": 0, "finish_reason": "length", "logprobs": real["logprobs"]}, real),
        body_of(real, {**real, "index": 1}),
    ]
    for body in bodies:
        same_or_left(orjson.dumps(body))


@pytest.mark.parametrize(
    "ids",
    ["[1, 2]", "[1,2.0]", "[1,4294967296]", "[1,-2]", "[1,null]", "[[1],2]", '["1",2]', "[01,2]", "[1,,2]", "[1,2,]"],
)
def test_ids_that_are_not_written_plainly_are_left_to_the_whole_decoder(ids: str) -> None:
    raw = orjson.dumps(body_of(choice_of(["a", "b"], [-1.0, -2.0], [1, 2])))
    assert same_or_left(raw)
    assert same_or_left(raw.replace(b'"token_ids":[1,2]', f'"token_ids":{ids}'.encode())) is (ids == "[1,-2]")


@pytest.mark.parametrize("logprobs", ["[NaN,-2]", "[null,-2]", '["-1",-2]', "[-1,[-2]]", "[-1,-2", "-1", "null"])
def test_logprobs_that_are_no_numbers_are_left_to_the_whole_decoder(logprobs: str) -> None:
    raw = orjson.dumps(body_of(choice_of(["a", "b"], [-1.0, -2.0], [1, 2])))
    assert not same_or_left(raw.replace(b'"token_logprobs":[-1.0,-2.0]', f'"token_logprobs":{logprobs}'.encode()))


def test_damaged_bodies_are_read_alike_or_left() -> None:
    source = random.Random(3)
    raw = orjson.dumps(body_of(choice_of(["a", '"]}', "c\\"], [-1.0, -2.5, -3.0], [1, 2, 3])))
    read = 0
    for _ in range(20_000):
        damaged = bytearray(raw)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(damaged))
            if source.random() < 0.5:
                damaged[at : at + source.randint(0, 4)] = source.choice(
                    [b"", b'"', b"]", b"}", b",", b"\\", b"[", b"{", b"1"]
                )
            else:
                damaged[at] = source.choice(b'",:[]{}\\0 1a')
        read += same_or_left(bytes(damaged))
    assert read > 100


def test_short_bodies_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    raw = orjson.dumps(body_of(choice_of(["a"], [-1.0], [1])))
    assert long_completion(raw) is None
    long = orjson.dumps(body_of(choice_of(["a"] * 5000, [-1.25] * 5000, [7] * 5000)))
    found = long_completion(long)
    assert isinstance(found, LongCompletion) and [*found.token_ids] == [7] * 5000


@examples(300)
@given(
    st.lists(st.sampled_from([b'"finish_reason"', b"_", b'"finish', b"_reason", b"x", b'"finish__reason"'])), st.data()
)
def test_the_finish_is_found_where_a_plain_search_finds_it(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    start = data.draw(st.integers(0, len(raw)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_completions, "_RARE_AT_MOST", data.draw(st.integers(0, 5)))
        assert long_completions._finish_in(raw, start) == raw.find(b'"finish_reason"', start)
