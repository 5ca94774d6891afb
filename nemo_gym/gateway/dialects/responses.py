"""Responses (``/v1/responses``) and the lowered request.

| field | what becomes of it |
|---|---|
| ``input``, ``instructions`` | lowered; leading system and developer messages are one |
| ``tools``: ``function``, ``custom``, ``namespace`` of these, ``local_shell`` | functions with flat names (`ToolTable`) |
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
| ``metadata.extra_body``, ``metadata.chat_template_kwargs`` | parameters as in Chat Completions; the request's own take precedence |
| ``prompt_cache_key``, ``truncation``, ``max_tool_calls``, ``client_metadata``, ``model``, unknown fields | ignored |

Unknown types of items and of content are refused by name.
"""  # noqa: E501

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from nemo_gym.contract.errors import ModelError
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.chat import (
    NOT_STORED,
    SAMPLING,
    TOKEN_FIELDS,
    ChatAdapter,
    ConversationCache,
    DialectAdapter,
    arguments_at,
    logprobs_content,
    lowered_history,
    one_answer,
    token_fields,
    wants_token_ids,
)
from nemo_gym.gateway.dialects.content import (
    LOCAL_SHELL,
    AnswerCall,
    Body,
    ToolTable,
    answer_text,
    called,
    calls_in,
    chosen,
    custom_arguments,
    custom_input,
    event,
    flag_at,
    is_refusal,
    kind_of,
    lead_system,
    made_up,
    number_at,
    object_at,
    objects_in,
    openai_content,
    optional_text,
    pieces,
    reasoning_in,
    refuse,
    refuse_set,
    repeatable,
    sampling_at,
    shell_action,
    shell_arguments,
    system_text,
    text_at,
    text_in,
)
from nemo_gym.gateway.dialects.endpoint import answer_of_completion, chat_body
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, CallName, PolicyRequest, Usage, metadata_parameters
from nemo_gym.gateway.tokens.history import text_of

# An answer as a response.

ENCRYPTED = "reasoning.encrypted_content"
_INCOMPLETE = {AnswerEnd.LENGTH: "max_output_tokens", AnswerEnd.CONTENT_FILTER: "content_filter"}
_ECHOED_TOOLS = ("function", "custom", "local_shell")


def included(body: Body) -> list[Any]:
    """Return the values of a request's ``include``."""
    value = body.get("include")
    return [*value] if isinstance(value, list | tuple) else []


def _reply_message(answer: Answer, text: str, request: PolicyRequest) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    if is_refusal(answer):
        part = {"type": "refusal", "refusal": text}
    elif request.logprobs and answer.tokens is not None and answer.tokens.logprobs is not None:
        part["logprobs"] = logprobs_content(answer.tokens)
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _reply_call(answer: Answer, number: int, call: AnswerCall, request: PolicyRequest) -> dict[str, Any]:
    call_name = request.names.get(call.name) or CallName(call.name)
    own_id = f"{answer.answer_id}_{number}"
    if call_name.local_shell and (action := shell_action(call.data)) is not None:
        return {
            "id": f"lsh_{own_id}",
            "type": "local_shell_call",
            "call_id": call.call_id,
            "action": action,
            "status": "completed",
        }
    if call_name.custom:
        call_id, text = custom_input(call)
        item = {"id": f"ctc_{own_id}", "type": "custom_tool_call", "call_id": call_id, "input": text}
    else:
        item = {
            "id": f"fc_{own_id}",
            "type": "function_call",
            "call_id": call.call_id,
            "arguments": call.arguments,
        }
    item |= {"name": call_name.name, "status": "completed"}
    return item if call_name.namespace is None else {**item, "namespace": call_name.namespace}


