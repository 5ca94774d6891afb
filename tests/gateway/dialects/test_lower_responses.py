"""Responses requests as Codex and OpenAI's SDK send them, and the policy's calls as Codex knows them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import Dialect, apply_sampling
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.chat import request_fingerprint
from nemo_gym.gateway.policy_request import CallName, PolicyRequest
from tests.gateway.dialects.bodies import IMAGE_PART, PIXEL_URL, SCHEMA, answer, call, codex_body

ADAPTER = ADAPTERS[Dialect.RESPONSES]


def lower(**fields: Any) -> PolicyRequest:
    return ADAPTER.lower({"input": "q", **fields})


def refusal(**fields: Any) -> InvalidBodyError:
    with pytest.raises(InvalidBodyError) as caught:
        lower(**fields)
    return caught.value


def test_codexs_shape_is_understood() -> None:
    request = ADAPTER.lower(codex_body())
    assert [*request.messages] == [
        {"role": "system", "content": "You are Codex.\n\nBe brief."},
        {"role": "user", "content": "fix it"},
    ]
    assert [tool["function"]["name"] for tool in request.tools or ()] == [
        "exec_command",
        "apply_patch",
        "local_shell",
        "mcp__weather__get_weather",
    ]
    assert request.names == {
        "apply_patch": CallName("apply_patch", custom=True),
        "local_shell": CallName("local_shell", local_shell=True),
        "mcp__weather__get_weather": CallName("get_weather", "mcp__weather"),
    }
    patch = (request.tools or ())[1]["function"]
    assert "lark" in patch["description"] and [*patch["parameters"]["properties"]] == ["input"]
    assert request.stream and request.extra == {
        "parallel_tool_calls": True,
        "reasoning_effort": "medium",
        "store": False,
    }


def test_calls_go_back_as_codex_names_them() -> None:
    body = codex_body()
    request = ADAPTER.lower(body)
    given = answer(
        None,
        call(1, "mcp__weather__get_weather", '{"command":"x"}'),
        call(2, "apply_patch", '{"input":"*** Begin"}'),
        call(3, "local_shell", '{"command":["ls"],"timeout_ms":5}'),
        call(4, "exec_command", "{}"),
    )
    output = ADAPTER.reply(given, request, body)["output"]
    assert [(item["type"], item.get("namespace"), item.get("name")) for item in output] == [
        ("function_call", "mcp__weather", "get_weather"),
        ("custom_tool_call", None, "apply_patch"),
        ("local_shell_call", None, None),
        ("function_call", None, "exec_command"),
    ]
    assert output[1]["input"] == "*** Begin"
    assert output[2]["action"] == {"type": "exec", "env": {}, "command": ["ls"], "timeout_ms": 5}
    assert len({item["id"] for item in output}) == 4


def test_call_with_a_namespace_lowers_to_its_flat_name_even_when_the_tool_is_gone() -> None:
    used = {"type": "function_call", "call_id": "c", "name": "get_weather", "namespace": "mcp__weather"}
    body = codex_body({**used, "arguments": "{}"})
    assert ADAPTER.lower(body).messages[-1]["tool_calls"][0]["function"]["name"] == "mcp__weather__get_weather"
    names = [ADAPTER.lower({**body, "tools": tools}).messages[-1] for tools in (body["tools"], [])]
    assert names[0] == names[1]


def test_flat_names_stay_unique_when_namespaces_collide() -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": SCHEMA}

    request = lower(
        tools=[
            {"type": "namespace", "name": "a", "tools": [tool("b"), tool("c d")]},
            tool("a__b"),
            {"type": "namespace", "name": "a_", "tools": [tool("b")]},
        ]
    )
    names = [entry["function"]["name"] for entry in request.tools or ()]
    assert len({*names}) == 4 and names[0] == "a__b"
    assert {(request.names[name].namespace, request.names[name].name) for name in names[1:]} == {
        ("a", "b"),
        ("a", "c d"),
        ("a_", "b"),
    }


def test_items_of_one_answer_are_one_message_and_outputs_keep_their_images() -> None:
    history = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hmm"}],
            "content": None,
            "encrypted_content": "opaque",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "exec_command", "arguments": '{"command":"ls"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PIXEL_URL}],
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL_URL, "detail": "high"}]},
    ]
    high = {"type": "image_url", "image_url": {"url": PIXEL_URL, "detail": "high"}}
    assert [*ADAPTER.lower(codex_body(*history)).messages][2:] == [
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hmm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "exec_command", "arguments": '{"command":"ls"}'},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "apply_patch", "arguments": '{"input":"*** Begin"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, IMAGE_PART]},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "user", "content": [high]},
    ]


def test_developer_item_amid_the_conversation_stays_in_its_place() -> None:
    later = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "now this"}]}
    assert ADAPTER.lower(codex_body(later)).messages[-1] == {"role": "system", "content": "now this"}


def test_instructions_come_first() -> None:
    assert [*lower(instructions="be kind").messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "q"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).details["param"] == param


@pytest.mark.parametrize("depth", [200, 246, 250, 252, 254, 300, 1000])
def test_what_is_accepted_can_be_repeated_in_the_answer_however_deep_it_is(depth: int) -> None:
    deep = orjson.loads(b"[" * depth + b"]" * depth)
    function = {"type": "function", "name": "f", "parameters": {"a": deep}}
    for fields in (
        {"metadata": deep},
        {"instructions": deep},
        {"parallel_tool_calls": deep},
        {"reasoning": {"effort": "low", "summary": deep}},
        {"text": {"format": {"type": "text", "more": deep}}},
        {"tool_choice": {"type": "function", "name": "f", "more": deep}, "tools": [{**function, "parameters": None}]},
        {"tools": [function]},
        {"tools": [{**function, "type": "custom", "format": {"grammar": {"definition": "x", "syntax": deep}}}]},
    ):
        body: dict[str, Any] = {"input": "q", **fields}
        try:
            request = ADAPTER.lower(body)
        except InvalidBodyError:
            assert depth > 200 or "metadata" not in fields
            continue
        reply = ADAPTER.reply(answer(), request, body)
        orjson.dumps(reply)
        assert b"".join(ADAPTER.events(reply, with_usage=request.stream_usage))


def test_fields_that_change_nothing_are_accepted() -> None:
    request = lower(
        truncation="auto",
        prompt_cache_key="k",
        client_metadata={"a": "b"},
        background=False,
        previous_response_id=None,
        some_future_field=[1],
        parallel_tool_calls=False,
        tools=[{"type": "web_search"}, {"type": "image_generation"}],
    )
    assert request.extra == {} and request.tools is None


def test_format_choice_and_logprobs_are_understood() -> None:
    form = {"type": "json_schema", "name": "o", "schema": SCHEMA, "strict": True}
    request = lower(
        text={"format": form, "verbosity": "low"},
        tools=[{"type": "function", "name": "f"}],
        tool_choice={"type": "function", "name": "f"},
        top_logprobs=3,
    )
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "o", "schema": SCHEMA, "strict": True},
    }
    assert request.tool_choice == {"name": "f"} and request.logprobs
    assert lower(include=["message.output_text.logprobs"]).logprobs and not lower().logprobs
    assert lower(text={"format": {"type": "text"}}).response_format is None


def test_opening_is_what_the_stream_begins_with() -> None:
    body = codex_body()
    request = ADAPTER.lower(body)
    given = answer("a")
    opening = ADAPTER.opening(given.answer_id, given.created_at, given.model, body)
    first = next(ADAPTER.events(ADAPTER.reply(given, request, body), with_usage=request.stream_usage))
    assert orjson.loads(first.split(b"data: ")[1])["response"] == opening
    assert opening is not None and opening["status"] == "in_progress" and opening["output"] == []


def test_parameters_in_metadata_are_parameters_and_the_requests_own_win() -> None:
    metadata = {
        "chat_template_kwargs": '{"enable_thinking": false}',
        "extra_body": '{"top_k": 5, "temperature": 1, "thinking": {}, "messages": [], "model": "other"}',
    }
    request = lower(temperature=0, metadata={**metadata, "note": "kept"})
    assert request.asked == {"temperature": 0, "top_k": 5}
    assert request.extra == {
        "chat_template_kwargs": {"enable_thinking": False},
        "thinking": {},
        "metadata": {"note": "kept"},
    }
    assert "metadata" not in lower(metadata=metadata).extra
    shape = lower(
        metadata={"extra_body": '{"response_format": {"type": "json_object"}, "logprobs": true, "stream": true}'}
    )
    assert (shape.response_format, shape.logprobs, shape.stream) == ({"type": "json_object"}, True, False)


def test_parameters_in_metadata_are_part_of_the_request() -> None:
    asked = [{"input": "hi", "metadata": {"extra_body": f'{{"seed": {seed}}}'}} for seed in (1, 2)]
    first, second = (request_fingerprint("/v1/responses", body) for body in asked)
    assert first != second
    noted = request_fingerprint("/v1/responses", {"input": "hi", "metadata": {"note": "x"}})
    assert noted == request_fingerprint("/v1/responses", {"input": "hi"})


@pytest.mark.parametrize("pinned", [{"temperature": 1.0, "max_output_tokens": 256}, {"temperature": 1.0}, {"seed": 3}])
def test_parameters_in_metadata_escape_no_pinned_sampling(pinned: dict[str, Any]) -> None:
    hidden = '{"temperature": 0, "max_completion_tokens": 100000, "ignore_eos": true, "top_k": 5}'
    metadata = {"chat_template_kwargs": "{}", "extra_body": hidden}
    body = apply_sampling(Dialect.RESPONSES, {"input": "hi", "metadata": metadata}, pinned)
    left = orjson.loads(body["metadata"]["extra_body"])
    assert body["metadata"]["chat_template_kwargs"] == "{}"
    escapes = {"ignore_eos"} if "temperature" in pinned else set()
    escapes |= set(pinned) | ({"max_completion_tokens"} if "max_output_tokens" in pinned else set())
    assert escapes.isdisjoint(left) and left["top_k"] == 5


@pytest.mark.parametrize(
    ("key", "value", "param"),
    [
        ("extra_body", "{", "metadata.extra_body"),
        ("chat_template_kwargs", "[]", "metadata.chat_template_kwargs"),
        ("extra_body", '{"kv_transfer_params": {"host": "x"}}', "kv_transfer_params"),
    ],
)
def test_parameters_in_metadata_are_refused_where_they_are_no_parameters(key: str, value: str, param: str) -> None:
    assert param in str(refusal(metadata={key: value}))
