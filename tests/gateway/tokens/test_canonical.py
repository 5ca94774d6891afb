from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.dialects import messages as messages_chat
from nemo_gym.gateway.dialects import responses as responses_chat
from nemo_gym.gateway.tokens.history import HistoryReader, _without_spaces, entries_of, tools_digest
from tests.gateway.tokens.conversations import TEXT, call, result, said, user


def key(*messages: dict[str, Any]) -> bytes:
    return HistoryReader().read(messages, None).key


def called(arguments: Any) -> dict[str, Any]:
    return said("", call(1, arguments))


SAME = {
    "whitespace stripped": (said(" a\n\n b "), said("a b")),
    "reasoning dropped": ({**said("a"), "reasoning_content": "hm"}, said("a")),
    "reasoning in tags": (said("<think>\nhm\n</think>\n\na"), said("a")),
    "reasoning opened by the prompt": (said("hm\n</think>\n\na"), said("a")),
    "content null": ({**called("{}"), "content": None}, called("{}")),
    "content absent": ({"role": "assistant", "tool_calls": [call(1, "{}")]}, called("{}")),
    "parts": ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, user("ab")),
    "cache control": (
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        user("a"),
    ),
    "argument order and spacing": (called('{"a": 1, "b": [1, 2]}'), called('{"b":[1,2],"a":1}')),
    "argument escapes": (called('{"a": "\\u00e9\\/"}'), called('{"a":"é/"}')),
    "argument numbers": (called('{"a": 1.0, "b": 1e2, "c": -0.0}'), called('{"a":1,"b":100,"c":0}')),
    "large integers": (called('{"a": 9007199254740993}'), called('{"a":9007199254740992}')),
    "integers beyond 64 bits": (called('{"a": 123456789012345678901}'), called('{"a":123456789012345680000}')),
    "no arguments": (called(""), called("{}")),
    "argument's default written out": (called('{"a": 1}'), called('{"all": false, "a": 1, "n": null}')),
    "nested default written out": (called('{"e": [{"a": 1}]}'), called('{"e": [{"a": 1, "all": false}]}')),
    "argument's lines trimmed": (called('{"a": "x  \\n  y \\n\\n"}'), called('{"a": "x\\n  y"}')),
    "argument unescaped": (called({"a": "\\u00e9 \\ud83c\\udf21 \\u12"}), called({"a": "é 🌡 \\u12"})),
    "arguments as data": (called({"a": 1}), called('{"a":1}')),
    "arguments that are no JSON": (called('{"a": '), called({"arguments": '{"a": '})),
    "developer": ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
    "billing header": (
        {"role": "system", "content": "x-anthropic-billing-header: cc_version=1; cch=ab12;\nYou help."},
        {"role": "system", "content": "x-anthropic-billing-header: cc_version=1; cch=ff00;\nYou help."},
    ),
    "line ends": (user("a\r\nb\n"), user("a\nb")),
    "null fields": ({**user("a"), "name": None, "refusal": None}, user("a")),
}
OTHER = {
    "words": (said("a b"), said("a c")),
    "user's inner whitespace": (user("a b"), user("a  b")),
    "role": (user("a"), {"role": "system", "content": "a"}),
    "argument value": (called('{"a": 1}'), called('{"a": 2}')),
    "argument type": (called('{"a": 1}'), called('{"a": "1"}')),
    "argument's indentation": (called('{"a": "x\\n  y"}'), called('{"a": "x\\n y"}')),
    "false in a list": (called('{"a": [1, false]}'), called('{"a": [1]}')),
    "true is not one": (called('{"a": true}'), called('{"a": 1}')),
    "called tool": (said("", call(1, "{}", "a")), said("", call(1, "{}", "b"))),
    "order of calls": (
        said("", call(1, "{}", "a"), call(2, "{}", "b")),
        said("", call(1, "{}", "b"), call(2, "{}", "a")),
    ),
    "image": (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:1"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:2"}}]},
    ),
    "reminder tag that an assistant wrote": (said("<system-reminder>a</system-reminder>"), said("")),
}


