"""Requests to and replies of endpoints that speak one dialect only, in the words of another."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import messages as messages_chat
from nemo_gym.gateway.dialects import responses as responses_chat
from tests.gateway.dialects.bodies import IMAGE_PART, PIXEL_URL, SCHEMA, call, chat_body, claude_body, codex_body


def completion(**message: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "choices": [{"message": {"role": "assistant", **message}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


def test_chat_request_becomes_a_responses_request() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}
    body = chat_body(
        messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE_PART]}],
        response_format=form,
        tool_choice={"type": "function", "function": {"name": "bash"}},
        reasoning_effort="low",
    )
    request = responses_chat.responses_request(body)
    assert request["input"] == [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": PIXEL_URL, "detail": "auto"},
            ],
        }
    ]
    assert request["text"] == {"format": {"type": "json_schema", "name": "o", "schema": SCHEMA}}
    assert request["tool_choice"] == {"type": "function", "name": "bash"}
    assert (request["max_output_tokens"], request["reasoning"]) == (32000, {"effort": "low"})
    assert request["tools"][0]["name"] == "bash"


@pytest.mark.parametrize("broken", [{"tools": [{"type": "function"}]}, {"messages": [{"role": "tool"}, 3]}, {"n": 2}])
def test_malformed_request_is_refused_before_it_is_translated(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidBodyError):
        responses_chat.responses_request({**chat_body(), **broken})


def test_codexs_tools_survive_an_endpoint_that_has_chat_only() -> None:
    body = codex_body()
    sent = responses_chat.chat_request(body)
    assert [tool["function"]["name"] for tool in sent["tools"]][-1] == "mcp__weather__get_weather"
    assert sent["stream_options"] == {"include_usage": True} and sent["model"] == "policy"
    reply = completion(
        content=None,
        tool_calls=[call(1, "mcp__weather__get_weather", "{}"), call(2, "apply_patch", '{"input":"*** Begin"}')],
    )
    output = responses_chat.response_of_completion(reply, body)["output"]
    assert [(item["type"], item["name"]) for item in output] == [
        ("function_call", "get_weather"),
        ("custom_tool_call", "apply_patch"),
    ]
    assert output[0]["namespace"] == "mcp__weather"


def test_claude_codes_request_survives_an_endpoint_that_has_chat_only() -> None:
    sent = messages_chat.chat_request(claude_body())
    # The endpoint has to know every tool that may be called, also those that the conversation defines.
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["Bash", "ToolSearch", "mcp__weather__get"]
    assert sent["max_tokens"] == 128000 and "context_management" not in sent
    reply = messages_chat.message_of_completion(completion(content="so", reasoning="hmm"), claude_body())
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]


THOUGHT = [{"type": "text", "text": "hm"}, {"type": "text", "text": "m"}]


@pytest.mark.parametrize(
    ("parts", "fields", "thinking"),
    [
        ([{"type": "thinking", "thinking": THOUGHT, "closed": True}], {}, "hmm"),
        ([{"type": "reasoning", "text": "hmm"}], {}, "hmm"),
        ([{"type": "thinking", "thinking": "hmm"}], {"reasoning_content": "given"}, "given"),
    ],
)
def test_content_in_parts_is_read_as_text_and_reasoning(
    parts: list[dict[str, Any]], fields: dict[str, Any], thinking: str
) -> None:
    content = [*parts, {"type": "text", "text": "so "}, {"type": "output_text", "text": "it is"}]
    reply = messages_chat.message_of_completion(completion(content=content, **fields), claude_body())
    assert [block.get("thinking", block.get("text")) for block in reply["content"]] == [thinking, "so it is"]


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": PIXEL_URL}}], ["so"], {"text": "so"}])
def test_content_that_is_no_text_is_no_answer(content: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="content"):
        messages_chat.message_of_completion(completion(content=content), claude_body())


def test_response_becomes_a_completion() -> None:
    made = responses_chat.completion_of_response(
        {
            "model": "m",
            "created_at": 5,
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hmm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "web_search_call", "id": "w"},
            ],
            "usage": {"input_tokens": 3, "output_tokens": 2},
        }
    )
    message = made["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("so", "hmm")
    assert message["tool_calls"][0]["id"] == "c" and made["choices"][0]["finish_reason"] == "tool_calls"
    assert made["usage"]["total_tokens"] == 5
