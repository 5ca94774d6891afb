"""Converts the lowered request and answer to and from Chat Completions, for an endpoint that speaks this dialect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from nemo_gym.gateway.dialects.content import kind_of
from nemo_gym.gateway.policy_request import (
    Answer,
    AnswerEnd,
    AnswerTokens,
    AnswerUsage,
    PolicyRequest,
    tokens_counted,
)
from nemo_gym.gateway.tokens.history import text_of

BROKEN_OFF = frozenset({"abort", "error", "insufficient_system_resource"})
"""Finish reasons of answers that the endpoint did not finish: those of vLLM and SGLang, OpenRouter, and DeepSeek."""
_ENDS = {end.value: end for end in AnswerEnd} | {"function_call": AnswerEnd.TOOL_CALLS}


def chat_body(request: PolicyRequest) -> dict[str, Any]:
    """Return the request as a body of Chat Completions, without ``model`` and ``stream``, which the caller adds."""
    body: dict[str, Any] = {**request.extra, "messages": [*request.messages], **request.asked}
    tools = [*(request.tools or ()), *request.deferred]
    if tools:
        body["tools"] = tools
        choice = request.tool_choice
        if isinstance(choice, Mapping):
            body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
        elif choice != "auto":
            body["tool_choice"] = choice
    else:
        body.pop("parallel_tool_calls", None)
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if request.logprobs:
        body["logprobs"] = True
    else:
        body.pop("top_logprobs", None)
    return body


def answer_of_completion(
    completion: Mapping[str, Any], *, answer_id: str, created_at: float, model: str | None = None
) -> Answer:
    """Return the answer in an endpoint's chat completion; ``model`` overrides the name in it. Raises `KeyError`,
    `IndexError`, `TypeError` or `ValueError` for anything that is no chat completion."""
    try:
        choice = completion["choices"][0]
        message = message_of(choice["message"], answer_id)
        stop = choice.get("stop_reason")
        return Answer(
            answer_id=answer_id,
            created_at=created_at,
            model=str(model or completion.get("model") or "policy"),
            message=message,
            end=end_of(choice.get("finish_reason"), message),
            usage=usage_of(completion.get("usage")),
            stop=stop if isinstance(stop, str) else None,
            tokens=_tokens(choice),
        )
    except AttributeError as error:  # another type in place of an object
        raise TypeError(str(error)) from error


def message_of(said: Mapping[str, Any], answer_id: str) -> dict[str, Any]:
    """Return the parts of an endpoint's message that every dialect can carry, under uniform names. Calls without an id
    get one that is derived from ``answer_id``. Raises `TypeError` or `ValueError` for content that is no text."""
    content, thought = _text_and_thought(said.get("content"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if not message["content"] and isinstance(refusal := said.get("refusal"), str) and refusal:
        message |= {"content": refusal, "refusal": refusal}
    thoughts = (said.get("reasoning_content"), said.get("reasoning"), thought)
    if reasoning := next((thought for thought in thoughts if isinstance(thought, str) and thought), None):
        message["reasoning_content"] = reasoning
    if calls := said.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.get("id") or f"call_{answer_id[:20]}{number:02d}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _arguments(call["function"].get("arguments")),
                },
            }
            for number, call in enumerate(calls)
        ]
    return message


def _text_and_thought(content: Any) -> tuple[str | None, str]:
    """Return the text in an answer's content, and the reasoning if the content is in parts, as Mistral's models send
    it."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise TypeError(f"'content' is {kind_of(content)}")
    text = thought = ""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        if kind in ("text", "output_text"):
            text += text_of([part])
        elif kind in ("thinking", "reasoning"):
            thought += text_of(part.get(kind) or part.get("text"))
        else:
            raise ValueError(f"'content' has a part of another type than text and thinking: {kind}")
    return text, thought


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode() if arguments else ""


def end_of(finish_reason: Any, message: Mapping[str, Any]) -> AnswerEnd:
    """Return why the answer ended, from the endpoint's finish reason and the message's calls."""
    end = _ENDS.get(str(finish_reason), AnswerEnd.STOP)
    return AnswerEnd.TOOL_CALLS if message.get("tool_calls") and end is AnswerEnd.STOP else end


def usage_of(reported: Any) -> AnswerUsage:
    """Return an endpoint's token counts; zeros if it sent none. Raises `ValueError` for values that are not counts."""
    if not isinstance(reported, Mapping):
        return AnswerUsage()
    details = (reported.get("prompt_tokens_details"), reported.get("completion_tokens_details"))
    prompt, output = (detail if isinstance(detail, Mapping) else {} for detail in details)
    return AnswerUsage(
        prompt_tokens=tokens_counted(reported.get("prompt_tokens")),
        completion_tokens=tokens_counted(reported.get("completion_tokens")),
        cached_tokens=tokens_counted(prompt.get("cached_tokens")),
        reasoning_tokens=tokens_counted(output.get("reasoning_tokens")),
    )


def _tokens(choice: Mapping[str, Any]) -> AnswerTokens | None:
    """Return the tokens in the endpoint's reply: ids as from NeMo Gym's model servers, or texts and logprobs."""
    message = choice["message"]
    entries = (choice.get("logprobs") or {}).get("content") or None
    texts = [str(entry["token"]) for entry in entries] if entries else None
    logprobs = [float(entry["logprob"]) for entry in entries] if entries else None
    if (ids := message.get("generation_token_ids")) is None:
        return None if texts is None else AnswerTokens([], [], logprobs, texts)
    if (message_logprobs := message.get("generation_log_probs")) is not None:
        logprobs = message_logprobs
    return AnswerTokens(message.get("prompt_token_ids") or [], ids, logprobs, texts)
