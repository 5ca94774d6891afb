"""Bodies parsed with a cache are what they are without one, and their histories are the same objects again."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.dialects.chat import ConversationCache
from tests.properties import examples

_TEXT = st.text(max_size=12) | st.sampled_from(
    ['"', "\\", '\\"', "]}", '","', "é😀", "\n\t", "a" * 40, '"messages":[']
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**64 - 1) | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(["model", "tools", "stream", "messages", "input", "system"])
_PAIRS = st.lists(st.tuples(_KEYS, _VALUES | st.lists(_VALUES, max_size=3)), max_size=3)
_BLANKS = st.sampled_from(["", "", "", " ", "\n  ", "\t\r\n"])


@st.composite
def _spelled(draw: st.DrawFn, value: Any) -> str:
    """``value`` as JSON, in one of its spellings."""
    blank = draw(_BLANKS)
    if isinstance(value, list):
        return "[" + blank + f",{blank}".join(draw(_spelled(item)) for item in value) + blank + "]"
    if isinstance(value, dict):
        pairs = [f"{draw(_spelled(key))}{blank}:{draw(_spelled(item))}" for key, item in value.items()]
        return "{" + blank + f"{blank},".join(pairs) + blank + "}"
    text = orjson.dumps(value).decode()
    if isinstance(value, str) and draw(st.booleans()):
        return '"' + "".join(f"\\u{unit:04x}" for unit in _units(value)) + '"'
    return text


def _units(text: str) -> list[int]:
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


@st.composite
def _conversations(draw: st.DrawFn) -> list[bytes]:
    """Bodies that begin alike and go on, are cut off, changed, rewritten at the end, or are others altogether."""
    key = draw(st.sampled_from(["messages", "input"]))
    name = draw(st.sampled_from([f'"{key}"', f'"{key}"', '"m\\u0065ssages"']))
    blank = draw(_BLANKS)
    head = "{" + "".join(f"{draw(_spelled(k))}:{draw(_spelled(v))}," for k, v in draw(_PAIRS)) + f"{name}{blank}:["
    elements: list[str] = []
    tail = _tail(draw)
    bodies = []
    for _ in range(draw(st.integers(2, 6))):
        step = draw(st.sampled_from(["more", "more", "more", "same", "rewritten", "shorter", "tail"]))
        if step == "more":
            elements += [draw(_spelled(draw(_VALUES))) for _ in range(draw(st.integers(1, 3)))]
        elif step == "rewritten" and elements:
            at = draw(st.integers(max(0, len(elements) - 3), len(elements) - 1))
            elements[at] = draw(_spelled(draw(_VALUES)))
        elif step == "shorter":
            del elements[draw(st.integers(0, len(elements))) :]
        elif step == "tail":
            tail = _tail(draw)
        body = (head + f"{blank},".join(elements) + tail).encode()
        damage = draw(st.sampled_from(["none"] * 6 + ["cut", "changed", "inserted", "bracketed"]))
        at = draw(st.integers(0, len(body)))
        if damage == "cut":
            body = body[:at]
        elif damage == "changed":
            body = body[:at] + draw(st.binary(min_size=1, max_size=1)) + body[at + 1 :]
        elif damage == "inserted":
            body = body[:at] + draw(st.sampled_from([b",", b"]", b"}", b'"', b"\\", b"1", b" ", b"\xff"])) + body[at:]
        elif damage == "bracketed":
            body = b"[" + body + b"]"
        bodies.append(body)
    return bodies


def _tail(draw: st.DrawFn) -> str:
    blank = draw(_BLANKS)
    pairs = draw(_PAIRS)
    return f"{blank}]" + "".join(f"{blank},{draw(_spelled(k))}:{draw(_spelled(v))}" for k, v in pairs) + f"{blank}}}"


def _outcome(loads: Any, raw: bytes) -> tuple[str, Any]:
    try:
        return "value", loads(raw)
    except orjson.JSONDecodeError as error:
        return "error", str(error)


@examples(400)
@given(_conversations())
def test_body_is_what_a_plain_parse_makes_of_it_whatever_came_before(bodies: list[bytes]) -> None:
    cache = ConversationCache()
    for body in bodies:
        kind, value = _outcome(cache.parse, body)
        expected_kind, expected = _outcome(orjson.loads, body)
        assert kind == expected_kind
        assert repr(value) == repr(expected)  # the order of keys, 1 and 1.0, -0.0


def _history(length: int, **message: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f'text "{number}" \\ ]}}', **message} for number in range(length)]


@pytest.mark.parametrize("around", ["before", "after", "both"])
@pytest.mark.parametrize("key", ["messages", "input"])
def test_history_is_the_same_objects_when_a_body_extends_the_last(key: str, around: str) -> None:
    cache = ConversationCache()
    before = {"model": "m", "tools": [{"a": [1]}]} if around != "after" else {}
    after = {"stream": True, "tools": [{"b": [1]}]} if around != "before" else {}
    first = cache.parse(orjson.dumps({**before, key: _history(5), **after}))
    second = cache.parse(orjson.dumps({**before, key: _history(7), **after}))
    third = cache.parse(orjson.dumps({**before, key: _history(9), **after, "more": 1}))
    assert all(one is other for one, other in zip(first[key], second[key], strict=False))
    assert all(one is other for one, other in zip(second[key], third[key], strict=False))
    assert [len(one[key]) for one in (first, second, third)] == [5, 7, 9]
    assert third["more"] == 1


def test_history_is_the_same_objects_up_to_a_change_when_its_end_is_rewritten() -> None:
    cache = ConversationCache()
    marked = {**_history(6)[5], "cache_control": {"type": "ephemeral"}}
    first = cache.parse(orjson.dumps({"messages": [*_history(5), marked]}))
    second = cache.parse(orjson.dumps({"messages": [*_history(8), marked]}))
    shared = [one is other for one, other in zip(first["messages"], second["messages"], strict=False)]
    assert shared == [True] * 5 + [False]
    assert second["messages"] == [*_history(8), marked]


def test_histories_stay_known_when_conversations_alternate() -> None:
    cache = ConversationCache()
    mains = [cache.parse(orjson.dumps({"system": "main", "messages": _history(4 + turn)})) for turn in range(1)]
    for turn in range(5):
        cache.parse(orjson.dumps({"system": "sub", "messages": _history(2 + turn)}))
        mains.append(cache.parse(orjson.dumps({"system": "main", "messages": _history(5 + turn)})))
        assert all(one is other for one, other in zip(mains[-2]["messages"], mains[-1]["messages"], strict=False))


def test_request_is_its_own_when_its_list_is_changed() -> None:
    cache = ConversationCache()
    raw = orjson.dumps({"messages": _history(3)})
    cache.parse(raw)["messages"].clear()
    changed = cache.parse(raw)
    assert changed == {"messages": _history(3)}
    changed["messages"].append("more")
    changed["model"] = "m"
    assert cache.parse(raw) == {"messages": _history(3)}


def test_later_key_counts_when_a_history_is_there_twice() -> None:
    cache = ConversationCache()
    for last in ("[3]", "[3,4]", "[3,4,5]"):
        raw = b'{"messages":[1,2],"messages":%b}' % last.encode()
        assert cache.parse(raw) == orjson.loads(raw)
    grown = b'{"messages":[1,2,3],"messages":[9]}'
    assert cache.parse(grown) == {"messages": [9]}


@pytest.mark.parametrize(
    "more",
    ['2],"":[3', "2],[3", '2],"messages":[3', '2],"n":[', "2]", "2,", ",2", "", " ", '"]"', "[3],[4]", '2],"n":[{}'],
)
def test_a_bracket_within_what_is_new_ends_the_history_as_in_a_plain_parse(more: str) -> None:
    cache = ConversationCache()
    for rest in (b"}", b',"n":[7]}'):
        known = b'{"m":0,"messages":[0,1]' + rest
        assert cache.parse(known) == orjson.loads(known)
        raw = b'{"m":0,"messages":[0,1,%b]' % more.encode() + rest
        try:
            expected = orjson.loads(raw)
        except orjson.JSONDecodeError:
            with pytest.raises(orjson.JSONDecodeError):
                cache.parse(raw)
        else:
            assert cache.parse(raw) == expected


def test_a_history_that_grew_often_is_known_up_to_a_change_within_it() -> None:
    cache = ConversationCache()
    history: list[Any] = [{"n": 0, "text": "]["}]
    for number in range(1, 30):
        cache.parse(orjson.dumps({"messages": history, "after": "]"}))
        history += [{"n": number, "text": ',"'}, [number]]
    before = cache.parse(orjson.dumps({"messages": history, "after": "]"}))["messages"]
    changed = [*history[:20], "other", *history[21:]]
    after = cache.parse(orjson.dumps({"messages": changed, "after": "]"}))["messages"]
    assert after == changed
    assert [one is other for one, other in zip(before, after, strict=True)][:20] == [True] * 20


def test_depth_is_limited_as_in_a_plain_parse() -> None:
    for levels in range(1015, 1030):
        cache = ConversationCache()
        cache.parse(b'{"messages":[1]}')
        raw = b'{"messages":[1,%b%b]}' % (b"[" * levels, b"]" * levels)
        (kind, value), (expected_kind, expected) = _outcome(cache.parse, raw), _outcome(orjson.loads, raw)
        assert kind == expected_kind
        assert kind == "value" or value == expected  # what is that deep cannot be compared


def test_memory_holds_the_latest_body_and_small_ones_beside_it() -> None:
    cache = ConversationCache()
    source = random.Random(5)
    for size in (10, 2_000_000, 3_000_000, 100_000, 10, 10, 10, 10):
        latest = orjson.dumps({"messages": [{"content": f"{source.random()}" + "x" * size}]})
        cache.parse(latest)
        kept = sum(len(view.body.raw) for view in cache._views if view.body is not None)
        assert len(latest) <= kept <= max(len(latest), 256 << 10)
        assert len(cache._views) <= 4
