"""Messages requests as Claude Code and Anthropic's SDK send them, as the policy sees them."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.policy_request import PolicyRequest
from tests.gateway.dialects.bodies import IMAGE_PART, PIXEL, SCHEMA, claude_body

USER = {"role": "user", "content": "q"}


def lower(**fields: Any) -> PolicyRequest:
    return ADAPTERS[Dialect.MESSAGES].lower({"max_tokens": 9, "messages": [USER], **fields})


def refusal(**fields: Any) -> InvalidBodyError:
    with pytest.raises(InvalidBodyError) as caught:
        lower(**fields)
    return caught.value


def image(data: str = PIXEL) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_claude_codes_newest_shape_is_understood() -> None:
    request = ADAPTERS[Dialect.MESSAGES].lower(claude_body())
    assert [*request.messages] == [
        {"role": "system", "content": "You are a Claude agent.\nWork in /repo."},
        {"role": "user", "content": "<system-reminder>today</system-reminder>\nfix it"},
        {"role": "system", "content": "ToolSearch finds: mcp__weather__get"},
    ]
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["Bash", "ToolSearch"]
    assert request.stream and request.reasoning and request.asked == {"max_tokens": 128000}
    assert request.extra == {"reasoning_effort": "high"}


def test_system_message_as_blocks_stays_in_its_place() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    messages = lower(messages=[USER, {"role": "system", "content": blocks}, USER]).messages
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "q"),
        ("system", "a\nb"),
        ("user", "q"),
    ]


def test_billing_header_is_not_shown_and_does_not_change_the_request() -> None:
    one, two = claude_body(), claude_body()
    two["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.329; cch=other;"
    adapter = ADAPTERS[Dialect.MESSAGES]
    assert adapter.lower(one).messages == adapter.lower(two).messages


def test_deferred_tool_is_defined_where_it_was_found_and_the_tools_stay_the_same() -> None:
    found = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "mcp__weather__get"}],
                }
            ],
        },
    ]
    adapter, body = ADAPTERS[Dialect.MESSAGES], claude_body()
    before = adapter.lower(body)
    after = adapter.lower({**body, "messages": [*body["messages"], *found]})
    assert after.tools == before.tools
    assert after.messages[-1]["role"] == "tool"
    assert '"name":"mcp__weather__get"' in after.messages[-1]["content"]
    assert '"required":["command"]' in after.messages[-1]["content"]
    assert [tool["function"]["name"] for tool in after.deferred] == ["mcp__weather__get"]


def test_deferred_tools_are_shown_when_only_the_api_could_search_for_them() -> None:
    deferred = {"name": "a", "input_schema": SCHEMA, "defer_loading": True}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    request = lower(tools=[search, deferred])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["a"] and not request.deferred


def test_answer_with_thinking_text_and_calls_is_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hmm", "signature": "anything"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "t2", "name": "Bash", "input": {}, "caller": {"type": "direct"}},
    ]
    message = lower(messages=[USER, {"role": "assistant", "content": blocks}, USER]).messages[1]
    assert message == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hmm",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "Bash", "arguments": '{"command":"ls"}'}},
            {"id": "t2", "type": "function", "function": {"name": "Bash", "arguments": "{}"}},
        ],
    }


def test_results_come_first_each_with_its_own_images() -> None:
    content = [
        {"type": "text", "text": "look"},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}, image()]},
        {"type": "tool_result", "tool_use_id": "t2", "content": "", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
        {"type": "image", "source": {"type": "url", "url": "https://host.example/a.png"}},
    ]
    assert [*lower(messages=[{"role": "user", "content": content}]).messages] == [
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "a"}, IMAGE_PART]},
        {"role": "tool", "tool_call_id": "t2", "content": "error"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "https://host.example/a.png"}},
            ],
        },
    ]


def test_text_document_is_its_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "title": "notes", "source": source}
    assert lower(messages=[{"role": "user", "content": [document]}]).messages[0]["content"] == "notes\nbody"


@pytest.mark.parametrize(
    ("block", "param", "named"),
    [
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
            "messages.0.content.0",
            "document",
        ),
        ({"type": "server_tool_use", "id": "s"}, "messages.0.content.0.type", "server_tool_use"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages.0.content.0.source.type", "file"),
        ({"type": "text", "text": 3}, "messages.0.content.0.text", "string"),
    ],
)
def test_content_that_cannot_be_shown_is_refused_by_name(block: dict[str, Any], param: str, named: str) -> None:
    error = refusal(messages=[{"role": "user", "content": [block]}])
    assert error.details["param"] == param and named in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [], "system": [{"type": "image"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "robot", "content": "x"}], "system": [{"type": "image"}]}, "system.0.type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"n": 2}, "n"),
        ({"mcp_servers": [{"url": "https://host.example"}]}, "mcp_servers"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [{"name": "a"}, {"name": "a"}]}, "tools.1.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_field_that_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).details["param"] == param


def test_fields_that_change_nothing_are_accepted() -> None:
    request = lower(
        metadata={"user_id": "u"},
        context_management={"edits": []},
        service_tier="auto",
        betas=["x"],
        some_future_field={"a": 1},
        container=None,
        mcp_servers=[],
    )
    assert not request.extra and not request.reasoning


@pytest.mark.parametrize(
    ("choice", "lowered"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "a"}, {"name": "a"}),
    ],
)
def test_tool_choice_is_understood(choice: dict[str, Any], lowered: Any) -> None:
    request = lower(tools=[{"name": "a"}], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert request.tool_choice == lowered
    assert request.extra == {"parallel_tool_calls": False}


def test_schema_for_the_answer_is_its_format() -> None:
    request = lower(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
    }
