"""Requests and replies of the Responses API, and token usage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from openai.types import shared
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseIncludable,
    ResponsePromptParam,
    ResponseTextConfigParam,
    ToolParam,
)
from openai.types.responses.response_create_params import ToolChoice
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails, ResponseUsage
from openai.types.shared_params import Metadata, Reasoning, ResponsesModel
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.openai_types.items import NeMoGymResponseInput, NeMoGymResponseOutputItem

__all__ = [
    "NeMoGymFunctionToolParam",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "NeMoGymResponseInputTokensDetails",
    "NeMoGymResponseOutputTokensDetails",
    "NeMoGymResponseUsage",
    "accumulate_response_usage",
]


ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""As endpoints know it; the installed openai may lack some."""


class _ReasoningParam(Reasoning, total=False):
    context: Literal["auto", "current_turn", "all_turns"] | None
    effort: ReasoningEffort | None  # type: ignore[misc]


class _Reasoning(shared.Reasoning):
    effort: ReasoningEffort | None = None  # type: ignore[assignment]


class NeMoGymFunctionToolParam(FunctionToolParam):
    pass


class NeMoGymResponseCreateParamsNonStreaming(BaseModel):
    """A request for one response. Unknown parameters are refused, because they would be dropped silently."""

    model_config = ConfigDict(extra="forbid")

    background: bool | None = None
    context_management: list[dict[str, Any]] | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[ResponseIncludable] | None = None
    input: str | NeMoGymResponseInput
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Metadata | None = None
    model: ResponsesModel | None = None
    moderation: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: ResponsePromptParam | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning: _ReasoningParam | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    text: ResponseTextConfigParam | None = None
    tool_choice: ToolChoice = "auto"
    tools: list[ToolParam] = Field(default_factory=list)
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    stream: Literal[False] | None = None


class NeMoGymResponseInputTokensDetails(InputTokensDetails):
    cached_tokens: int | None  # type: ignore[assignment]


class NeMoGymResponseOutputTokensDetails(OutputTokensDetails):
    reasoning_tokens: int | None  # type: ignore[assignment]


class NeMoGymResponseUsage(ResponseUsage):
    """Token counts. A detail that an endpoint did not report is ``None``, and so is any sum that includes it."""

    input_tokens_details: NeMoGymResponseInputTokensDetails
    output_tokens_details: NeMoGymResponseOutputTokensDetails

    @classmethod
    def zero(cls) -> NeMoGymResponseUsage:
        return cls(
            input_tokens=0,
            input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=0),
            output_tokens=0,
            output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=0),
            total_tokens=0,
        )

    @classmethod
    def sum_from_list(cls, usages: Iterable[NeMoGymResponseUsage]) -> NeMoGymResponseUsage:
        total = cls.zero()
        for usage in usages:
            _add(total, usage)
        return total


def _plus(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def _add(total: NeMoGymResponseUsage, more: NeMoGymResponseUsage) -> None:
    total.input_tokens += more.input_tokens
    total.output_tokens += more.output_tokens
    total.total_tokens += more.total_tokens
    # Replies of endpoints that are built without validation may have null details.
    if total.input_tokens_details is not None and more.input_tokens_details is not None:
        total.input_tokens_details.cached_tokens = _plus(
            total.input_tokens_details.cached_tokens, more.input_tokens_details.cached_tokens
        )
    if total.output_tokens_details is not None and more.output_tokens_details is not None:
        total.output_tokens_details.reasoning_tokens = _plus(
            total.output_tokens_details.reasoning_tokens, more.output_tokens_details.reasoning_tokens
        )


def accumulate_response_usage(
    total: NeMoGymResponseUsage | None, additional: NeMoGymResponseUsage | None
) -> NeMoGymResponseUsage | None:
    """Return the sum of two usages as a new object; ``None`` counts as zero."""
    if total is None or additional is None:
        usage = total or additional
        return usage.model_copy(deep=True) if usage is not None else None
    result = total.model_copy(deep=True)
    _add(result, additional)
    return result


class NeMoGymResponse(Response):
    """A response whose items may carry token ids."""

    output: list[NeMoGymResponseOutputItem]  # type: ignore[assignment]
    reasoning: _Reasoning | shared.Reasoning | None = None
    usage: NeMoGymResponseUsage | None = None
