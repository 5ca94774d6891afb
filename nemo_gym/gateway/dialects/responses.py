"""Responses (``/v1/responses``) and the lowered request.

| field | what becomes of it |
|---|---|
| ``input``, ``instructions`` | lowered (`responses_history`); leading system and developer messages are one |
| ``tools``: ``function``, ``custom``, ``namespace`` of these, ``local_shell`` | functions with flat names (`tools`) |
| ``tools``: ``web_search…``, ``image_generation``, ``tool_search`` | not shown: the endpoint would run them, and a harness does without |
| ``tools`` of any other type | refused: without them the task is another one |
| ``tool_choice`` | ``auto``, ``none``, ``required``, a function or custom tool, ``local_shell`` |
| ``temperature``, ``top_p``, ``max_output_tokens``, and ``top_k``, ``min_p``, ``seed``, ``stop``, which OpenAI lacks | sampling |
| ``text.format`` | the response format |
| ``top_logprobs`` above 0, ``include: message.output_text.logprobs`` | logprobs of the sampled tokens, without alternatives |
| ``include: reasoning.encrypted_content`` | reasoning items carry an opaque text; what is sent back is read from ``summary`` |
| ``return_token_ids``, ``return_token_id_information`` | token ids and logprobs in the last item |
| ``stream`` | the stream |
| ``parallel_tool_calls``, ``user``, ``metadata``, ``store``, ``service_tier``, ``reasoning.effort`` | ``extra`` |
| ``previous_response_id``, ``conversation``, ``background``, ``prompt``, ``n`` other than 1, ``logit_bias`` | refused where they ask for something |
| ``prompt_cache_key``, ``truncation``, ``max_tool_calls``, ``client_metadata``, ``model``, unknown fields | ignored |

Types of items and of content that are not known are refused by name.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_gym.contract.errors import NemoGymError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import NOT_STORED, SAMPLING, one_answer, wants_token_ids
from nemo_gym.gateway.dialects.errors import openai_error
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
    repeatable,
    sampling_at,
    stop_at,
    text_at,
)
from nemo_gym.gateway.dialects.memo import LoweringMemo
from nemo_gym.gateway.dialects.responses_events import begun, responses_events
from nemo_gym.gateway.dialects.responses_history import lower_input
from nemo_gym.gateway.dialects.responses_reply import REPEATED, included, response_object, response_of
from nemo_gym.gateway.dialects.tools import LOCAL_SHELL, ToolTable, chosen
from nemo_gym.gateway.lowered import Answer, LoweredRequest

_REFUSED = {
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "background": "asks for an answer to be fetched later; nothing is stored here",
    "prompt": "refers to a prompt stored elsewhere; nothing is stored here: send 'input' and 'instructions'",
    "logit_bias": "changes the policy's distribution; its tokens would no longer be its own",
}
_PASSED_ON = ("user", "metadata", "store", "service_tier")
_NOT_SHOWN = ("web_search", "image_generation", "tool_search")
LOGPROBS = "message.output_text.logprobs"
_NO_PARAMETERS = frozenset({"input", "instructions"})


class ResponsesAdapter:
    """Responses."""

    def lower(self, body: Body, memo: LoweringMemo | None = None) -> LoweredRequest:
        if memo is None:
            table, request = _parameters(body)
        else:
            given = {key: value for key, value in body.items() if key not in _NO_PARAMETERS}
            table, request = memo.parameters(Dialect.RESPONSES, given, lambda: _parameters(body))
        return request.asking(lower_input(body, table, memo))

    def reply(self, answer: Answer, request: LoweredRequest, body: Body) -> dict[str, Any]:
        return response_of(answer, request, body)

    def events(self, reply: Mapping[str, Any], request: LoweredRequest) -> Iterator[bytes]:
        return responses_events(reply)

    def opening(
        self, answer_id: str, created_at: float, model: str, request: LoweredRequest, body: Body
    ) -> dict[str, Any] | None:
        return begun(response_object(answer_id, created_at, model, body))

    def error(self, error: NemoGymError) -> tuple[int, dict[str, Any]]:
        return openai_error(error)


def _parameters(body: Body) -> tuple[ToolTable, LoweredRequest]:
    """The tools, and a request without its messages."""
    one_answer(body)
    refuse_set(body, _REFUSED)
    repeatable(body, *REPEATED)
    table = tool_table(body)
    asked = sampling_at(body, *SAMPLING)
    if (limit := number_at(body, "max_output_tokens", low=1, whole=True)) is not None:
        asked["max_tokens"] = limit
    if stop := stop_at(body, "stop"):
        asked["stop"] = stop
    extra = {key: body[key] for key in _PASSED_ON if body.get(key) is not None}
    if table.tools and body.get("parallel_tool_calls") is not None:
        extra["parallel_tool_calls"] = flag_at(body, "parallel_tool_calls")
    if effort := optional_text(object_at(body, "reasoning", ""), "effort", "reasoning"):
        extra["reasoning_effort"] = effort
    top = number_at(body, "top_logprobs", low=0, whole=True)
    if top:
        extra["top_logprobs"] = top
    return table, LoweredRequest(
        messages=(),
        tools=table.tools or None,
        names=table.names,
        asked=asked,
        stream=flag_at(body, "stream"),
        tool_choice=chosen(body.get("tool_choice"), table),
        response_format=_format(object_at(object_at(body, "text", ""), "format", "text")),
        logprobs=bool(top) or LOGPROBS in included(body),
        token_ids=wants_token_ids(body),
        extra=extra,
    )


def tool_table(body: Body) -> ToolTable:
    """The tools of a request."""
    table = ToolTable()
    grouped: list[tuple[str, Body]] = []
    for where, tool in objects_in(body.get("tools"), "tools"):
        if tool.get("type") == "namespace":
            grouped.append((where, tool))
        else:
            _add_tool(table, tool, where)
    # Plain tools first: where a grouped one would have the name of one of them, it is the grouped one that gives way.
    for where, group in grouped:
        namespace, about = text_at(group, "name", where), optional_text(group, "description", where)
        for at, tool in objects_in(group.get("tools"), f"{where}.tools"):
            _add_tool(table, tool, at, namespace, about)
    return table


def _add_tool(
    table: ToolTable, tool: Body, where: str, namespace: str | None = None, about: str | None = None
) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        refuse(f"{where}.type", f"must be a string, not {kind_of(kind)}")
    if kind == "function":
        table.add(tool, where, namespace, about)
    elif kind == "custom":
        table.add_custom(tool, where, namespace)
    elif kind == LOCAL_SHELL and namespace is None:
        table.add_local_shell(where)
    elif not kind.startswith(_NOT_SHOWN):
        refuse(f"{where}.type", f"is '{kind}', which is run by OpenAI's endpoint or known to its models only")


def _format(form: Body) -> dict[str, Any] | None:
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if not isinstance(kind, str):
        refuse("text.format.type", f"must be a string, not {kind_of(kind)}")
    rest = {key: value for key, value in form.items() if key != "type"}
    return {"type": kind, **({"json_schema": rest} if rest else {})}
