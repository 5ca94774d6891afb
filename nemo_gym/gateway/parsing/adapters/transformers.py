"""transformers' parser of whole answers, driven by a ``response_template`` that model repositories carry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.adapters.guarded import GuardedAnswers
from nemo_gym.gateway.parsing.adapters.packages import imported
from nemo_gym.gateway.parsing.answers import ParsedAnswer, ParsedCall, Tool

_REASONING = ("reasoning_content", "reasoning", "thinking")


def transformers_answers(path: str) -> GuardedAnswers:
    """``path``: a model's directory, whose ``tokenizer_config.json`` has the template, or a JSON file that is one.

    It reads arguments as data, so their JSON is written anew. Raises `ConfigError` for what is missing.
    """
    full = f"transformers:{path}"
    template = _template(Path(path))
    parse = imported("tool_parser", full, "transformers.utils.chat_parsing").parse_response

    def extract(text: str, prompt_tail: str, tools: Sequence[Tool] | None) -> ParsedAnswer:
        offered = [dict(tool) for tool in tools] if tools else None
        return _answer(parse(text, template, prefix=prompt_tail, tools=offered))

    try:
        parse("", {**template, "fields": {**template["fields"]}}, prefix="", tools=None)
    except (ValueError, KeyError, TypeError) as error:
        if "missing from parsed output" not in str(error):  # an empty answer may well lack what every answer has
            raise ConfigError(f"tool_parser: '{path}' holds no response_template ({error})") from error
    return GuardedAnswers(full, extract)


def _template(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json" if path.is_dir() else path
    try:
        found = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"tool_parser: cannot read '{file}' ({error})") from error
    template = found.get("response_template", found) if isinstance(found, dict) else None
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise ConfigError(f"tool_parser: '{file}' has no response_template; name a parser of calls instead")
    return template


def _answer(message: Mapping[str, Any]) -> ParsedAnswer:
    content = message.get("content")
    reasoning = next((found for key in _REASONING if (found := message.get(key))), None)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ParsedCall(function["name"], text))
    kept = content if content or not (calls or reasoning) else None
    return ParsedAnswer(kept, reasoning, tuple(calls))
