"""Requests and replies of Chat Completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypeAlias

from openai.types.chat import (
    ChatCompletion,
    ChatCompletionAssistantMessageParam,
    ChatCompletionAudioParam,
    ChatCompletionContentPartImageParam,
    ChatCompletionContentPartInputAudioParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionPredictionContentParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolMessageParam,
    ChatCompletionToolParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.chat.chat_completion_content_part_param import File
from openai.types.chat.chat_completion_custom_tool_param import ChatCompletionCustomToolParam
from openai.types.chat.chat_completion_message_custom_tool_call import ChatCompletionMessageCustomToolCall
from openai.types.chat.chat_completion_message_custom_tool_call_param import (
    ChatCompletionMessageCustomToolCallParam,
)
from openai.types.chat.completion_create_params import ResponseFormat, WebSearchOptions
from openai.types.shared_params import FunctionDefinition, Metadata
from pydantic import BaseModel, BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from nemo_gym.openai_types import TokenIDLogProbMixin, TokenIDLogProbTypedDictMixin, check_tokens
from nemo_gym.openai_types.responses import ReasoningEffort

__all__ = [
    "NeMoGymChatCompletion",
    "NeMoGymChatCompletionAssistantMessageForTrainingParam",
    "NeMoGymChatCompletionAssistantMessageParam",
    "NeMoGymChatCompletionContentPartFileParam",
    "NeMoGymChatCompletionContentPartImageParam",
    "NeMoGymChatCompletionContentPartInputAudioParam",
    "NeMoGymChatCompletionContentPartParam",
    "NeMoGymChatCompletionContentPartTextParam",
    "NeMoGymChatCompletionContentPartVideoUrlParam",
    "NeMoGymChatCompletionCreateParamsNonStreaming",
    "NeMoGymChatCompletionCustomToolParam",
    "NeMoGymChatCompletionDeveloperMessageParam",
    "NeMoGymChatCompletionMessage",
    "NeMoGymChatCompletionMessageCustomToolCall",
    "NeMoGymChatCompletionMessageCustomToolCallParam",
    "NeMoGymChatCompletionMessageForTraining",
    "NeMoGymChatCompletionMessageParam",
    "NeMoGymChatCompletionMessageToolCall",
    "NeMoGymChatCompletionMessageToolCallFunctionParam",
    "NeMoGymChatCompletionMessageToolCallParam",
    "NeMoGymChatCompletionMessageToolCallUnion",
    "NeMoGymChatCompletionMessageToolCallUnionParam",
    "NeMoGymChatCompletionOutputMessage",
    "NeMoGymChatCompletionSystemMessageParam",
    "NeMoGymChatCompletionToolMessageParam",
    "NeMoGymChatCompletionToolParam",
    "NeMoGymChatCompletionToolUnionParam",
    "NeMoGymChatCompletionUserMessageParam",
    "NeMoGymChoice",
    "NeMoGymFunction",
    "NeMoGymFunctionDefinition",
]


class NeMoGymFunction(BaseModel):
    arguments: str
    name: str


class NeMoGymChatCompletionMessageToolCall(ChatCompletionMessageFunctionToolCall):
    function: NeMoGymFunction  # type: ignore[assignment]


class NeMoGymChatCompletionMessageCustomToolCall(ChatCompletionMessageCustomToolCall):
    pass


NeMoGymChatCompletionMessageToolCallUnion: TypeAlias = Annotated[
    NeMoGymChatCompletionMessageToolCall | NeMoGymChatCompletionMessageCustomToolCall, Field(discriminator="type")
]


class NeMoGymChatCompletionMessage(ChatCompletionMessage):
    tool_calls: list[NeMoGymChatCompletionMessageToolCallUnion] | None = None  # type: ignore[assignment]


class NeMoGymChatCompletionMessageForTraining(NeMoGymChatCompletionMessage, TokenIDLogProbMixin):
    pass


NeMoGymChatCompletionOutputMessage: TypeAlias = Annotated[
    NeMoGymChatCompletionMessage | NeMoGymChatCompletionMessageForTraining, BeforeValidator(check_tokens)
]


class NeMoGymChoice(Choice):
    message: NeMoGymChatCompletionOutputMessage


class NeMoGymChatCompletion(ChatCompletion):
    choices: list[NeMoGymChoice]  # type: ignore[assignment]


class NeMoGymFunctionDefinition(FunctionDefinition):
    pass


class NeMoGymChatCompletionToolParam(ChatCompletionToolParam):
    function: Required[NeMoGymFunctionDefinition]


class NeMoGymChatCompletionCustomToolParam(ChatCompletionCustomToolParam):
    pass


NeMoGymChatCompletionToolUnionParam: TypeAlias = Annotated[
    NeMoGymChatCompletionToolParam | NeMoGymChatCompletionCustomToolParam, Field(discriminator="type")
]


class NeMoGymChatCompletionContentPartTextParam(ChatCompletionContentPartTextParam):
    pass


class NeMoGymChatCompletionContentPartImageParam(ChatCompletionContentPartImageParam):
    pass


class NeMoGymChatCompletionContentPartInputAudioParam(ChatCompletionContentPartInputAudioParam):
    pass


class NeMoGymChatCompletionContentPartFileParam(File):
    pass


class NeMoGymChatCompletionContentPartVideoUrlParam(TypedDict, total=False):
    video_url: Required[str | dict[str, Any]]
    type: Required[Literal["video_url"]]


NeMoGymChatCompletionContentPartParam: TypeAlias = (
    NeMoGymChatCompletionContentPartTextParam
    | NeMoGymChatCompletionContentPartImageParam
    | NeMoGymChatCompletionContentPartInputAudioParam
    | NeMoGymChatCompletionContentPartFileParam
    | NeMoGymChatCompletionContentPartVideoUrlParam
)
_TextParts: TypeAlias = list[NeMoGymChatCompletionContentPartTextParam]


# Contents are lists here. OpenAI's types accept any iterable, which pydantic would keep as a one-shot iterator.
class NeMoGymChatCompletionUserMessageParam(ChatCompletionUserMessageParam):
    content: Required[str | list[NeMoGymChatCompletionContentPartParam]]  # type: ignore[misc]


class NeMoGymChatCompletionSystemMessageParam(ChatCompletionSystemMessageParam):
    content: Required[str | _TextParts]  # type: ignore[misc]


class NeMoGymChatCompletionDeveloperMessageParam(ChatCompletionDeveloperMessageParam):
    content: Required[str | _TextParts]  # type: ignore[misc]


class NeMoGymChatCompletionMessageToolCallFunctionParam(TypedDict, total=False):
    arguments: Required[str]
    name: Required[str]


class NeMoGymChatCompletionMessageToolCallParam(ChatCompletionMessageFunctionToolCallParam):
    function: NeMoGymChatCompletionMessageToolCallFunctionParam


class NeMoGymChatCompletionMessageCustomToolCallParam(ChatCompletionMessageCustomToolCallParam):
    pass


NeMoGymChatCompletionMessageToolCallUnionParam: TypeAlias = Annotated[
    NeMoGymChatCompletionMessageToolCallParam | NeMoGymChatCompletionMessageCustomToolCallParam,
    Field(discriminator="type"),
]


class NeMoGymChatCompletionAssistantMessageParam(ChatCompletionAssistantMessageParam, total=False):
    content: str | list[ContentArrayOfContentPart] | None  # type: ignore[misc]
    tool_calls: list[NeMoGymChatCompletionMessageToolCallUnionParam] | None  # type: ignore[misc]
    reasoning_content: str | None
    """The model's reasoning before ``content``, under the engines' name for it; not in OpenAI's own types."""


