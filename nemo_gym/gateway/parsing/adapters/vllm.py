"""The parsers of an installed vLLM, by the names of its ``--tool-call-parser`` and ``--reasoning-parser``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.adapters.guarded import GuardedCalls, GuardedReasoning
from nemo_gym.gateway.parsing.adapters.packages import imported, transformers_tokenizer, unknown_parser
from nemo_gym.gateway.parsing.answers import Tool

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens.policy import PolicyTokenizer

_TOOL_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
"""Where the registry is, and where it was in releases before 0.13."""


def vllm_calls(name: str, policy: PolicyTokenizer) -> GuardedCalls:
    """Raises `ConfigError` where vLLM is not installed, or has no such parser."""
    full = f"vllm:{name}"
    manager = imported("tool_parser", full, *_TOOL_PARSERS).ToolParserManager
    try:
        kind = manager.get_tool_parser(name)
    except KeyError as error:
        raise unknown_parser("tool_parser", full, _registered(manager)) from error
    tokenizer = transformers_tokenizer("tool_parser", full, policy)
    takes_tools = "tools" in inspect.signature(kind).parameters
    request_type = _request_type("tool_parser", full)

    def extract(text: str, tools: Sequence[Tool] | None) -> tuple[str | None, Iterable[tuple[object, object]]]:
        request = _request(request_type, tools)
        parser = kind(tokenizer, request.tools) if takes_tools else kind(tokenizer)  # it keeps state per answer
        found = parser.extract_tool_calls(text, request)
        return found.content, [(call.function.name, call.function.arguments) for call in found.tool_calls]

    with _usable("tool_parser", full):
        extract("", None)
    return GuardedCalls(full, extract)


def vllm_reasoning(name: str, policy: PolicyTokenizer) -> GuardedReasoning:
    """Raises `ConfigError` where vLLM is not installed, or has no such parser."""
    full = f"vllm:{name}"
    manager = imported("reasoning_parser", full, "vllm.reasoning").ReasoningParserManager
    try:
        kind = manager.get_reasoning_parser(name)
    except KeyError as error:
        raise unknown_parser("reasoning_parser", full, _registered(manager)) from error
    tokenizer = transformers_tokenizer("reasoning_parser", full, policy)
    request_type = _request_type("reasoning_parser", full)
    with _usable("reasoning_parser", full):
        kind(tokenizer)

    def extract(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        parser = kind(tokenizer)
        if hasattr(parser, "set_prompt_token_ids"):
            parser.set_prompt_token_ids(policy.encode(prompt_tail))
        method = getattr(parser, "extract_reasoning", None) or parser.extract_reasoning_content
        reasoning, content = method(text, _request(request_type, None))
        return reasoning, content

    return GuardedReasoning(full, extract)


@contextmanager
def _usable(field: str, full: str) -> Iterator[None]:
    """Its parsers say when they are made that a tokenizer lacks their tokens: at the start, not on every answer."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{field}: '{full}' cannot be used with this policy: {error}") from error


def _registered(manager: Any) -> Sequence[str]:
    names: Sequence[str] = manager.list_registered()
    return names


def _request_type(field: str, full: str) -> Any:
    places = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")
    return imported(field, full, *places).ChatCompletionRequest


def _request(request_type: Any, tools: Sequence[Tool] | None) -> Any:
    offered = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"} if tools else {}
    return request_type(model="policy", messages=[], **offered)
