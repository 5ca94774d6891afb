"""Whatever JSON object comes in: a request, or an `InvalidBodyError` that names the field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.errors import error_body
from nemo_gym.gateway.engines.types import pinned_sampling
from nemo_gym.gateway.policy_request import PolicyRequest
from nemo_gym.gateway.tokens.history import entries_of, tools_digest
from tests.gateway.dialects.bodies import answer, call, chat_body, claude_body, codex_body
from tests.properties import examples

_WORDS = """
type role content text name input arguments output tools messages system user assistant tool
developer id call_id function custom namespace local_shell tool_use tool_result thinking image
source base64 url media_type data image_url input_image summary action command reasoning message
function_call function_call_output custom_tool_call tool_calls tool_call_id tool_use_id format
grammar schema input_schema tool_reference tool_name document
"""
WORDS = st.sampled_from(_WORDS.split())
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5), max_leaves=20
)
_FIELDS = """
messages input system instructions tools tool_choice max_tokens max_output_tokens temperature top_p
top_k stop stop_sequences stream stream_options response_format text reasoning thinking
output_config output_format n best_of logprobs top_logprobs include metadata logit_bias functions
return_token_ids modalities parallel_tool_calls mcp_servers background max_completion_tokens seed
"""
FIELDS = st.sampled_from(_FIELDS.split())
WHOLE = {Dialect.CHAT: chat_body(), Dialect.MESSAGES: claude_body(), Dialect.RESPONSES: codex_body()}
HISTORY: dict[Dialect, list[Any]] = {
    Dialect.CHAT: [
        {"role": "assistant", "content": None, "tool_calls": [call(1, "bash", "{}")], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "x"}]},
    ],
    Dialect.MESSAGES: [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "is_error": True,
                    "content": [{"type": "tool_reference", "tool_name": "mcp__weather__get"}],
                }
            ],
        },
    ],
    Dialect.RESPONSES: [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "e"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "get_weather",
            "namespace": "mcp__weather",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "local_shell_call", "call_id": "d", "action": {"type": "exec", "command": ["ls"]}},
    ],
}


def check(dialect: Dialect, body: dict[str, Any]) -> None:
    """Lower; what is lowered can be sampled from, answered and compared."""
    adapter = ADAPTERS[dialect]
    try:
        request = adapter.lower(body)
        assert isinstance(request, PolicyRequest)
        pinned_sampling(request.asked, {}, room_tokens=100)
    except InvalidBodyError as error:
        status, said = error_body(dialect, error)
        assert status == 400 and said["error"]["message"]
        return
    assert request.messages
    entries_of(request.messages)
    tools_digest(request.tools)
    given = answer("a", call(1, "apply_patch", "[1]"), call(2, "bash", "{}"), call(3, "local_shell", '{"command":[]}'))
    assert b"".join(adapter.events(adapter.reply(given, request, body), with_usage=request.stream_usage))
    adapter.opening("0" * 32, 1.0, "m", body)


@pytest.mark.parametrize("dialect", [*Dialect])
@examples(300)
@given(body=st.dictionaries(FIELDS | st.text(max_size=5), ANYTHING, max_size=6))
def test_any_object_is_lowered_or_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    check(dialect, body)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*found, *(one for key, item in inner for one in places(item, (*path, key)))]


@pytest.mark.parametrize("dialect", [*Dialect])
@examples(500)
@given(data=st.data())
def test_real_request_with_one_field_changed_is_lowered_or_refused(dialect: Dialect, data: st.DataObject) -> None:
    body: Any = orjson.loads(orjson.dumps(WHOLE[dialect]))
    body["input" if dialect is Dialect.RESPONSES else "messages"] += orjson.loads(orjson.dumps(HISTORY[dialect]))
    *path, last = data.draw(st.sampled_from(places(body)))
    inside = body
    for key in path:
        inside = inside[key]
    if data.draw(st.booleans()):
        inside[last] = data.draw(ANYTHING)
    else:
        del inside[last]
    check(dialect, body)


@pytest.mark.parametrize("dialect", [*Dialect])
def test_arguments_nested_beyond_json_writers_are_refused(dialect: Dialect) -> None:
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    bodies: dict[Dialect, dict[str, Any]] = {
        Dialect.CHAT: {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]
        },
        Dialect.MESSAGES: {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": deep}]}
            ]
        },
        Dialect.RESPONSES: {
            "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": deep}],
        },
    }
    with pytest.raises(InvalidBodyError, match="nested too deeply"):
        ADAPTERS[dialect].lower(bodies[dialect])