@pytest.mark.parametrize(("first", "second"), SAME.values(), ids=SAME)
def test_spellings_are_one_message(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert key(first) == key(second)


@pytest.mark.parametrize(("first", "second"), OTHER.values(), ids=OTHER)
def test_different_messages_stay_different(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert key(first) != key(second)


def test_results_of_parallel_calls_match_in_any_order_by_call() -> None:
    calls = said("", call(1, "{}"), call(2, "{}"))
    assert key(calls, result(1, "a"), result(2, "b")) == key(calls, result(2, "b"), result(1, "a"))
    assert key(calls, result(1, "a"), result(2, "b")) != key(calls, result(1, "b"), result(2, "a"))


def test_moving_text_between_messages_is_another_conversation() -> None:
    assert key(user("ab"), user("c")) != key(user("a"), user("bc"))


@given(
    st.text(
        st.characters(codec=None) | st.sampled_from(" \t\n\x0b\x0c\r\x1c\x1f\x85\xa0\u2003\u2028\u3000\ufeff\ud800")
    )
)
def test_all_white_space_of_an_answer_is_left_out(text: str) -> None:
    assert _without_spaces(text) == "".join(text.split())


def test_reminders_without_an_end_and_long_spaces_are_read_in_one_pass() -> None:
    # Read again from each beginning, these texts would take hours.
    starts = "<system-reminder>" * 200_000
    assert key(user(starts)) != key(user(starts + "</system-reminder>"))
    assert key(said(" " * 2_000_000 + "a<think></think>b")) == key(said("a<think></think>b"))


def test_lone_surrogates_have_a_digest() -> None:
    assert key(called('{"a": "\\ud800"}')) == key(called('{"a":  "\\ud800"}'))
    assert key(user("\ud800")) != key(user("\ud801"))


def test_added_tool_is_another_prompt() -> None:
    one = {"type": "function", "function": {"name": "a", "parameters": {}}}
    assert tools_digest([one]) != tools_digest([one, {"type": "function", "function": {"name": "b"}}])
    assert tools_digest(None) == tools_digest([])


def test_messages_and_responses_dialects_send_back_what_was_delivered_in_either() -> None:
    answer = said("text", call(1, '{"b": 1.0, "a": "é"}'))
    completion = {"choices": [{"message": answer, "finish_reason": "tool_calls"}], "model": "m"}
    block = messages_chat.message_of_completion(completion)["content"]
    anthropic = messages_chat.chat_request(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": block}], "max_tokens": 1}
    )["messages"]
    output = responses_chat.response_of_completion(completion, {})["output"]
    responses = responses_chat.chat_messages([{"role": "user", "content": "q"}, *output])
    assert key(user("q"), answer) == key(*anthropic) == key(*responses)


CONVERSATIONS = st.lists(
    st.one_of(
        TEXT.map(user),
        TEXT.map(said),
        TEXT.map(lambda text: {"role": "tool", "tool_call_id": "call_1", "content": text}),
        st.just(said("", call(1, "{}"), call(2, "{}"))),
        st.just(user("<system-reminder>r</system-reminder>")),
    ),
    max_size=8,
)


@given(requests=st.lists(CONVERSATIONS, min_size=1, max_size=6))
def test_reading_after_other_requests_equals_reading_afresh(requests: list[list[dict[str, Any]]]) -> None:
    reader = HistoryReader()
    known: list[dict[str, Any]] = []
    for request in requests:
        for messages in (request, [*known[: len(known) // 2], *request], [*known, *request]):
            reading, fresh = reader.read(messages, None), HistoryReader().read(messages, None)
            assert reading.entries == fresh.entries == entries_of(messages)
            assert (reading.keys, reading.seen) == (fresh.keys, fresh.seen)
            known = messages
