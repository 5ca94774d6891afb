"""Converts Responses to Chat Completions and back, under the names that NeMo Gym's plugins import.

The gateway does the conversion (`nemo_gym.gateway.dialects`). In both directions, chat messages hold a model's
reasoning in ``<think>`` tags in their content, as NeMo Gym's model servers expect.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field, TypeAdapter

from nemo_gym.gateway.dialects.responses import chat_request, response_of_completion, responses_request
from nemo_gym.openai_types import REQUIRED_TOKEN_FIELDS, TOKEN_FIELDS
from nemo_gym.openai_types.chat import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChoice,
)
from nemo_gym.openai_types.items import NeMoGymResponseInputItem, NeMoGymResponseOutputItem
from nemo_gym.openai_types.responses import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming

__all__ = [
    "ResponsesConverter",
    "VLLMConverter",
    "VLLMConverterResponsesToChatCompletionsState",
    "split_responses_input_output_items",
]

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_OF_A_TURN = ("function_call", "custom_tool_call", "reasoning")
_MADE_BY_THE_MODEL = ("reasoning", "mcp_list_tools", "mcp_approval_request", "compaction")
"""Types of items, besides ``…_call``, that only the model's side produces."""
_INPUT_ITEM: TypeAdapter[Any] = TypeAdapter(NeMoGymResponseInputItem)
_OUTPUT_ITEM: TypeAdapter[Any] = TypeAdapter(NeMoGymResponseOutputItem)


def _usage_detail(usage: Mapping[str, Any], details: str, name: str, *flat: str) -> int | None:
    """Return a detail of a usage report; some endpoints put it beside the totals, under one of the ``flat`` names."""
    nested = usage.get(details)
    places = [(nested, name)] if isinstance(nested, Mapping) else []
    return next(
        (int(place[key]) for place, key in [*places, *((usage, key) for key in flat)] if place.get(key) is not None),
        None,
    )


