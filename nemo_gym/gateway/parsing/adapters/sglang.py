"""The parsers of an installed SGLang, by the names of its ``--tool-call-parser`` and ``--reasoning-parser``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nemo_gym.gateway.parsing.adapters.guarded import GuardedCalls, GuardedReasoning
from nemo_gym.gateway.parsing.adapters.packages import imported, transformers_tokenizer, unknown_parser
from nemo_gym.gateway.parsing.answers import Tool

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens.policy import PolicyTokenizer


def sglang_calls(name: str, policy: PolicyTokenizer) -> GuardedCalls:
    """Raises `ConfigError` where SGLang is not installed, or has no such parser.

    SGLang itself leaves calls to tools that were not offered out, unless its environment says otherwise.
    """
    full = f"sglang:{name}"
    kind = imported("tool_parser", full, "sglang.srt.function_call.function_call_parser").FunctionCallParser
    if name not in kind.ToolCallParserEnum:
        raise unknown_parser("tool_parser", full, kind.ToolCallParserEnum)
    protocol = imported("tool_parser", full, "sglang.srt.entrypoints.openai.protocol")
    options = _tokenizer_option(kind, "tool_parser", full, policy)

    def extract(text: str, tools: Sequence[Tool] | None) -> tuple[str | None, Iterable[tuple[object, object]]]:
        offered = [protocol.Tool.model_validate(dict(tool)) for tool in tools or ()]
        parser = kind(offered, name, **options)  # it keeps state per answer
        content, found = parser.parse_non_stream(text)
        return content, [(call.name, call.parameters) for call in found]

    return GuardedCalls(full, extract)


def sglang_reasoning(name: str, policy: PolicyTokenizer) -> GuardedReasoning:
    """Raises `ConfigError` where SGLang is not installed, or has no such parser."""
    full = f"sglang:{name}"
    kind = imported("reasoning_parser", full, "sglang.srt.parser.reasoning_parser").ReasoningParser
    if name not in kind.DetectorMap:
        raise unknown_parser("reasoning_parser", full, kind.DetectorMap)
    options = _tokenizer_option(kind, "reasoning_parser", full, policy)

    def extract(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        parser = kind(name, stream_reasoning=False, **options)
        opening = getattr(parser.detector, "think_start_token", None)
        if opening and prompt_tail.rstrip().endswith(opening):
            parser = kind(name, stream_reasoning=False, force_reasoning=True, **options)
        reasoning, content = parser.parse_non_stream(text)
        return reasoning, content

    return GuardedReasoning(full, extract)


def _tokenizer_option(kind: Any, field: str, full: str, policy: PolicyTokenizer) -> dict[str, Any]:
    if "tokenizer" not in inspect.signature(kind).parameters:
        return {}
    return {"tokenizer": transformers_tokenizer(field, full, policy)}
