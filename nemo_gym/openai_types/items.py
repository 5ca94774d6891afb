"""Items of the Responses API, as input and as output.

One union serves both directions, because a turn's output is the next turn's input. A dict's ``type`` and shape select
the union's member, so an item is validated once and an error names only that member.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypeAlias

from openai.types.responses import (
    ResponseCodeInterpreterToolCall,
    ResponseComputerToolCall,
    ResponseCustomToolCall,
    ResponseCustomToolCallOutput,
    ResponseFileSearchToolCall,
    ResponseFunctionToolCall,
    ResponseFunctionWebSearch,
    ResponseInputTextParam,
)
from openai.types.responses.response_function_call_output_item_list_param import (
    ResponseFunctionCallOutputItemListParam,
)
from openai.types.responses.response_input_content_param import ResponseInputContentParam
from openai.types.responses.response_input_item import (
    ComputerCallOutput,
    LocalShellCallOutput,
    McpApprovalResponse,
)
from openai.types.responses.response_output_item import (
    ImageGenerationCall,
    LocalShellCall,
    McpApprovalRequest,
    McpCall,
    McpListTools,
)
from openai.types.responses.response_output_refusal_param import ResponseOutputRefusalParam
from openai.types.responses.response_output_text_param import Annotation, Logprob
from openai.types.responses.response_reasoning_item import Content as ReasoningContent
from openai.types.responses.response_reasoning_item import Summary
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from typing_extensions import TypedDict

from nemo_gym.openai_types import TOKEN_FIELDS, TokenIDLogProbMixin

__all__ = [
    "RESPONSES_TO_TRAIN",
    "NeMoGymComputerCallOutput",
    "NeMoGymContent",
    "NeMoGymEasyInputMessage",
    "NeMoGymEasyInputMessageForTraining",
    "NeMoGymFunctionCallOutput",
    "NeMoGymImageGenerationCall",
    "NeMoGymInputVideoPart",
    "NeMoGymLocalShellCall",
    "NeMoGymLocalShellCallOutput",
    "NeMoGymMcpApprovalResponse",
    "NeMoGymMessage",
    "NeMoGymMessageForTraining",
    "NeMoGymResponseCodeInterpreterToolCall",
    "NeMoGymResponseComputerToolCall",
    "NeMoGymResponseCustomToolCall",
    "NeMoGymResponseCustomToolCallOutput",
    "NeMoGymResponseFileSearchToolCall",
    "NeMoGymResponseFunctionToolCall",
    "NeMoGymResponseFunctionToolCallForTraining",
    "NeMoGymResponseFunctionWebSearch",
    "NeMoGymResponseInput",
    "NeMoGymResponseInputContentList",
    "NeMoGymResponseInputContentPart",
    "NeMoGymResponseInputItem",
    "NeMoGymResponseInputText",
    "NeMoGymResponseMcpApprovalRequest",
    "NeMoGymResponseMcpCall",
    "NeMoGymResponseMcpListTools",
    "NeMoGymResponseOutputItem",
    "NeMoGymResponseOutputMessage",
    "NeMoGymResponseOutputMessageForTraining",
    "NeMoGymResponseOutputRefusal",
    "NeMoGymResponseOutputText",
    "NeMoGymResponseReasoningItem",
    "NeMoGymResponseReasoningItemForTraining",
    "NeMoGymSummary",
    "training_variant_of",
]

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class NeMoGymSummary(Summary):
    pass


class NeMoGymResponseReasoningItem(BaseModel):
    """Reasoning. It has no ``status``, because endpoints send ``null`` there but refuse ``null`` as input."""

    id: str
    summary: list[NeMoGymSummary]
    type: Literal["reasoning"] = "reasoning"
    encrypted_content: str | None = None
    content: list[ReasoningContent] | None = None


class NeMoGymResponseOutputText(BaseModel):
    annotations: list[Annotation]
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: list[Logprob] | None = None


class NeMoGymResponseOutputRefusal(BaseModel):
    refusal: str
    type: Literal["refusal"] = "refusal"


NeMoGymContent: TypeAlias = NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal


class NeMoGymResponseOutputMessage(BaseModel):
    id: str
    content: list[NeMoGymContent]
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "completed"
    type: Literal["message"] = "message"


class NeMoGymInputVideoPart(TypedDict, total=False):
    """Video content, which OpenAI's types lack; exactly one of the two sources is required."""

    type: Required[Literal["input_video"]]
    video_url: str | dict[str, Any]
    video: str | dict[str, Any]