REPEATED = ("instructions", "metadata", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools")
"""Parameters of any depth that the response repeats from the request."""


def response_object(answer_id: str, created_at: float, model: str, body: Body) -> dict[str, Any]:
    """Return a response without output, with the request's parameters that the dialect repeats."""
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created_at,
        "model": model,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata"),
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": body.get("reasoning"),
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_tool_in_reply(tool) for tool in body.get("tools") or () if tool.get("type") in _ECHOED_TOOLS],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def _tool_in_reply(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that validating clients require."""
    required = {"strict": False, "parameters": None} if tool.get("type") == "function" else {}
    return {**required, **tool}


# A response as its events. Every event has a sequence number; deltas add up to the items.

_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": "", "status": "in_progress"},
    "local_shell_call": {"status": "in_progress"},
    "reasoning": {"summary": []},
}
_TEXT_EVENTS = {"output_text": ("response.output_text", "text"), "refusal": ("response.refusal", "refusal")}
_CALL_EVENTS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
_ONLY_WHEN_DONE = frozenset({"encrypted_content", *TOKEN_FIELDS})
Event = dict[str, Any]


def begun(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object that opens a stream. Only the last event has the tools: the harness knows them, and
    some forty kilobytes of them would come back with every ping."""
    empty: dict[str, Any] = {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "tools": [],
    }
    return {**response, **empty}


def _events(response: Mapping[str, Any]) -> Iterator[Event]:
    opening = begun(response)
    yield {"type": "response.created", "response": opening}
    yield {"type": "response.in_progress", "response": opening}
    for index, item in enumerate(response.get("output") or ()):
        kind = str(item.get("type"))
        at = {"item_id": item.get("id"), "output_index": index}
        added = {key: value for key, value in item.items() if key not in _ONLY_WHEN_DONE}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**added, **_EMPTY.get(kind, {})}}
        if kind == "message":
            yield from _message_events(item, at)
        elif kind == "reasoning":
            yield from _reasoning_events(item, at)
        elif kind in _CALL_EVENTS:
            name, key = _CALL_EVENTS[kind]
            text = item.get(key) or ""
            for piece in pieces(text):
                yield {"type": f"{name}.delta", **at, "delta": piece}
            yield {"type": f"{name}.done", **at, key: text, "name": item.get("name")}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    ended = "incomplete" if response.get("status") == "incomplete" else "completed"
    yield {"type": f"response.{ended}", "response": response}


