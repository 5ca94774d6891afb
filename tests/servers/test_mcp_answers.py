"""Tools' names as harnesses spell them, and what a response shows of calls."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.environment.mcp.answers import answered_text, plain_name, tool_calls

TOOLS = ("get_weather", "list_cities")
ENV = "example_mcp_weather"


@pytest.mark.parametrize(
    "spelled",
    [
        "get_weather",
        "mcp__example_mcp_weather__get_weather",
        "example_mcp_weather_get_weather",
        "example_mcp_weather__get_weather",
        "example-mcp-weather.get_weather",
        "mcp.example_mcp_weather/get_weather",
    ],
)
def test_tool_is_recognized_however_a_harness_spells_it(spelled: str) -> None:
    assert plain_name(spelled, ENV, TOOLS) == "get_weather"


@pytest.mark.parametrize("spelled", ["bash", "mcp__other__get_weather", "get_weather_now", "forget_weather", ""])
def test_name_of_another_tool_is_none_of_the_environment_s(spelled: str) -> None:
    assert plain_name(spelled, ENV, TOOLS) is None


def test_calls_are_shown_with_their_outputs_in_their_order() -> None:
    output: list[Any] = [
        {"type": "function_call", "call_id": "1", "name": f"mcp__{ENV}__list_cities", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "Oslo"},
        {"type": "mcp_call", "name": "get_weather", "arguments": '{"city":"Oslo"}', "output": "snow"},
        {"type": "function_call", "call_id": "3", "name": "get_weather", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Snow."}]},
    ]
    calls = tool_calls({"output": output}, ENV, TOOLS)
    assert [(call.name, call.output) for call in calls] == [
        ("list_cities", "Oslo"),
        ("get_weather", "snow"),
        ("get_weather", None),
    ]
    assert answered_text({"output": output}) == "Snow."
    assert tool_calls({}, ENV, TOOLS) == [] and answered_text({}) == ""