def _as_reported(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage that the endpoint itself reported: its own total, and ``None`` for details that it did not
    report, in place of the numbers that the gateway's accounting needs."""
    read = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    prompt, completion = (details if isinstance(details, Mapping) else {} for details in read)
    reported: dict[str, Any] = {
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens")},
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens")},
    }
    return reported if usage.get("total_tokens") is None else {**reported, "total_tokens": usage["total_tokens"]}


class ResponsesConverter(BaseModel):
    """Converts requests and responses. Keeps no state between calls."""

    return_token_id_information: bool = False
    """Pass on token ids and log probabilities of sampled turns, and request those of the new turn."""
    uses_reasoning_parser: bool = True
    """Separate a model's reasoning from its answer; otherwise ``<think>`` tags stay in the text."""

    @staticmethod
    def _wrap_reasoning_in_think_tags(texts: Sequence[str]) -> str:
        return "".join(f"<think>{text}</think>" for text in texts if text)

    @staticmethod
    def _extract_reasoning_from_content(content: str) -> tuple[list[str], str]:
        """Return the texts in ``<think>`` tags, and the remaining text."""
        return _THINK.findall(content), _THINK.sub("", content)

    def responses_to_chat_completion_create_params(
        self, responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        """Convert a Responses request to a Chat Completions request. Raises `InvalidBodyError` naming the field."""
        params = responses_create_params.model_dump(mode="json", exclude_unset=True)
        request = chat_request(params)
        for message in request["messages"]:
            if thought := message.pop("reasoning_content", None):
                message["content"] = self._wrap_reasoning_in_think_tags([thought]) + (message.get("content") or "")
        if self.return_token_id_information:
            _put_tokens(params.get("input"), request["messages"])
            request["logprobs"] = True
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(request)

    def chat_completion_to_responses_create_params(
        self, chat_completion_create_params: NeMoGymChatCompletionCreateParamsNonStreaming | Mapping[str, Any]
    ) -> NeMoGymResponseCreateParamsNonStreaming:
        """Convert a Chat Completions request to a Responses request."""
        given = chat_completion_create_params
        body = given.model_dump(mode="json", exclude_unset=True) if isinstance(given, BaseModel) else dict(given)
        return NeMoGymResponseCreateParamsNonStreaming.model_validate(responses_request(body))

    def chat_completion_to_response(
        self,
        responses_create_params: NeMoGymResponseCreateParamsNonStreaming,
        chat_completion: NeMoGymChatCompletion | Mapping[str, Any],
        *,
        preserve_envelope_id: bool = False,
    ) -> NeMoGymResponse:
        """Convert a chat completion to a Responses object; ``preserve_envelope_id`` keeps the completion's id."""
        given = chat_completion
        completion = given.model_dump(mode="json") if isinstance(given, BaseModel) else dict(given)
        params = responses_create_params.model_dump(mode="json", exclude_unset=True)
        choice = completion["choices"][0]
        reply = response_of_completion(completion, params)
        reply["id"] = completion["id"] if preserve_envelope_id and completion.get("id") else f"resp_{uuid4().hex}"
        reply["created_at"] = int(completion.get("created") or time.time())
        reply["output"] = [
            item.model_dump(mode="json") for item in self.postprocess_assistant_message_dict(choice["message"])
        ]
        if isinstance(usage := completion.get("usage"), Mapping):
            reply["usage"] |= _as_reported(usage)
        if (native := choice.get("native_finish_reason")) is not None:
            reply["native_finish_reason"] = native
        return NeMoGymResponse.model_validate(reply)

    def postprocess_chat_response(self, choice: NeMoGymChoice) -> list[Any]:
        """Return the output items of a completion's choice."""
        return self.postprocess_assistant_message_dict(choice.message.model_dump(mode="json"))

    def postprocess_assistant_message_dict(self, message_dict: Mapping[str, Any]) -> list[Any]:
        """Return the output items of an assistant's message: reasoning, text, calls. The last item gets the tokens."""
        content = message_dict.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
        thoughts, text = self._extract_reasoning_from_content(text) if self.uses_reasoning_parser else ([], text)
        if separate := message_dict.get("reasoning_content"):
            thoughts = [separate, *thoughts]
        items: list[dict[str, Any]] = []
        if thoughts:
            summary = [{"type": "summary_text", "text": thought} for thought in thoughts]
            items.append({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": summary})
        calls = message_dict.get("tool_calls") or []
        refusal = message_dict.get("refusal")
        if text or refusal or not (calls or thoughts):
            part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
            if refusal and not text:
                part = {"type": "refusal", "refusal": refusal}
            answer = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            items.append({**answer, "id": f"msg_{uuid4().hex}"})
        items += [
            {
                "type": "function_call",
                "id": call["id"],
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for call in calls
        ]
        tokens = {key: message_dict[key] for key in TOKEN_FIELDS if message_dict.get(key) is not None}
        if self.return_token_id_information and tokens.keys() >= REQUIRED_TOKEN_FIELDS:
            items[-1] |= tokens
        return [_OUTPUT_ITEM.validate_python(item) for item in items]

    def chat_completions_messages_to_responses_items(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Convert a chat's messages to Responses items."""
        items: list[Any] = []
        for message in messages:
            if message.get("role") == "assistant":
                items += self.postprocess_assistant_message_dict(message)
            elif message.get("role") == "tool":
                output = {"call_id": message["tool_call_id"], "output": message.get("content") or ""}
                items.append(_INPUT_ITEM.validate_python({"type": "function_call_output", **output}))
            else:
                item_fields = {"role": message.get("role"), "content": message.get("content") or ""}
                items.append(_INPUT_ITEM.validate_python({"type": "message", **item_fields}))
        return items


VLLMConverter = ResponsesConverter


class VLLMConverterResponsesToChatCompletionsState(BaseModel):
    """NeMo Gym's name for the state of an unfinished conversion; here, a conversion is a single step."""

    return_token_id_information: bool = False
    messages: list[dict[str, Any]] = Field(default_factory=list)


def _put_tokens(items: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Copy the tokens of sampled items to the assistant messages that were made from these items."""

    def is_sampled(item: Mapping[str, Any]) -> bool:
        return item.get("type") in _OF_A_TURN or item.get("role") == "assistant"

    turns = [
        {key: item[key] for item in turn for key in TOKEN_FIELDS if item.get(key) is not None}
        for sampled, turn in groupby(items if isinstance(items, list) else (), is_sampled)
        if sampled
    ]
    answers = [message for message in messages if message.get("role") == "assistant"]
    if len(answers) == len(turns):
        for message, tokens in zip(answers, turns, strict=True):
            message.update(tokens)


def split_responses_input_output_items(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split items before the first one that the model made. A call of a hosted tool counts as made by the model."""

    def is_made(item: Any) -> bool:
        role, kind = (
            item.get(key) if isinstance(item, Mapping) else getattr(item, key, None) for key in ("role", "type")
        )
        return role == "assistant" or kind in _MADE_BY_THE_MODEL or str(kind).endswith("_call")

    first = next((number for number, item in enumerate(items) if is_made(item)), len(items))
    return list(items[:first]), list(items[first:])
