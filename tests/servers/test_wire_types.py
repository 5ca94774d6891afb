"""OpenAI's types as this suite reads them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from openai.types.shared import Reasoning
from pydantic import TypeAdapter, ValidationError

from nemo_gym import openai_utils as types
from nemo_gym.gateway.dialects import responses as responses_chat
from tests.servers.stack import response

ITEM: TypeAdapter[Any] = TypeAdapter(types.NeMoGymResponseInputItem)
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
TEXT = [{"type": "output_text", "text": "x", "annotations": []}]


def test_star_import_gives_the_suites_names_and_no_others() -> None:
    names: dict[str, Any] = {}
    exec("from nemo_gym.openai_utils import *", names)
    own = {name for name in names if name.startswith("NeMoGym")}
    assert names.keys() - own - {"__builtins__"} == {
        *("CHAT_REQUEST_PROVIDER_EXTENSION_FIELDS", "MAX_NUM_TRIES", "RATE_LIMIT_ERROR_CODES", "RESPONSES_TO_TRAIN"),
        *("REQUIRED_TOKEN_METADATA_FIELDS", "RETRY_ERROR_CODES", "RoutedExperts", "TOKEN_METADATA_FIELDS"),
        *("TokenIDLogProbMixin", "TokenIDLogProbTypedDictMixin", "accumulate_response_usage", "training_variant_of"),
    }
    assert len(own) == 74


def test_classes_carry_the_names_that_plugins_import_them_by() -> None:
    """Their schemas show these names."""
    named = [name for name, value in vars(types).items() if name.startswith("NeMoGym") and isinstance(value, type)]
    assert named and all(vars(types)[name].__name__ == name for name in named)
    tool = TypeAdapter(types.NeMoGymChatCompletionToolUnionParam).json_schema()
    assert {"NeMoGymChatCompletionToolParam", "NeMoGymFunctionDefinition"} <= tool["$defs"].keys()


@pytest.mark.parametrize(
    ("item", "member"),
    [
        ({"role": "user", "content": "x"}, "NeMoGymEasyInputMessage"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "NeMoGymEasyInputMessage"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "x"}], "status": "completed"},
            "NeMoGymMessage",
        ),
        ({"type": "message", "role": "assistant", "id": "m", "content": TEXT}, "NeMoGymResponseOutputMessage"),
        (
            {"type": "message", "role": "assistant", "id": "m", "content": TEXT, **TOKENS},
            "NeMoGymResponseOutputMessageForTraining",
        ),
        ({"role": "assistant", "content": "x"}, "NeMoGymEasyInputMessage"),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}, "NeMoGymEasyInputMessage"),
        ({"type": "message", "role": "assistant", "content": TEXT}, "NeMoGymEasyInputMessage"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            "NeMoGymEasyInputMessage",
        ),
        (
            # Tables hold null for what a message lacks.
            {"role": "assistant", "id": None, "content": [{"type": "output_text", "text": "x", "annotations": None}]},
            "NeMoGymEasyInputMessage",
        ),
        (
            {"role": "user", "id": None, "status": None, "content": [{"type": "input_text", "text": "x"}]},
            "NeMoGymEasyInputMessage",
        ),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, "NeMoGymResponseFunctionToolCall"),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **TOKENS},
            "NeMoGymResponseFunctionToolCallForTraining",
        ),
        ({"call_id": "c", "output": "x"}, "NeMoGymFunctionCallOutput"),
        ({"type": "reasoning", "id": "r", "summary": []}, "NeMoGymResponseReasoningItem"),
        ({"type": "mcp_call", "name": "n", "arguments": "{}", "status": "odd"}, "NeMoGymResponseMcpCall"),
    ],
)
def test_item_becomes_the_member_it_is_meant_to_be(item: dict[str, Any], member: str) -> None:
    read = ITEM.validate_python(item)
    assert type(read).__name__ == member
    assert ITEM.validate_python(read) is read
    again = ITEM.validate_json(ITEM.dump_json(read))
    assert again == read


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "telepathy"}, "not an item"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "arguments"),
        ({"role": "assistant", "content": "x", "prompt_token_ids": [1]}, "generation_log_probs"),
        ({"role": "user", "content": [{"type": "input_video"}]}, "exactly one"),
        ("text", "not an item"),
    ],
)
def test_wrong_item_is_refused_with_what_is_wrong(item: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ITEM.validate_python(item)


def test_output_item_needs_its_type() -> None:
    with pytest.raises(ValidationError, match="needs its 'type'"):
        types.NeMoGymResponse.model_validate(response() | {"output": [{"role": "assistant", "content": "x"}]})


def test_message_of_an_answer_needs_its_id_in_a_response_but_not_in_a_prompt() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
    asked = {"input": [message]}
    assert types.NeMoGymResponseCreateParamsNonStreaming.model_validate(asked).model_dump(exclude_unset=True) == asked
    with pytest.raises(ValidationError, match="needs its 'id'"):
        types.NeMoGymResponse.model_validate(response() | {"output": [message]})


@pytest.mark.parametrize("effort", ["none", "xhigh"])
def test_every_reasoning_effort_of_endpoints_is_known(effort: str) -> None:
    asked = {"input": "?", "reasoning": {"effort": effort}}
    assert types.NeMoGymResponseCreateParamsNonStreaming.model_validate(asked).model_dump(exclude_unset=True) == asked
    answered = types.NeMoGymResponse.model_validate(response() | {"reasoning": {"effort": effort, "summary": None}})
    assert answered.model_dump()["reasoning"]["effort"] == effort
    chat = {"messages": [{"role": "user", "content": "?"}], "reasoning_effort": effort}
    assert types.NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(chat).reasoning_effort == effort


def test_response_takes_openais_own_reasoning_object() -> None:
    answered = types.NeMoGymResponse(**response(), reasoning=Reasoning(effort="low"))
    assert answered.model_dump(exclude_unset=True)["reasoning"] == {"effort": "low"}


def test_request_parameters_of_newer_endpoints_are_known() -> None:
    asked = {"input": "?", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s"}
    asked |= {"conversation": "c", "moderation": {"model": "m"}, "context_management": [{"type": "compaction"}]}
    asked |= {"reasoning": {"context": "all_turns"}}
    assert types.NeMoGymResponseCreateParamsNonStreaming.model_validate(asked).model_dump(exclude_unset=True) == asked
    chat = {"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": {"enable_thinking": False}}
    read = types.NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(chat)
    assert read.chat_template_kwargs == {"enable_thinking": False}


def test_unknown_request_parameter_is_refused() -> None:
    with pytest.raises(ValidationError, match="temprature"):
        types.NeMoGymResponseCreateParamsNonStreaming.model_validate({"input": "x", "temprature": 1})


def test_usage_is_summed_and_an_unknown_count_stays_unknown() -> None:
    def usage(cached: int | None) -> types.NeMoGymResponseUsage:
        return types.NeMoGymResponseUsage.model_validate(
            {
                "input_tokens": 5,
                "output_tokens": 2,
                "total_tokens": 7,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens_details": {"reasoning_tokens": 1},
            }
        )

    first = usage(3)
    total = types.accumulate_response_usage(types.accumulate_response_usage(None, first), usage(None))
    assert total is not None and (total.total_tokens, total.input_tokens_details.cached_tokens) == (14, None)
    assert first.total_tokens == 7
    assert types.accumulate_response_usage(total, None) == total
    assert types.NeMoGymResponseUsage.sum_from_list([first, first]).input_tokens_details.cached_tokens == 6


def test_item_without_a_training_variant_says_which_have_one() -> None:
    assert types.training_variant_of(types.NeMoGymMessage) is types.NeMoGymMessageForTraining
    with pytest.raises(NotImplementedError, match=r"NeMoGymResponseMcpCall.*NeMoGymEasyInputMessage"):
        types.training_variant_of(types.NeMoGymResponseMcpCall)


def test_chat_survives_a_round_trip_through_responses() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "thinking", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "out"},
        {"role": "assistant", "content": "done"},
    ]
    items = responses_chat.responses_request({"messages": messages})["input"]
    assert responses_chat.chat_messages(items) == messages


def test_token_ids_survive_the_translation_to_responses() -> None:
    message = {"role": "assistant", "content": "x", **TOKENS}
    completion = {"model": "m", "choices": [{"message": message, "finish_reason": "length"}]}
    made = responses_chat.response_of_completion(completion, {})
    read = types.NeMoGymResponse.model_validate(made)
    assert read.output[0].generation_token_ids == [3]
    assert read.status == "incomplete" and made["incomplete_details"] == {"reason": "max_output_tokens"}


def test_environment_starts_without_openai_and_exports_its_types_when_asked() -> None:
    code = (
        "import sys, nemo_gym.base_resources_server as b, nemo_gym.base_responses_api_agent;"
        "assert 'openai' not in sys.modules;"
        "assert b.BaseVerifyRequest.model_fields['response'].annotation.__name__ == 'NeMoGymResponse';"
        "import nemo_gym; assert nemo_gym.Verdict.of(1.0).valid"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
