"""Which formats a policy writes, by what its chat template itself makes of an answer with reasoning and a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nemo_gym.gateway.parsing.answers import ParsedCall, Segment
from nemo_gym.gateway.parsing.formats import CALL_FORMATS
from nemo_gym.gateway.parsing.formats.harmony import Harmony
from nemo_gym.gateway.parsing.reasoning import REASONING_FORMATS, TaggedReasoning
from nemo_gym.gateway.tokens.policy import PolicyTokenizer
from nemo_gym.gateway.tokens.template import TemplateRefusedError

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
"""The first is how some policies name a call, the second what others insist on."""


def detected_calls(policy: PolicyTokenizer) -> str | None:
    """Name of the format of calls that the policy's template writes; nothing for one that is none of ours."""
    for call_id in _CALL_IDS:
        for content in ("answerprobe", ""):
            answer = _answer(policy, {"content": content, "tool_calls": [_call(call_id)]})
            if answer is not None:
                for name, calls in CALL_FORMATS.items():
                    if _reads(calls.split(answer, [_TOOL])):
                        return name
                if _reads(Harmony().parse(answer, prompt_tail="", tools=[_TOOL]).calls):
                    return "harmony"
    return None


def detected_reasoning(policy: PolicyTokenizer) -> str:
    """Name of the format of reasoning that the policy's template writes, opens in its prompt, or takes out of history;
    ``none`` where it knows of none of ours."""
    shown = _answer(policy, {"content": "answerprobe", "reasoning_content": _THOUGHT}) or ""
    source = policy.template.source
    for name, tags in REASONING_FORMATS.items():
        if isinstance(tags, TaggedReasoning):
            reasoning, rest = tags.split(shown[max(shown.find(tags.opening), 0) :], "")
            if (reasoning == _THOUGHT and rest is not None) or tags.closing in source or tags.opening in source:
                return name
    return "none"


def _reads(segments: Sequence[Segment]) -> bool:
    found = [segment for segment in segments if isinstance(segment, ParsedCall)]
    return [call.name for call in found] == [_NAME] and orjson.loads(found[0].arguments) == _ARGUMENTS


def _call(call_id: str) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": orjson.dumps(_ARGUMENTS).decode()}
    return {"id": call_id, "type": "function", "function": function}


def _answer(policy: PolicyTokenizer, message: Mapping[str, Any]) -> str | None:
    """How the template writes an answer, without its prompt and the token that ends it."""
    question = {"role": "user", "content": "questionprobe"}
    tools = [_TOOL] if policy.traits.tool_use else None
    try:
        whole = policy.render([question, {"role": "assistant", **message}], tools=tools, add_generation_prompt=False)
        prompt = policy.render([question], tools=tools)
    except TemplateRefusedError:
        return None
    at = whole.rfind("questionprobe") + len("questionprobe")
    if whole.startswith(prompt):
        at = len(prompt)
    end = policy.find_stop(whole, at) if policy.turn_end is not None else None
    return whole[at:end]
