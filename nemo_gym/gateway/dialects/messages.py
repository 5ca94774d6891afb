"""Messages (Anthropic's ``/v1/messages``, and ``/v1/messages/count_tokens``, which has no ``max_tokens``) and the lowered
request.

| field | what becomes of it |
|---|---|
| ``system`` | a system message; the billing header block that Claude Code leads it with is left out |
| ``messages`` | lowered (`messages_history`); ``role: system`` among them stays in its place |
| ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``stop_sequences`` | sampling; ``max_tokens`` may be absent |
| ``tools`` with a schema (``custom``) | shown to the policy; those with ``defer_loading`` where the harness searched for them |
| ``tools`` that Anthropic runs (``web_search_…``, ``code_execution_…``, ``tool_search_tool_…``) | not shown |
| ``tools`` of Anthropic's that the harness runs (``bash_…``, ``text_editor_…``, ``computer_…``, ``memory_…``) | refused: their schemas are known to Anthropic's models only |
| ``tool_choice`` | ``auto``, ``any``, ``tool``, ``none``; ``disable_parallel_tool_use`` goes to ``extra`` |
| ``thinking`` | whether the reply has ``thinking`` blocks; the budget is the policy's own affair |
| ``output_config.format``, ``output_format`` | the response format; ``output_config.effort`` goes to ``extra`` |
| ``stream`` | the stream |
| ``return_token_ids`` | token ids beside the reply's content (not Anthropic's) |
| ``n`` other than 1, ``mcp_servers``, ``container`` | refused where they ask for something |
| ``cache_control``, ``context_management``, ``metadata``, ``service_tier``, ``betas``, ``model``, unknown fields | ignored |

Types of content that are not known are refused by name, as are documents (except plain text) and server tools' results.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import one_answer, wants_token_ids
from nemo_gym.gateway.dialects.errors import anthropic_error
from nemo_gym.gateway.dialects.fields import (
    Body,
    flag_at,
    kind_of,
    number_at,
    object_at,
    objects_in,
    optional_text,
    refuse,
    refuse_set,
    sampling_at,
    stop_at,
    text_at,
)
from nemo_gym.gateway.dialects.memo import LoweringMemo
from nemo_gym.gateway.dialects.messages_history import lower_messages
from nemo_gym.gateway.dialects.messages_reply import message_of, messages_events
from nemo_gym.gateway.dialects.tools import ToolTable
from nemo_gym.gateway.lowered import Answer, LoweredRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high")
_RUN_BY_HARNESS = ("bash_", "text_editor_", "computer_", "memory_")
_SEARCHED_BY_SERVER = "tool_search_tool_"
_REFUSED = {
    "mcp_servers": "asks the API to call MCP servers; let the harness call them and offer their tools",
    "container": "refers to a container of the API; there is none here",
}

_NO_PARAMETERS = frozenset({"messages", "system", "metadata"})


class MessagesAdapter:
    """Messages."""

    def lower(self, body: Body, memo: LoweringMemo | None = None) -> LoweredRequest:
        if memo is None:
            tools, request = _parameters(body)
        else:
            given = {key: value for key, value in body.items() if key not in _NO_PARAMETERS}
            tools, request = memo.parameters(Dialect.MESSAGES, given, lambda: _parameters(body))
        return request.asking(lower_messages(body, tools, memo))

    def reply(self, answer: Answer, request: LoweredRequest, body: Body) -> dict[str, Any]:
        return message_of(answer, request)

    def events(self, reply: Mapping[str, Any], request: LoweredRequest) -> Iterator[bytes]:
        return messages_events(reply)

    def opening(
        self, answer_id: str, created_at: float, model: str, request: LoweredRequest, body: Body
    ) -> dict[str, Any] | None:
        return None

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        return anthropic_error(error)


def _parameters(body: Body) -> tuple[dict[str, dict[str, Any]], LoweredRequest]:
    """All tools by name, and a request without its messages."""
    one_answer(body)
    refuse_set(body, _REFUSED)
    tools, deferred = _tools(body)
    asked = sampling_at(body, "temperature", "top_p", "top_k")
    if (limit := number_at(body, "max_tokens", low=1, whole=True)) is not None:
        asked["max_tokens"] = limit
    if stop := stop_at(body, "stop_sequences"):
        asked["stop"] = stop
    choice = object_at(body, "tool_choice", "")
    output = object_at(body, "output_config", "")
    form = object_at(output, "format", "output_config") or object_at(body, "output_format", "")
    extra: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use") and tools:
        extra["parallel_tool_calls"] = False
    if output.get("effort") in _EFFORTS:
        extra["reasoning_effort"] = output["effort"]
    return {**deferred, **{_name(tool): tool for tool in tools}}, LoweredRequest(
        messages=(),
        tools=tools or None,
        deferred=[*deferred.values()],
        asked=asked,
        stream=flag_at(body, "stream"),
        tool_choice=_choice(choice),
        response_format=_format(form),
        token_ids=wants_token_ids(body),
        reasoning=object_at(body, "thinking", "").get("type") in ("enabled", "adaptive"),
        extra=extra,
    )


def _tools(body: Body) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The tools of the prompt, and those to be searched for, by name."""
    table = ToolTable()
    listed = [*objects_in(body.get("tools"), "tools")]
    by_server = any(str(tool.get("type")).startswith(_SEARCHED_BY_SERVER) for _, tool in listed)
    later: set[str] = set()
    for where, tool in listed:
        kind = tool.get("type") or "custom"
        if not isinstance(kind, str):
            refuse(f"{where}.type", f"must be a string, not {kind_of(kind)}")
        if kind != "custom" and tool.get("input_schema") is None:
            if kind.startswith(_RUN_BY_HARNESS):
                refuse(where, f"is of type '{kind}', whose schema this model does not know; offer it as a custom tool")
            continue
        schema = object_at(tool, "input_schema", where)
        about = optional_text(tool, "description", where)
        table.add({"name": text_at(tool, "name", where), "description": about, "parameters": schema}, where)
        # Without the API's own search nobody could ever find them.
        if tool.get("defer_loading") and not by_server:
            later.add(tool["name"])
    shown = [tool for tool in table.tools if _name(tool) not in later]
    return shown, {_name(tool): tool for tool in table.tools if _name(tool) in later}


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _choice(choice: Body) -> str | dict[str, Any]:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"name": text_at(choice, "name", "tool_choice")}
    if not isinstance(kind, str) or kind not in _CHOICES:
        refuse("tool_choice.type", f"is {kind!r}; it must be auto, any, tool or none")
    return _CHOICES[kind]


def _format(form: Body) -> dict[str, Any] | None:
    if not form:
        return None
    if form.get("type") != "json_schema":
        refuse("output_config.format.type", f"is {form.get('type')!r}; it must be 'json_schema'")
    schema = object_at(form, "schema", "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": dict(schema), "strict": True}}
