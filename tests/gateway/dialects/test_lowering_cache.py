"""Lowering with a cache of earlier requests gives what lowering afresh gives, and touches only what is new."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.chat import ConversationCache
from nemo_gym.gateway.policy_request import PolicyRequest
from tests.gateway.dialects.bodies import call, chat_body, claude_body, codex_body
from tests.properties import examples

BODIES = {Dialect.CHAT: chat_body(), Dialect.MESSAGES: claude_body(), Dialect.RESPONSES: codex_body()}
KEYS = {Dialect.CHAT: "messages", Dialect.MESSAGES: "messages", Dialect.RESPONSES: "input"}
_CACHED = {"cache_control": {"type": "ephemeral"}}
ELEMENTS: dict[Dialect, list[dict[str, Any]]] = {
    Dialect.CHAT: [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "b", "tool_calls": [call(1, "bash", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]},
        {"role": "robot"},
    ],
    Dialect.MESSAGES: [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", **_CACHED}]},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "mcp__weather__get"}],
                },
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "robot"},
    ],
    Dialect.RESPONSES: [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "message", "role": "developer", "content": "s"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "namespace": "n_", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "hologram"},
    ],
}


def lowered(dialect: Dialect, body: dict[str, Any], cache: ConversationCache | None) -> Any:
    try:
        return ADAPTERS[dialect].lower(orjson.loads(orjson.dumps(body)), cache)
    except InvalidBodyError as error:
        return error.details["param"]


@pytest.mark.parametrize("dialect", [*Dialect])
@examples(200)
@given(data=st.data())
def test_remembered_histories_change_no_request(dialect: Dialect, data: st.DataObject) -> None:
    cache, key, body = ConversationCache(), KEYS[dialect], BODIES[dialect]
    *good, bad = ELEMENTS[dialect]
    element = st.one_of(*[st.sampled_from(good)] * 9, st.just(bad))
    history: list[dict[str, Any]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        kept = data.draw(st.integers(0, len(history))) if data.draw(st.booleans()) else len(history)
        history = [*history[:kept], *data.draw(st.lists(element, max_size=5))]
        tools = body["tools"] if data.draw(st.integers(0, 5)) else body["tools"][:1]
        asked = {**body, "tools": tools, key: [*body[key], *history]}
        assert lowered(dialect, asked, cache) == lowered(dialect, asked, None)


@pytest.mark.parametrize("dialect", [*Dialect])
def test_messages_lowered_before_are_the_same_objects(dialect: Dialect) -> None:
    cache, key, body = ConversationCache(), KEYS[dialect], BODIES[dialect]
    history = ELEMENTS[dialect][:-1] * 50
    first = lowered(dialect, {**body, key: [*body[key], *history]}, cache)
    second = lowered(dialect, {**body, key: [*body[key], *history, ELEMENTS[dialect][0]]}, cache)
    same = sum(one is other for one, other in zip(first.messages, second.messages, strict=False))
    assert same >= len(first.messages) - 3


@pytest.mark.parametrize("dialect", [*Dialect])
def test_conversations_side_by_side_are_all_remembered(dialect: Dialect) -> None:
    cache, key, body = ConversationCache(), KEYS[dialect], BODIES[dialect]
    histories = [[{"role": "user", "content": f"agent {number}"}, *ELEMENTS[dialect][:-1] * 20] for number in range(3)]
    first = [lowered(dialect, {**body, key: history}, cache) for history in histories]
    for before, history in zip(first, histories, strict=True):
        after = lowered(dialect, {**body, key: [*history, ELEMENTS[dialect][0]]}, cache)
        assert sum(one is other for one, other in zip(before.messages, after.messages, strict=False)) > 15


@pytest.mark.parametrize("dialect", [*Dialect])
def test_history_of_alternating_tools_is_remembered_with_each(dialect: Dialect) -> None:
    cache, key, body = ConversationCache(), KEYS[dialect], BODIES[dialect]
    history = [{"role": "user", "content": "x" * 300_000}, *ELEMENTS[dialect][:-1] * 20]  # only one body is kept
    rest = {name: value for name, value in body.items() if name not in ("tools", key)}
    before: dict[int, Any] = {}
    for turn in range(6):
        history = [*history, *ELEMENTS[dialect][:-1] * 2]
        asked = {"tools": body["tools"][turn % 2 :]}  # first, so that no body begins like one with the other tools
        raw = orjson.dumps({**asked, **rest, key: history})
        found = ADAPTERS[dialect].lower(cache.parse(raw), cache)
        assert found == ADAPTERS[dialect].lower(orjson.loads(raw))
        if turn % 2 in before:
            messages = before[turn % 2].messages
            assert sum(one is other for one, other in zip(messages, found.messages, strict=False)) > 15
        before[turn % 2] = found


def test_tools_are_lowered_anew_when_they_are_others_however_alike() -> None:
    cache, adapter = ConversationCache(), ADAPTERS[Dialect.CHAT]
    for default in (1, 1.0, True, "1", 1):
        parameters = {"type": "object", "properties": {"a": {"default": default}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        body = {**BODIES[Dialect.CHAT], "tools": tools}
        found, fresh = adapter.lower(body, cache), adapter.lower(body)
        assert repr(found.tools) == repr(fresh.tools)
        assert found.names == fresh.names
        assert adapter.lower(orjson.loads(orjson.dumps(body)), cache).tools is found.tools


def test_parameters_are_lowered_anew_when_they_are_others_however_alike() -> None:
    cache, adapter = ConversationCache(), ADAPTERS[Dialect.CHAT]
    tools = BODIES[Dialect.CHAT]["tools"]
    for told in ({"seed": 1, "top_k": 2}, {"seed": 2, "top_k": 1}, {"top_k": 2, "seed": 1}, {"seed": 1.0}, {}):
        body = {"messages": BODIES[Dialect.CHAT]["messages"], "tools": tools, **told}
        assert adapter.lower(body, cache) == adapter.lower(body)
        assert adapter.lower(dict(body), cache).asked is adapter.lower(dict(body), cache).asked
        with pytest.raises(InvalidBodyError, match="seed"):
            adapter.lower({**body, "seed": True}, cache)


@pytest.mark.parametrize("dialect", [*Dialect])
def test_parameters_of_the_same_objects_are_lowered_once(dialect: Dialect) -> None:
    cache, adapter, body = ConversationCache(), ADAPTERS[dialect], BODIES[dialect]
    first = adapter.lower(dict(body), cache)
    for other in Dialect:  # a cache may serve several
        if other is not dialect:
            assert ADAPTERS[other].lower(dict(BODIES[other]), cache) == ADAPTERS[other].lower(dict(BODIES[other]))
    assert adapter.lower(dict(body), cache) == first == adapter.lower(dict(body))
    again, once_more = adapter.lower(dict(body), cache), adapter.lower(dict(body), cache)
    assert again.tools is once_more.tools and again.asked is once_more.asked


def test_equal_parameters_of_another_dialect_are_lowered_in_it() -> None:
    cache = ConversationCache()
    asked = {"max_tokens": 5, "tools": None, "messages": [{"role": "user", "content": "x"}], "stop": ["a"]}
    for dialect in (Dialect.CHAT, Dialect.MESSAGES, Dialect.CHAT):
        assert ADAPTERS[dialect].lower(dict(asked), cache) == ADAPTERS[dialect].lower(dict(asked))


def test_a_request_about_other_messages_has_all_else_as_it_was() -> None:
    differing = {field.name: object() for field in fields(PolicyRequest)}
    request = PolicyRequest(**differing)  # type: ignore[arg-type]
    other = [{"role": "user", "content": "x"}]
    assert request.asking(other) == replace(request, messages=other)