def _check_video(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_video":
        sources = [part[key] for key in ("video_url", "video") if key in part]
        if len(sources) != 1:
            raise ValueError("an input_video part needs exactly one of 'video_url' and 'video'")
        url = sources[0].get("url") if isinstance(sources[0], dict) else sources[0]
        if not isinstance(url, str) or not url.strip():
            raise ValueError("an input_video part needs a URL that is not empty")
    return part


NeMoGymResponseInputContentPart: TypeAlias = Annotated[
    ResponseInputContentParam | NeMoGymInputVideoPart, BeforeValidator(_check_video)
]
NeMoGymResponseInputContentList: TypeAlias = list[NeMoGymResponseInputContentPart]


class NeMoGymResponseInputText(ResponseInputTextParam):
    pass


class _HistoryTextPart(TypedDict, total=False):
    """Text of an earlier answer, as datasets hold it: its ``annotations`` may be absent, or null in a table."""

    type: Required[Literal["output_text"]]
    text: Required[str]
    annotations: list[Annotation] | None
    logprobs: list[Logprob] | None


class NeMoGymEasyInputMessage(BaseModel):
    content: str | list[NeMoGymResponseInputContentPart | _HistoryTextPart | ResponseOutputRefusalParam]
    role: Literal["user", "assistant", "system", "developer"]
    type: Literal["message"] = "message"


class NeMoGymMessage(BaseModel):
    content: NeMoGymResponseInputContentList
    role: Literal["user", "system", "developer"]
    status: ItemStatus = "completed"
    type: Literal["message"] = "message"


class NeMoGymFunctionCallOutput(BaseModel):
    call_id: str
    output: str | ResponseFunctionCallOutputItemListParam
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: ItemStatus | None = None


class NeMoGymResponseFunctionToolCall(BaseModel):
    arguments: str
    call_id: str
    name: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: ItemStatus | None = None
    if "namespace" in ResponseFunctionToolCall.model_fields:  # only in later releases of openai
        namespace: str | None = None


class NeMoGymResponseMcpCall(McpCall):
    """An MCP call. The fields are lax, because some endpoints omit id and label or use their own statuses."""

    type: Literal["mcp_call"] = "mcp_call"
    id: str | None = None  # type: ignore[assignment]
    server_label: str | None = None  # type: ignore[assignment]
    status: str | None = None  # type: ignore[assignment]


class NeMoGymResponseMcpListTools(McpListTools):
    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    tools: list[Any] = Field(default_factory=list)
    id: str | None = None  # type: ignore[assignment]
    server_label: str | None = None  # type: ignore[assignment]


class NeMoGymResponseMcpApprovalRequest(McpApprovalRequest):
    id: str | None = None  # type: ignore[assignment]
    server_label: str | None = None  # type: ignore[assignment]


class NeMoGymResponseFileSearchToolCall(ResponseFileSearchToolCall):
    pass


class NeMoGymResponseFunctionWebSearch(ResponseFunctionWebSearch):
    pass


class NeMoGymResponseComputerToolCall(ResponseComputerToolCall):
    pass


class NeMoGymImageGenerationCall(ImageGenerationCall):
    pass


class NeMoGymResponseCodeInterpreterToolCall(ResponseCodeInterpreterToolCall):
    pass


class NeMoGymLocalShellCall(LocalShellCall):
    pass


class NeMoGymResponseCustomToolCall(ResponseCustomToolCall):
    pass


class NeMoGymComputerCallOutput(ComputerCallOutput):
    pass


class NeMoGymResponseCustomToolCallOutput(ResponseCustomToolCallOutput):
    pass


class NeMoGymLocalShellCallOutput(LocalShellCallOutput):
    pass


class NeMoGymMcpApprovalResponse(McpApprovalResponse):
    pass


class NeMoGymEasyInputMessageForTraining(NeMoGymEasyInputMessage, TokenIDLogProbMixin):
    pass


class NeMoGymMessageForTraining(NeMoGymMessage, TokenIDLogProbMixin):
    pass


class NeMoGymResponseOutputMessageForTraining(NeMoGymResponseOutputMessage, TokenIDLogProbMixin):
    pass


class NeMoGymResponseFunctionToolCallForTraining(NeMoGymResponseFunctionToolCall, TokenIDLogProbMixin):
    pass


class NeMoGymResponseReasoningItemForTraining(NeMoGymResponseReasoningItem, TokenIDLogProbMixin):
    pass


RESPONSES_TO_TRAIN: dict[type[BaseModel], type[BaseModel]] = {
    NeMoGymEasyInputMessage: NeMoGymEasyInputMessageForTraining,
    NeMoGymMessage: NeMoGymMessageForTraining,
    NeMoGymResponseOutputMessage: NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseFunctionToolCall: NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseReasoningItem: NeMoGymResponseReasoningItemForTraining,
}
"""Items that a policy generates → their variants with token fields."""


def training_variant_of(item_cls: type[BaseModel]) -> type[BaseModel]:
    """The variant of ``item_cls`` with token fields. Raises ``NotImplementedError`` for items no policy generates."""
    try:
        return RESPONSES_TO_TRAIN[item_cls]
    except KeyError:
        names = ", ".join(cls.__name__ for cls in RESPONSES_TO_TRAIN)
        raise NotImplementedError(f"{item_cls.__name__} cannot carry token ids; only {names} can") from None


_BY_TYPE: dict[str, type[BaseModel]] = {
    "function_call_output": NeMoGymFunctionCallOutput,
    "function_call": NeMoGymResponseFunctionToolCall,
    "reasoning": NeMoGymResponseReasoningItem,
    "mcp_call": NeMoGymResponseMcpCall,
    "mcp_list_tools": NeMoGymResponseMcpListTools,
    "mcp_approval_request": NeMoGymResponseMcpApprovalRequest,
    "file_search_call": NeMoGymResponseFileSearchToolCall,
    "web_search_call": NeMoGymResponseFunctionWebSearch,
    "computer_call": NeMoGymResponseComputerToolCall,
    "image_generation_call": NeMoGymImageGenerationCall,
    "code_interpreter_call": NeMoGymResponseCodeInterpreterToolCall,
    "local_shell_call": NeMoGymLocalShellCall,
    "custom_tool_call": NeMoGymResponseCustomToolCall,
    "computer_call_output": NeMoGymComputerCallOutput,
    "custom_tool_call_output": NeMoGymResponseCustomToolCallOutput,
    "local_shell_call_output": NeMoGymLocalShellCallOutput,
    "mcp_approval_response": NeMoGymMcpApprovalResponse,
}
_MESSAGES = (NeMoGymEasyInputMessage, NeMoGymMessage, NeMoGymResponseOutputMessage)
_MEMBERS: tuple[type[BaseModel], ...] = (*_MESSAGES, *_BY_TYPE.values(), *RESPONSES_TO_TRAIN.values())
_INFERRED = (
    # For items without a ``type``: keys that identify one kind.
    ("role", "message"),
    ("arguments", "function_call"),
    ("output", "function_call_output"),
    ("summary", "reasoning"),
)


def _message_class(item: dict[str, Any]) -> type[BaseModel]:
    content = item.get("content")
    if isinstance(content, list):
        if item.get("role", "assistant") == "assistant" and item.get("id") is not None:
            return NeMoGymResponseOutputMessage
        if item.get("status") is not None and item.get("role") != "assistant":
            return NeMoGymMessage
    return NeMoGymEasyInputMessage


def _member(item: Any) -> str | None:
    """The name of the union member for ``item``; the discriminator of `NeMoGymResponseInputItem`."""
    if isinstance(item, BaseModel):
        return next((cls.__name__ for cls in type(item).__mro__ if cls in _MEMBERS), None)
    if not isinstance(item, dict):
        return None
    kind = item.get("type") or next((kind for key, kind in _INFERRED if key in item), None)
    cls = _message_class(item) if kind == "message" else _BY_TYPE.get(str(kind))
    if cls is None:
        return None
    # An item with any token field must have all of them, which the variant validates.
    if cls in RESPONSES_TO_TRAIN and not TOKEN_FIELDS.isdisjoint(item):
        cls = RESPONSES_TO_TRAIN[cls]
    return cls.__name__


def _check_output(value: Any) -> Any:
    if isinstance(value, dict):
        if "type" not in value:
            raise ValueError("an output item needs its 'type'")
        content = value.get("content")
        parts = content if value["type"] == "message" and isinstance(content, list) else ()
        if value.get("id") is None and any(
            isinstance(part, dict) and part.get("type") in ("output_text", "refusal") for part in parts
        ):
            raise ValueError("an output message needs its 'id'")  # only in a prompt's history may it be absent
    return value


NeMoGymResponseInputItem: TypeAlias = Annotated[
    Annotated[NeMoGymEasyInputMessage, Tag("NeMoGymEasyInputMessage")]
    | Annotated[NeMoGymMessage, Tag("NeMoGymMessage")]
    | Annotated[NeMoGymResponseOutputMessage, Tag("NeMoGymResponseOutputMessage")]
    | Annotated[NeMoGymResponseFunctionToolCall, Tag("NeMoGymResponseFunctionToolCall")]
    | Annotated[NeMoGymFunctionCallOutput, Tag("NeMoGymFunctionCallOutput")]
    | Annotated[NeMoGymResponseReasoningItem, Tag("NeMoGymResponseReasoningItem")]
    | Annotated[NeMoGymResponseMcpCall, Tag("NeMoGymResponseMcpCall")]
    | Annotated[NeMoGymResponseMcpListTools, Tag("NeMoGymResponseMcpListTools")]
    | Annotated[NeMoGymResponseMcpApprovalRequest, Tag("NeMoGymResponseMcpApprovalRequest")]
    | Annotated[NeMoGymResponseFileSearchToolCall, Tag("NeMoGymResponseFileSearchToolCall")]
    | Annotated[NeMoGymResponseFunctionWebSearch, Tag("NeMoGymResponseFunctionWebSearch")]
    | Annotated[NeMoGymResponseComputerToolCall, Tag("NeMoGymResponseComputerToolCall")]
    | Annotated[NeMoGymImageGenerationCall, Tag("NeMoGymImageGenerationCall")]
    | Annotated[NeMoGymResponseCodeInterpreterToolCall, Tag("NeMoGymResponseCodeInterpreterToolCall")]
    | Annotated[NeMoGymLocalShellCall, Tag("NeMoGymLocalShellCall")]
    | Annotated[NeMoGymResponseCustomToolCall, Tag("NeMoGymResponseCustomToolCall")]
    | Annotated[NeMoGymComputerCallOutput, Tag("NeMoGymComputerCallOutput")]
    | Annotated[NeMoGymResponseCustomToolCallOutput, Tag("NeMoGymResponseCustomToolCallOutput")]
    | Annotated[NeMoGymLocalShellCallOutput, Tag("NeMoGymLocalShellCallOutput")]
    | Annotated[NeMoGymMcpApprovalResponse, Tag("NeMoGymMcpApprovalResponse")]
    | Annotated[NeMoGymEasyInputMessageForTraining, Tag("NeMoGymEasyInputMessageForTraining")]
    | Annotated[NeMoGymMessageForTraining, Tag("NeMoGymMessageForTraining")]
    | Annotated[NeMoGymResponseOutputMessageForTraining, Tag("NeMoGymResponseOutputMessageForTraining")]
    | Annotated[NeMoGymResponseFunctionToolCallForTraining, Tag("NeMoGymResponseFunctionToolCallForTraining")]
    | Annotated[NeMoGymResponseReasoningItemForTraining, Tag("NeMoGymResponseReasoningItemForTraining")],
    Discriminator(
        _member,
        custom_error_type="item_type",
        custom_error_message="not an item of the Responses API: its 'type' is unknown or missing",
    ),
]
NeMoGymResponseInput: TypeAlias = list[NeMoGymResponseInputItem]
NeMoGymResponseOutputItem: TypeAlias = Annotated[NeMoGymResponseInputItem, BeforeValidator(_check_output)]
