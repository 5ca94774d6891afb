"""Chat Completions requests as opencode, qwen-code, mini-swe-agent and OpenAI's SDK send them."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_gym.contract.errors import InvalidBodyError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.adapters import ADAPTERS
from nemo_gym.gateway.dialects.endpoint import answer_of_completion, chat_body
from nemo_gym.gateway.policy_request import AnswerEnd, PolicyRequest
from tests.gateway.dialects.bodies import IMAGE_PART, PIXEL_URL, SCHEMA, call
from tests.gateway.dialects.bodies import chat_body as cli_body

USER = {"role": "user", "content": "q"}
ADAPTER = ADAPTERS[Dialect.CHAT]


def lower(**fields: Any) -> PolicyRequest:
    return ADAPTER.lower({"messages": [USER], **fields})


def refusal(**fields: Any) -> InvalidBodyError:
    with pytest.raises(InvalidBodyError) as caught:
        lower(**fields)
    return caught.value


def test_a_clis_request_is_understood() -> None:
    request = ADAPTER.lower(cli_body(temperature=0.5, chat_template_kwargs={"a": 1}, user="u"))
    assert [*request.messages] == [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "list the files"},
    ]
    function = {"name": "bash", "description": "Run a command.", "parameters": SCHEMA}
    assert [*(request.tools or ())] == [{"type": "function", "function": function}]
    assert request.stream and request.stream_usage
    assert request.asked == {"temperature": 0.5, "max_tokens": 32000}
    assert request.extra == {"chat_template_kwargs": {"a": 1}, "user": "u"}


def test_history_with_reasoning_parallel_calls_and_images_is_understood() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "system", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE_PART]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hmm",
            "tool_calls": [call(1, "bash", '{"a":1}'), {"id": "c2", "function": {"name": "bash", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "bash", "content": [IMAGE_PART]},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
    ]
    assert [*lower(messages=messages).messages] == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE_PART]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hmm",
            "tool_calls": [call(1, "bash", '{"a":1}'), {**call(1, "bash", "{}"), "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [IMAGE_PART]},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
    ]


def test_image_is_taken_in_either_spelling() -> None:
    parts = [{"type": "image_url", "image_url": PIXEL_URL}, {"type": "input_image", "image_url": PIXEL_URL}]
    message = lower(messages=[{"role": "user", "content": parts}]).messages[0]
    assert message["content"] == [IMAGE_PART, IMAGE_PART]


def test_newer_name_of_the_budget_wins() -> None:
    assert lower(max_tokens=5, max_completion_tokens=7).asked == {"max_tokens": 7}


def test_parameters_of_sampling_are_read() -> None:
    given = {"temperature": 0, "top_p": 0.5, "top_k": 3.0, "min_p": 0.1, "seed": 4, "presence_penalty": 1}
    assert lower(**given, stop="END").asked == {**given, "stop": ["END"]}
    assert lower(stop=["a", "b"], temperature=None).asked == {"stop": ["a", "b"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/x"}}]}]}, None),
        ({"messages": [{"role": "system", "content": [IMAGE_PART]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [IMAGE_PART]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, None),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ],
)
def test_what_cannot_be_served_is_named(fields: dict[str, Any], param: str | None) -> None:
    error = refusal(**fields)
    assert error.details["param"] == param or (param is None and error.details["param"].startswith("messages.0"))
    assert f"'{error.details['param']}'" in error.message


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    request = lower(n=1, logit_bias={}, functions=None, modalities=["text"], store=True, metadata={}, audio=None)
    assert request.extra == {} and request.tools is None


def test_request_to_an_endpoint_says_the_same_again() -> None:
    body = cli_body(
        temperature=0.5,
        user="u",
        logprobs=True,
        top_logprobs=2,
        tool_choice={"type": "function", "function": {"name": "bash"}},
        response_format={"type": "json_object"},
        stop=["END"],
    )
    request = ADAPTER.lower(body)
    sent = chat_body(request)
    assert ADAPTER.lower(sent) == ADAPTER.lower({key: body[key] for key in body if not key.startswith("stream")})
    assert sent["top_logprobs"] == 2 and "stream" not in sent and "model" not in sent


def test_answer_of_an_endpoint_is_read_with_its_logprobs() -> None:
    completion = {
        "model": "big",
        "choices": [
            {
                "message": {"content": None, "tool_calls": [call(1, "f", "{}")], "reasoning": "hmm"},
                "finish_reason": "stop",
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    made = answer_of_completion(completion, answer_id="0" * 32, created_at=1.0)
    assert made.end is AnswerEnd.TOOL_CALLS and made.message["reasoning_content"] == "hmm"
    assert made.usage.cached_tokens == 1 and made.model == "big"
    assert made.tokens is not None and made.tokens.texts == ["a"] and made.tokens.logprobs == [-0.5]
    reply = ADAPTER.reply(made, lower(logprobs=True, return_token_ids=True), {})
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "a"
    assert "generation_token_ids" not in reply["choices"][0]["message"]


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [None]}, {"choices": [{"message": "x"}]}])
def test_what_is_no_completion_is_told_from_one(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, IndexError, TypeError, ValueError)):
        answer_of_completion(broken, answer_id="0" * 32, created_at=1.0)


def test_many_tools_are_read_by_as_much_work_as_there_are_tools() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, str(other))

    count = 300
    request = lower(tools=[{"type": "function", "function": {"name": Name(f"tool{at}")}} for at in range(count)])
    assert len([*(request.tools or ())]) == count
    assert compared < 3 * count
