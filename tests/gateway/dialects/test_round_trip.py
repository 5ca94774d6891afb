"""An answer that a harness sends back as history is the message that was answered: one chain, whatever the dialect."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.gateway.capture import redacted_json
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.endpoint import answer_of_completion
from nemo_gym.gateway.policy_request import Answer, written
from nemo_gym.gateway.tokens.history import entries_of
from tests.gateway.dialects.bodies import SCHEMA, answer, call, chat_body, claude_body, codex_body
from tests.properties import examples

ANY_TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(["command", "input", "arguments", "b"]), JSON, max_size=3).map(
        lambda value: orjson.dumps(value).decode()
    ),
    JSON.map(lambda value: orjson.dumps(value).decode()),
    st.sampled_from(
        [
            '{"a": "\\ud800"}',
            "{",
            "",
            " ",
            "NaN",
            '{"arguments": "{}"}',
            '{"arguments":""}',
            '{"input": "x"}',
            '{"input": 1}',
        ]
    ),
    st.text(max_size=20),
)
NAMES = {
    Dialect.CHAT: ["bash", "apply_patch", "unknown"],
    Dialect.MESSAGES: ["Bash", "mcp__weather__get", "unknown"],
    Dialect.RESPONSES: ["exec_command", "mcp__weather__get_weather", "apply_patch", "local_shell", "unknown"],
}


def asked(dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.CHAT:
        custom = {"type": "custom", "custom": {"name": "apply_patch"}}
        plain = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
        return chat_body(tools=[plain, custom])
    return claude_body() if dialect is Dialect.MESSAGES else codex_body()


def with_history(dialect: Dialect, body: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
    """The next request: the reply, and what its calls gave."""
    if dialect is Dialect.CHAT:
        message = reply["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in message.get("tool_calls") or ()
        ]
        return {**body, "messages": [*body["messages"], message, *results]}
    if dialect is Dialect.MESSAGES:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        user = [{"role": "user", "content": results}] if results else []
        return {**body, "messages": [*body["messages"], {"role": "assistant", "content": reply["content"]}, *user]}
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        for item in reply["output"]
        if item["type"].endswith("_call")
    ]
    return {**body, "input": [*body["input"], *reply["output"], *results]}


def echoed(dialect: Dialect, given: Answer) -> None:
    """Ask, answer, send back, as JSON on a wire; the history is what was answered."""
    adapter, body = ADAPTERS[dialect], asked(dialect)
    request = adapter.lower(body)
    reply = orjson.loads(orjson.dumps(adapter.reply(given, request, body)))
    next_request = adapter.lower(with_history(dialect, body, reply))
    kept = next_request.messages[: len(request.messages)]
    assert [*kept] == [*request.messages]
    before = entries_of([*request.messages, given.message])
    after = entries_of(next_request.messages)
    assert [entry.digest for entry in after[: len(before)]] == [entry.digest for entry in before]
    results = next_request.messages[len(request.messages) + 1 :]
    ids = [one["id"] for one in next_request.messages[len(request.messages)].get("tool_calls") or ()]
    assert [message["tool_call_id"] for message in results] == ids
    assert next_request.tools == request.tools


@pytest.mark.parametrize("dialect", [*Dialect])
@examples(150)
@given(data=st.data())
def test_answer_sent_back_is_the_answer(dialect: Dialect, data: st.DataObject) -> None:
    calls = [
        call(number, data.draw(st.sampled_from(NAMES[dialect])), data.draw(ARGUMENTS))
        for number in range(data.draw(st.integers(0, 3)))
    ]
    echoed(
        dialect,
        answer(data.draw(st.none() | st.text(max_size=40)), *calls, reasoning=data.draw(st.none() | st.just("hmm"))),
    )


@pytest.mark.parametrize("dialect", [*Dialect])
@pytest.mark.parametrize("levels", [199, 200, 201, 250, 260, 900, 2000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}"), ('{"arguments":', "}")])
def test_arguments_of_any_depth_come_back(dialect: Dialect, levels: int, start: str, end: str) -> None:
    arguments = start * levels + "1" + end * levels
    echoed(dialect, answer("so", *(call(number, name, arguments) for number, name in enumerate(NAMES[dialect]))))


@pytest.mark.parametrize("streamed", [False, True])
def test_integers_of_any_length_reach_a_harness_of_messages_unchanged(streamed: bool) -> None:
    arguments = '{"id": 123456789012345678901,\n"even": 100000000000000000000, "text": "1234567890123456789\\n"}'
    adapter, body = ADAPTERS[Dialect.MESSAGES], asked(Dialect.MESSAGES)
    reply = adapter.reply(answer(None, call(1, "Bash", arguments)), adapter.lower(body), body)
    if streamed:
        events = [json.loads(each.partition(b"data: ")[2]) for each in adapter.events(reply)]
        sent = json.loads("".join(each["delta"].get("partial_json", "") for each in events if "delta" in each))
    else:
        sent = json.loads(b"".join(bytes(piece) for piece in written(reply)))["content"][0]["input"]
        assert b"123456789012345678901" in redacted_json(reply)
        assert b"\n" not in redacted_json(reply)
    assert json.dumps(sent) == json.dumps(json.loads(arguments))


@pytest.mark.parametrize("dialect", [*Dialect])
def test_integers_of_any_length_come_back(dialect: Dialect) -> None:
    echoed(dialect, answer(None, call(1, NAMES[dialect][0], '{"id": 123456789012345678901}')))


@pytest.mark.parametrize("dialect", [*Dialect])
def test_reasoning_comes_back_as_reasoning(dialect: Dialect) -> None:
    adapter, body = ADAPTERS[dialect], asked(dialect)
    request = adapter.lower(body)
    reply = adapter.reply(answer("so", call(1, "bash", "{}"), reasoning="I think"), request, body)
    message = adapter.lower(with_history(dialect, body, reply)).messages[len(request.messages)]
    assert message["reasoning_content"] == "I think" and message["content"] == "so"


REFUSED_BY = {
    Dialect.CHAT: lambda reply: reply["choices"][0]["message"]["refusal"],
    Dialect.MESSAGES: lambda reply: reply["stop_reason"] == "refusal" and reply["content"][0]["text"],
    Dialect.RESPONSES: lambda reply: reply["output"][-1]["content"][0]["refusal"],
}


@pytest.mark.parametrize("dialect", [*Dialect])
@pytest.mark.parametrize("content", [None, ""])
def test_refusal_of_an_endpoint_is_one_in_every_dialect_and_comes_back(dialect: Dialect, content: str | None) -> None:
    message = {"role": "assistant", "content": content, "refusal": "I will not."}
    completion = {"choices": [{"message": message, "finish_reason": "stop"}]}
    given = answer_of_completion(completion, answer_id="0" * 32, created_at=1.0)
    body = asked(dialect)
    reply = ADAPTERS[dialect].reply(given, ADAPTERS[dialect].lower(body), body)
    assert REFUSED_BY[dialect](reply) == "I will not."
    assert b"I will not." in b"".join(ADAPTERS[dialect].events(reply))
    echoed(dialect, given)


def test_refusal_comes_back_from_a_harness_that_sends_an_empty_text_beside_it() -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "refusal": "I will not."}]
    lowered = ADAPTERS[Dialect.CHAT].lower({"messages": history})
    assert lowered.messages[1]["content"] == "I will not."


@pytest.mark.parametrize("dialect", [*Dialect])
def test_raising_an_answer_twice_gives_the_same_bytes(dialect: Dialect) -> None:
    adapter, body = ADAPTERS[dialect], asked(dialect)
    given = answer("so", {"type": "function", "function": {"name": "bash", "arguments": "{}"}}, reasoning="hmm")
    one, two = (adapter.reply(given, adapter.lower(body), body) for _ in range(2))
    assert one == two
    request = adapter.lower(body)
    assert b"".join(adapter.events(one, with_usage=request.stream_usage)) == b"".join(
        adapter.events(two, with_usage=request.stream_usage)
    )


@pytest.mark.parametrize("dialect", [*Dialect])
def test_text_that_is_no_unicode_is_delivered_as_unicode(dialect: Dialect) -> None:
    adapter, body = ADAPTERS[dialect], asked(dialect)
    request = adapter.lower(body)
    given = answer("a\ud800b \ud83d\ude42", call(1, "bash", '{"command": "\ud800"}'), reasoning="\udfff")
    reply = adapter.reply(given, request, body)
    assert "a\ufffdb 🙂".encode() in orjson.dumps(reply)
    assert "🙂".encode() in b"".join(adapter.events(reply, with_usage=request.stream_usage))