class NeMoGymChatCompletionAssistantMessageForTrainingParam(
    NeMoGymChatCompletionAssistantMessageParam, TokenIDLogProbTypedDictMixin
):
    pass


class NeMoGymChatCompletionToolMessageParam(ChatCompletionToolMessageParam):
    content: Required[str | _TextParts]  # type: ignore[misc]


NeMoGymChatCompletionMessageParam: TypeAlias = Annotated[
    NeMoGymChatCompletionDeveloperMessageParam
    | NeMoGymChatCompletionSystemMessageParam
    | NeMoGymChatCompletionUserMessageParam
    | NeMoGymChatCompletionAssistantMessageParam
    | NeMoGymChatCompletionToolMessageParam
    | NeMoGymChatCompletionAssistantMessageForTrainingParam,
    BeforeValidator(check_tokens),
]


class NeMoGymChatCompletionCreateParamsNonStreaming(BaseModel):
    """A request for one chat completion. Deprecated function parameters and unknown parameters are refused. Messages
    may have extra fields, because endpoints return reasoning in them and accept it back."""

    messages: list[NeMoGymChatCompletionMessageParam]
    model: str | None = None
    audio: ChatCompletionAudioParam | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, int] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    metadata: Metadata | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    moderation: dict[str, Any] | None = None
    n: int | None = None
    parallel_tool_calls: bool = True
    prediction: ChatCompletionPredictionContentParam | None = None
    presence_penalty: float | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning_effort: ReasoningEffort | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream_options: ChatCompletionStreamOptionsParam | None = None
    temperature: float | None = None
    tool_choice: ChatCompletionToolChoiceOptionParam | None = None
    tools: list[NeMoGymChatCompletionToolUnionParam] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: WebSearchOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's variables of the chat template."""
    thinking: dict[str, Any] | None = None
    """A parameter of gateways to Anthropic's models, like ``output_config``."""
    output_config: dict[str, Any] | None = None
    stream: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _knows_every_name(cls, given: Any) -> Any:
        # extra="forbid" would also apply to the typed dicts of messages.
        if isinstance(given, dict) and (unknown := given.keys() - cls.model_fields.keys()):
            raise ValueError(f"Extra inputs are not permitted: {', '.join(sorted(map(str, unknown)))}")
        return given