def _message_events(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
    for number, part in enumerate(item.get("content") or ()):
        where = {**at, "content_index": number}
        name, key = _TEXT_EVENTS.get(str(part.get("type")), _TEXT_EVENTS["output_text"])
        text, entries = part.get(key) or "", part.get("logprobs") or []
        has_logprobs = key == "text"
        begin = {**part, key: ""} | ({"logprobs": []} if has_logprobs and "logprobs" in part else {})
        yield {"type": "response.content_part.added", **where, "part": begin}
        cut = [*pieces(text)]
        share = -(-len(entries) // max(1, len(cut)))
        for place, piece in enumerate(cut):
            piece_logprobs = {"logprobs": entries[place * share : (place + 1) * share]} if has_logprobs else {}
            yield {"type": f"{name}.delta", **where, "delta": piece, **piece_logprobs}
        yield {"type": f"{name}.done", **where, key: text, **({"logprobs": entries} if has_logprobs else {})}
        yield {"type": "response.content_part.done", **where, "part": part}


def _reasoning_events(item: Mapping[str, Any], at: Mapping[str, Any]) -> Iterator[Event]:
    for number, part in enumerate(item.get("summary") or ()):
        where = {**at, "summary_index": number}
        yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
        for piece in pieces(part["text"]):
            yield {"type": "response.reasoning_summary_text.delta", **where, "delta": piece}
        yield {"type": "response.reasoning_summary_text.done", **where, "text": part["text"]}
        yield {"type": "response.reasoning_summary_part.done", **where, "part": part}
    for number, part in enumerate(item.get("content") or ()):
        where = {**at, "content_index": number}
        for piece in pieces(part["text"]):
            yield {"type": "response.reasoning_text.delta", **where, "delta": piece}
        yield {"type": "response.reasoning_text.done", **where, "text": part["text"]}


# A request as a lowered request.
#
# Items of one answer of the policy become one assistant message. A call's output is a tool message, with its images.
# The text of a reasoning item is its ``content``, else its ``summary``; ``encrypted_content`` is ignored.

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
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


class ResponsesAdapter(DialectAdapter):
    """Responses."""

    dialect = Dialect.RESPONSES
    not_parameters = frozenset({"input", "instructions"})

    def _parameters(self, body: Body, cache: ConversationCache | None) -> tuple[ToolTable, PolicyRequest]:
        one_answer(body)
        refuse_set(body, _REFUSED)
        repeatable(body, *REPEATED)
        table = tool_table(body)
        sampling = sampling_at(body, SAMPLING, budget="max_output_tokens")
        extra = {key: body[key] for key in _PASSED_ON if body.get(key) is not None}
        parameters, metadata = metadata_parameters(body)
        choice = parameters.pop("tool_choice", None)
        more = _NOTHING_MORE
        if parameters:
            _, more = _CHAT._parameters(parameters, None)
            sampling, extra = {**more.asked, **sampling}, {**more.extra, **extra, "metadata": metadata or None}
            extra = {key: value for key, value in extra.items() if value is not None}
        if table.tools and body.get("parallel_tool_calls") is not None:
            extra["parallel_tool_calls"] = flag_at(body, "parallel_tool_calls")
        if effort := optional_text(object_at(body, "reasoning", ""), "effort", "reasoning"):
            extra["reasoning_effort"] = effort
        top = number_at(body, "top_logprobs", low=0, whole=True)
        if top:
            extra["top_logprobs"] = top
        return table, PolicyRequest(
            messages=(),
            tools=table.tools or None,
            names=table.names,
            asked=sampling,
            stream=flag_at(body, "stream"),
            tool_choice=chosen(body.get("tool_choice") or choice, table),
            response_format=_format(object_at(object_at(body, "text", ""), "format", "text")) or more.response_format,
            logprobs=bool(top) or LOGPROBS in included(body) or more.logprobs,
            token_ids=wants_token_ids(body) or more.token_ids,
            extra=extra,
        )

    def _messages(self, body: Body, tools: ToolTable, cache: ConversationCache | None) -> list[dict[str, Any]]:
        value = body.get("input")
        instructions = body.get("instructions")
        start = [{"role": "system", "content": system_text(instructions, "instructions")}] if instructions else []
        if isinstance(value, str):
            return [*start, {"role": "user", "content": value}]
        if not isinstance(value, list | tuple) or not value:
            refuse("input", "must be a string, or a list of at least one item")
        items = lowered_history(cache, body.get("tools"), value, lambda at: _groups(value, at, tools))
        return lead_system([*start, *items])

    def reply(self, answer: Answer, request: PolicyRequest, body: Body) -> dict[str, Any]:
        """The last item has the token fields."""
        output: list[dict[str, Any]] = []
        if reasoning := reasoning_in(answer):
            item: dict[str, Any] = {"id": f"rs_{answer.answer_id}", "type": "reasoning"}
            item["summary"] = [{"type": "summary_text", "text": reasoning}]
            if ENCRYPTED in included(body):
                item["encrypted_content"] = made_up(answer, "reasoning")
            output.append(item)
        calls = calls_in(answer)
        text = text_in(answer)
        if text or not calls:
            output.append(_reply_message(answer, text, request))
        output += [_reply_call(answer, number, call, request) for number, call in enumerate(calls)]
        reason = _INCOMPLETE.get(answer.end)
        if reason and "status" in output[-1]:
            output[-1]["status"] = "incomplete"
        if request.token_ids and answer.tokens is not None:
            output[-1] |= token_fields(answer.tokens)
        counted = answer.usage
        response = response_object(answer.answer_id, answer.created_at, answer.model, body)
        return {
            **response,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": output,
            "usage": {
                "input_tokens": counted.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counted.cached_tokens},
                "output_tokens": counted.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
                "total_tokens": counted.prompt_tokens + counted.completion_tokens,
            },
        }

    def events(self, reply: Mapping[str, Any], *, with_usage: bool = True) -> Iterator[bytes]:
        for number, value in enumerate(_events(reply)):
            yield event({"type": value.pop("type"), "sequence_number": number, **value})

    def opening(self, answer_id: str, created_at: float, model: str, body: Body) -> dict[str, Any] | None:
        return begun(response_object(answer_id, created_at, model, body))


def _groups(items: Sequence[Any], start: int, table: ToolTable) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the items from ``start`` on as messages, each with the index at which its items end."""
    turn: dict[str, Any] | None = None  # the assistant message being assembled
    end = start
    for where, item in objects_in(items, "input", start):
        kind = item.get("type") or ("message" if "role" in item else None)
        alone = _separate_message(kind, item, where)
        opens = turn is None or (kind == "reasoning" and (turn.get("tool_calls") or turn["content"]))
        if turn is not None and (alone is not None or opens):
            yield end, [_finished_turn(turn)]
            turn = None
        end += 1
        if alone is not None:
            yield end, [alone]
            continue
        turn = turn or {"role": "assistant", "content": None}
        extend_turn(turn, kind, item, where, table)
    if turn is not None:
        yield end, [_finished_turn(turn)]


def _finished_turn(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["content"] is None and not turn.get("tool_calls"):
        turn["content"] = ""
    return turn


def _separate_message(kind: Any, item: Body, where: str) -> dict[str, Any] | None:
    """Return the message of an item that is a message by itself; ``None`` for an item of an answer."""
    if kind in _OUTPUTS:
        call_id = text_at(item, "id" if item.get("call_id") is None else "call_id", where)
        content = openai_content(item.get("output"), f"{where}.output") or ""
        return {"role": "tool", "tool_call_id": call_id, "content": content}
    role, at = item.get("role"), f"{where}.content"
    if kind != "message" or role == "assistant":
        return None
    if role in ("system", "developer"):
        return {"role": "system", "content": system_text(item.get("content"), at)}
    if role != "user":
        refuse(f"{where}.role", f"is {role!r}; it must be user, assistant, system or developer")
    return {"role": "user", "content": openai_content(item.get("content"), at) or ""}


def extend_turn(turn: dict[str, Any], kind: Any, item: Body, where: str, table: ToolTable) -> None:
    """Add an item of the assistant to the message it belongs to."""
    if kind == "message":
        turn["content"] = (turn["content"] or "") + (answer_text(item.get("content"), f"{where}.content") or "")
    elif kind == "reasoning":
        text = answer_text(item.get("content"), f"{where}.content") or "".join(
            text_at(part, "text", at) for at, part in objects_in(item.get("summary"), f"{where}.summary")
        )
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        turn.setdefault("tool_calls", []).append(_call(kind, item, where, table))
    elif kind == "item_reference":
        refuse(where, "refers to an item stored elsewhere; nothing is stored here: send the item itself")
    else:
        refuse(f"{where}.type", f"is {kind!r}: items of this type are not known here")


def _call(kind: str, item: Body, where: str, table: ToolTable) -> dict[str, Any]:
    if kind == "local_shell_call":
        arguments = shell_arguments(object_at(item, "action", where), f"{where}.action")
        call_id = text_at(item, "id" if item.get("call_id") is None else "call_id", where)
        return called(LOCAL_SHELL, call_id, arguments)
    call_id = text_at(item, "call_id", where)
    flat = table.flat_name(text_at(item, "name", where), optional_text(item, "namespace", where))
    if kind == "custom_tool_call":
        return called(flat, call_id, custom_arguments(text_at(item, "input", where), call_id, where))
    return called(flat, call_id, arguments_at(item, where))


def tool_table(body: Body) -> ToolTable:
    """Return the tools of a request."""
    table = ToolTable()
    grouped: list[tuple[str, Body]] = []
    for where, tool in objects_in(body.get("tools"), "tools"):
        if tool.get("type") == "namespace":
            grouped.append((where, tool))
        else:
            _add_tool(table, tool, where)
    # Plain tools first: if a grouped tool has the same flat name as a plain one, the grouped tool gets another name.
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
    settings = {key: value for key, value in form.items() if key != "type"}
    return {"type": kind, **({"json_schema": settings} if settings else {})}


# Responses ↔ Chat Completions, for endpoints that speak only one of them.

_ADAPTER = ResponsesAdapter()
_CHAT = ChatAdapter()
_NOTHING_MORE = PolicyRequest(messages=())
_SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    "metadata",
    "store",
    "service_tier",
    "stream",
)
_FINISH = {"max_output_tokens": "length", "content_filter": "content_filter"}
_ANSWER_ITEMS = ("message", "function_call", "custom_tool_call", "reasoning")


def chat_request(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Responses request to a Chat Completions request."""
    request = {key: params[key] for key in ("model", "stream") if params.get(key) is not None}
    request |= chat_body(_ADAPTER.lower(params))
    if request.get("stream"):
        request["stream_options"] = {"include_usage": True}
    return request


def chat_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None = None) -> list[dict[str, Any]]:
    """Convert input items of Responses to chat messages."""
    request = _ADAPTER.lower({"input": items, "instructions": instructions})
    return [dict(message) for message in request.messages]


