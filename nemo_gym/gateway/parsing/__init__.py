"""From sampled text to content, reasoning and tool calls.

    parser = answer_parser(policy)                      # auto: what the policy's chat template writes
    answer = parser.parse(text, prompt_tail=…, tools=…)

No text is lost or added: markup that is no complete call stays content, and JSON that the policy wrote is passed on
unchanged.

`answer_parser` finds parsers by name, or the format that a policy's chat template writes (``auto``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.engine_parsers import (
    GuardedAnswers,
    GuardedCalls,
    GuardedReasoning,
    made_by,
    sglang_calls,
    sglang_reasoning,
    transformers_answers,
    unknown_parser,
    vllm_calls,
    vllm_reasoning,
)
from nemo_gym.gateway.parsing.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    AnswerParser,
    CallFormat,
    ComposedParser,
    Harmony,
    ParsedAnswer,
    ParsedCall,
    ReasoningFormat,
    Segment,
    Tool,
)
from nemo_gym.gateway.tokens.history import shared_length
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError

__all__ = [
    "AnswerParser",
    "CallFormat",
    "ParsedAnswer",
    "ParsedCall",
    "ReasoningFormat",
    "Segment",
    "Tool",
    "answer_parser",
]

_log = logging.getLogger(__name__)
_TOOL_PARSERS = ("auto", "none", *CALL_FORMATS, "harmony")
_REASONING_PARSERS = ("auto", "none", *REASONING_FORMATS)
_ELSEWHERE = "'vllm:name', 'sglang:name' or 'package.module:factory'"
_NAME, _ARGUMENTS = "record_probe", {"first": "some words", "second": "more\nwords"}
_THOUGHT = "thoughtprobe"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Records.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": "string", "description": "Words."} for key in _ARGUMENTS},
            "required": [*_ARGUMENTS],
        },
    },
}
_CALL_IDS = (f"functions.{_NAME}:0", "abcdef123")
"""Some policies require ids of the first form, others of the second."""


def detected_calls(policy: PolicyTokenizer) -> str:
    """Return the name of the format of calls that the policy's template writes; for an unknown one, ``none`` with a
    warning in the log."""
    for call_id in _CALL_IDS:
        for content in ("answerprobe", ""):
            answer = _rendered_answer(policy, {"content": content, "tool_calls": [_call(call_id)]})
            if answer is not None:
                for name, calls in CALL_FORMATS.items():
                    if _finds_probe_call(calls.split(answer, [_TOOL])):
                        return name
                if _finds_probe_call(Harmony().parse(answer, prompt_tail="", tools=[_TOOL]).calls):
                    return "harmony"
    _log.warning(
        "tool_parser: the policy's chat template does not write tool calls in any known format; answers stay text (set"
        " tool_parser to one of %s, or to %s)",
        ", ".join(_TOOL_PARSERS[1:]),
        _ELSEWHERE,
    )
    return "none"


def detected_reasoning(policy: PolicyTokenizer) -> str:
    """Return the name of the format of reasoning that the policy's template writes, opens in its prompt, or removes
    from history; ``none`` if the template has no known format."""
    shown = _rendered_answer(policy, {"content": "answerprobe", "reasoning_content": _THOUGHT}) or ""
    source = policy.template.source
    for name, tags in REASONING_FORMATS.items():
        reasoning, rest = tags.split(shown[max(shown.find(tags.opening), 0) :], "")
        if (reasoning == _THOUGHT and rest is not None) or tags.closing in source or tags.opening in source:
            return name
    return "none"


def _finds_probe_call(segments: Sequence[Segment]) -> bool:
    calls = [segment for segment in segments if isinstance(segment, ParsedCall)]
    return [call.name for call in calls] == [_NAME] and orjson.loads(calls[0].arguments) == _ARGUMENTS


def _call(call_id: str) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": orjson.dumps(_ARGUMENTS).decode()}
    return {"id": call_id, "type": "function", "function": function}


def _rendered_answer(policy: PolicyTokenizer, message: Mapping[str, Any]) -> str | None:
    """Return an answer as the template writes it, without its prompt and the token that ends it."""
    question = {"role": "user", "content": "questionprobe"}
    tools = [_TOOL] if policy.traits.tool_use else None
    try:
        whole = policy.render([question, {"role": "assistant", **message}], tools=tools, add_generation_prompt=False)
        prompt = policy.render([question], tools=tools)
    except TemplateRefusedError:
        return None
    at = max(shared_length(prompt, whole), whole.rfind("questionprobe") + len("questionprobe"))
    end = policy.find_stop(whole, at) if policy.turn_end is not None else None
    return whole[at:end]


# Answer parsers by name: those of this package, of installed engines, and of third parties.


def answer_parser(
    policy: PolicyTokenizer, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> AnswerParser:
    """Return the parser for a policy's answers.

    ``auto`` takes the format that the policy's chat template writes. If that format is unknown, answers stay text; the
    log has a warning, and the parser's ``name`` is ``text``.

    Either may also be ``vllm:name`` or ``sglang:name`` (a parser of the installed package), or
    ``package.module:factory``, which is called with the policy and returns a `CallFormat` or a `ReasoningFormat`. A
    parser of whole answers is set with ``tool_parser`` alone: ``harmony``, ``transformers:path`` (to a model's
    directory or a ``response_template``), or a factory that returns an `AnswerParser`.

    Raises `ConfigError` for unknown names (with a list of the known ones) and for missing packages.
    """
    calls_name = detected_calls(policy) if tool_parser == "auto" else tool_parser
    calls = _calls(policy, calls_name)
    if calls is not None and not isinstance(calls, CallFormat):
        if reasoning_parser not in ("auto", "none"):
            raise ConfigError(
                f"reasoning_parser: tool_parser '{tool_parser}' parses whole answers, reasoning included; leave it out"
            )
        return calls
    reasoning_name = detected_reasoning(policy) if reasoning_parser == "auto" else reasoning_parser
    name = f"{'text' if calls is None else calls_name}+{reasoning_name}"
    return ComposedParser(name, _reasoning(policy, reasoning_name), calls)


def _calls(policy: PolicyTokenizer, name: str) -> CallFormat | AnswerParser | None:
    if name == "none":
        return None
    if name == "harmony":
        return Harmony()
    if name in CALL_FORMATS:
        return CALL_FORMATS[name]
    package, parser_name = _package_and_name("tool_parser", name, _TOOL_PARSERS)
    if package == "vllm":
        return vllm_calls(parser_name, policy)
    if package == "sglang":
        return sglang_calls(parser_name, policy)
    if package == "transformers":
        return transformers_answers(parser_name)
    parser = made_by("tool_parser", name, policy)
    if isinstance(parser, CallFormat):
        return GuardedCalls(name, parser.split)
    if callable(parse := getattr(parser, "parse", None)):
        return GuardedAnswers(name, parse)
    raise ConfigError(f"tool_parser: the object from factory '{name}' has neither 'split' nor 'parse'")


def _reasoning(policy: PolicyTokenizer, name: str) -> ReasoningFormat | None:
    if name == "none":
        return None
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name]
    package, parser_name = _package_and_name("reasoning_parser", name, _REASONING_PARSERS)
    if package == "vllm":
        return vllm_reasoning(parser_name, policy)
    if package == "sglang":
        return sglang_reasoning(parser_name, policy)
    parser = made_by("reasoning_parser", name, policy)
    if not callable(split := getattr(parser, "split", None)):
        raise ConfigError(f"reasoning_parser: the object from factory '{name}' has no method 'split'")
    return GuardedReasoning(name, split)


def _package_and_name(field: str, name: str, known: Sequence[str]) -> tuple[str, str]:
    package, colon, parser_name = name.partition(":")
    if not colon:
        raise unknown_parser(field, name, known, f", and {_ELSEWHERE}")
    return package, parser_name