def response_of_completion(completion: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a Responses object; the message's token ids go to its last item. Raises the errors
    of `answer_of_completion`."""
    message = completion["choices"][0]["message"]
    answer = answer_of_completion(
        completion,
        answer_id=uuid4().hex,
        created_at=completion.get("created") or time.time(),
        model=str(completion.get("model") or params.get("model") or "policy"),
    )
    request = PolicyRequest(messages=(), names=tool_table(params).names, logprobs=bool(params.get("top_logprobs")))
    response = _ADAPTER.reply(answer, request, params)
    response["output"][-1] |= {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    return response if completion.get("usage") else {**response, "usage": None}


def responses_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Chat Completions request to a Responses request."""
    body = {**{key: body[key] for key in _SHARED_FIELDS if body.get(key) is not None}, **chat_body(_CHAT.lower(body))}
    request: dict[str, Any] = {key: body[key] for key in _SHARED_FIELDS if body.get(key) is not None}
    request["input"] = _items(body["messages"])
    if (limit := body.get("max_tokens")) is not None:
        request["max_output_tokens"] = limit
    if effort := body.get("reasoning_effort"):
        request["reasoning"] = {"effort": effort}
    if tools := body.get("tools"):
        request["tools"] = [{"type": "function", "strict": False, **tool["function"]} for tool in tools]
    if (choice := body.get("tool_choice")) is not None:
        names_tool = isinstance(choice, Mapping)
        request["tool_choice"] = {"type": "function", **choice["function"]} if names_tool else choice
    if form := body.get("response_format"):
        request["text"] = {"format": {"type": form.get("type"), **(form.get("json_schema") or {})}}
    return request


def _items(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            output = _input_content(content)
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
        elif role == "assistant":
            if content:
                items.append({"type": "message", "role": "assistant", "content": text_of(content)})
            items += [
                {"type": "function_call", "call_id": call["id"], **call["function"]}
                for call in message.get("tool_calls") or ()
            ]
        else:
            items.append({"type": "message", "role": role, "content": _input_content(content)})
    return items


def _input_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part.get("type") == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in content
    ]


BROKEN_OFF = frozenset({"failed", "cancelled"})
"""Statuses of responses that the endpoint did not finish."""


def require_whole(response: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a Responses object that the endpoint did not finish."""
    if (status := response.get("status")) in BROKEN_OFF:
        said = (response.get("error") or {}).get("message") or f"its status is '{status}'"
        raise ModelError(f"the model endpoint could not finish its answer: {said}", retryable=True)


def completion_of_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a Responses object to a chat completion. Raises `ModelError` for one that was not finished, because a
    completion cannot say so."""
    require_whole(response)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for where, item in objects_in(response.get("output"), "output"):
        kind = item.get("type")
        if kind in _ANSWER_ITEMS:
            extend_turn(message, kind, item, where, ToolTable())
            message |= {key: item[key] for key in TOKEN_FIELDS if item.get(key) is not None}
    reason = (response.get("incomplete_details") or {}).get("reason")
    finish = _FINISH.get(str(reason)) or ("tool_calls" if message.get("tool_calls") else "stop")
    usage = Usage.of(response.get("usage"))
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": int(response.get("created_at") or time.time()),
        "model": response.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }
