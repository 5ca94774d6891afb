"""Parsers of other packages, imported on use: those of engines, of transformers, and of third parties."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.formats import ParsedAnswer, ParsedCall, Segment, Tool, is_object

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens.policy import PolicyTokenizer


# Importing packages that are not dependencies of this one, with errors that name the missing package.


def imported(field: str, parser: str, *modules: str) -> Any:
    """Import the first of ``modules`` that exists. Raises `ConfigError` for a missing or broken package."""
    problem: ImportError | None = None
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            # If a module exists but lacks a dependency, that is the error to report.
            gone = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
            problem = problem if gone and problem is not None else error
    package = modules[0].split(".")[0]
    raise ConfigError(
        f"{field}: '{parser}' needs the package '{package}' in the gateway's environment ({problem})"
    ) from problem


def unknown_parser(field: str, name: str, known: Iterable[str], elsewhere: str = "") -> ConfigError:
    listed = [*known]
    return ConfigError(
        f"{field}: unknown parser '{name}'{nearest(name, listed)}; known are {', '.join(listed)}{elsewhere}"
    )


def transformers_tokenizer(field: str, parser: str, policy: PolicyTokenizer) -> Any:
    """Return the policy's tokenizer in the class that engines' parsers need."""
    kind = imported(field, parser, "transformers").PreTrainedTokenizerFast
    return kind(tokenizer_object=policy.tokenizer)


# Guards around foreign parsers: these may raise, and their calls are checked before use.

_log = logging.getLogger(__name__)


class _Guarded:
    """A parser of another package, and a context that suppresses its failures, so that the answer stays text. Only the
    first failure is logged: a parser that fails on one answer fails on many."""

    def __init__(self, name: str, foreign: Callable[..., Any]) -> None:
        self.name = name
        self._foreign = foreign
        self._failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and not self._failed:
            self._failed = True
            _log.warning(
                "parser '%s' failed on an answer, which stays text (%s: %s)", self.name, type(error).__name__, error
            )
        return isinstance(error, Exception)


class GuardedCalls(_Guarded):
    """A format of calls: ``(text, tools)`` → text and calls, in order."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        with self:
            segments = list(self._foreign(text, tools))
            if not all(isinstance(segment, str | ParsedCall) for segment in segments):
                raise TypeError("it gave something that is neither text nor a ParsedCall")
            return segments
        return [text]  # reached after a failure


class GuardedReasoning(_Guarded):
    """A format of reasoning: ``(text, prompt_tail)`` → reasoning and content."""

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        with self:
            reasoning, content = self._foreign(text, prompt_tail)
            thought = (reasoning or "").strip() or None
            if thought is None and (content or "").strip() == text.strip():
                return None, text
            return thought, (content or "").lstrip() or None
        return None, text  # reached after a failure


class GuardedAnswers(_Guarded):
    """A parser of whole answers: ``(text, prompt_tail=…, tools=…)`` → the answer."""

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        with self:
            answer: ParsedAnswer = self._foreign(text, prompt_tail=prompt_tail, tools=tools)
            for call in answer.calls:
                _checked(call.name, call.arguments)
            if parse_calls or not answer.calls:
                return answer
        return ParsedAnswer(text)  # reached after a failure as well


def _checked(name: object, arguments: object) -> ParsedCall:
    if not isinstance(name, str) or not name or not isinstance(arguments, str) or not is_object(arguments):
        raise ValueError(f"it gave a call '{name}' whose arguments are no JSON object")
    return ParsedCall(name, arguments)


def _text_and_calls(text: str, content: str | None, calls: Iterable[tuple[object, object]]) -> list[Segment]:
    """Return the segments of ``text`` from engines' parsers, which do not return the places of calls: the text comes
    before them."""
    checked = [_checked(*call) for call in calls]
    return [content or "", *checked] if checked else [text]


# transformers' parser of whole answers, controlled by a ``response_template`` in model repositories.

_REASONING = ("reasoning_content", "reasoning", "thinking")


def transformers_answers(path: str) -> GuardedAnswers:
    """Return transformers' parser. ``path``: a model's directory, whose ``tokenizer_config.json`` has the template, or
    a JSON file with the template itself.

    It parses arguments to data, so their JSON is serialized again. Raises `ConfigError` for anything missing.
    """
    full = f"transformers:{path}"
    template = _template(Path(path))
    parse = imported("tool_parser", full, "transformers.utils.chat_parsing").parse_response

    def answer(text: str, prompt_tail: str, tools: Sequence[Tool] | None) -> ParsedAnswer:
        offered = [dict(tool) for tool in tools] if tools else None
        return _answer(parse(text, template, prefix=prompt_tail, tools=offered))

    try:
        parse("", {**template, "fields": {**template["fields"]}}, prefix="", tools=None)
    except (ValueError, KeyError, TypeError) as error:
        if "missing from parsed output" not in str(error):  # an empty answer may lack required fields
            raise ConfigError(f"tool_parser: '{path}' holds no response_template ({error})") from error
    return GuardedAnswers(full, answer)


def _template(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json" if path.is_dir() else path
    try:
        config = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"tool_parser: cannot read '{file}' ({error})") from error
    template = config.get("response_template", config) if isinstance(config, dict) else None
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
    remaining_content = content if content or not (calls or reasoning) else None
    return ParsedAnswer(remaining_content, reasoning, tuple(calls))


# The parsers of an installed vLLM, by the names of its ``--tool-call-parser`` and ``--reasoning-parser``.

_TOOL_PARSERS = ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers")
"""The module of the registry, and that of releases before 0.13."""


def vllm_calls(name: str, policy: PolicyTokenizer) -> GuardedCalls:
    """Return vLLM's parser of calls. Raises `ConfigError` if vLLM is not installed, or has no such parser."""
    full = f"vllm:{name}"
    manager = imported("tool_parser", full, *_TOOL_PARSERS).ToolParserManager
    kind = _registered("tool_parser", full, manager, manager.get_tool_parser)
    tokenizer = transformers_tokenizer("tool_parser", full, policy)
    takes_tools = "tools" in inspect.signature(kind).parameters
    request_type = _request_type("tool_parser", full)

    def split(text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        request = _request(request_type, tools)
        parser = kind(tokenizer, request.tools) if takes_tools else kind(tokenizer)  # it keeps state per answer
        parsed = parser.extract_tool_calls(text, request)
        calls = ((call.function.name, call.function.arguments) for call in parsed.tool_calls)
        return _text_and_calls(text, parsed.content, calls)

    with _checked_at_start("tool_parser", full):
        split("", None)
    return GuardedCalls(full, split)


def vllm_reasoning(name: str, policy: PolicyTokenizer) -> GuardedReasoning:
    """Return vLLM's parser of reasoning. Raises `ConfigError` if vLLM is not installed, or has no such parser."""
    full = f"vllm:{name}"
    manager = imported("reasoning_parser", full, "vllm.reasoning").ReasoningParserManager
    kind = _registered("reasoning_parser", full, manager, manager.get_reasoning_parser)
    tokenizer = transformers_tokenizer("reasoning_parser", full, policy)
    request_type = _request_type("reasoning_parser", full)
    with _checked_at_start("reasoning_parser", full):
        kind(tokenizer)

    def split(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        parser = kind(tokenizer)
        if hasattr(parser, "set_prompt_token_ids"):
            parser.set_prompt_token_ids(policy.encode(prompt_tail))
        method = getattr(parser, "extract_reasoning", None) or parser.extract_reasoning_content
        reasoning, content = method(text, _request(request_type, None))
        return reasoning, content

    return GuardedReasoning(full, split)


@contextmanager
def _checked_at_start(field: str, full: str) -> Iterator[None]:
    """Raise `ConfigError` for a parser whose tokens the tokenizer lacks: vLLM's parsers raise on their creation."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{field}: '{full}' cannot be used with this policy: {error}") from error


def _registered(field: str, full: str, manager: Any, find: Callable[[str], Any]) -> Any:
    try:
        return find(full.removeprefix("vllm:"))
    except KeyError as error:
        raise unknown_parser(field, full, sorted(manager.list_registered())) from error


def _request_type(field: str, full: str) -> Any:
    places = ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")
    return imported(field, full, *places).ChatCompletionRequest


def _request(request_type: Any, tools: Sequence[Tool] | None) -> Any:
    offered = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"} if tools else {}
    return request_type(model="policy", messages=[], **offered)


# The parsers of an installed SGLang, by the names of its ``--tool-call-parser`` and ``--reasoning-parser``.


def sglang_calls(name: str, policy: PolicyTokenizer) -> GuardedCalls:
    """Return SGLang's parser of calls. Raises `ConfigError` if SGLang is not installed, or has no such parser.

    SGLang itself drops calls of tools that were not offered, unless its environment is set otherwise.
    """
    full = f"sglang:{name}"
    kind = imported("tool_parser", full, "sglang.srt.function_call.function_call_parser").FunctionCallParser
    if name not in kind.ToolCallParserEnum:
        raise unknown_parser("tool_parser", full, sorted(kind.ToolCallParserEnum))
    protocol = imported("tool_parser", full, "sglang.srt.entrypoints.openai.protocol")
    options = _tokenizer_option(kind, "tool_parser", full, policy)

    def split(text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        offered = [protocol.Tool.model_validate(dict(tool)) for tool in tools or ()]
        parser = kind(offered, name, **options)  # it keeps state per answer
        content, raw_calls = parser.parse_non_stream(text)
        return _text_and_calls(text, content, ((call.name, call.parameters) for call in raw_calls))

    return GuardedCalls(full, split)


def sglang_reasoning(name: str, policy: PolicyTokenizer) -> GuardedReasoning:
    """Return SGLang's parser of reasoning. Raises `ConfigError` if SGLang is not installed, or has no such parser."""
    full = f"sglang:{name}"
    kind = imported("reasoning_parser", full, "sglang.srt.parser.reasoning_parser").ReasoningParser
    if name not in kind.DetectorMap:
        raise unknown_parser("reasoning_parser", full, sorted(kind.DetectorMap))
    options = _tokenizer_option(kind, "reasoning_parser", full, policy)

    def split(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        parser = kind(name, stream_reasoning=False, **options)
        opening = getattr(parser.detector, "think_start_token", None)
        if opening and prompt_tail.rstrip().endswith(opening):
            parser = kind(name, stream_reasoning=False, force_reasoning=True, **options)
        reasoning, content = parser.parse_non_stream(text)
        return reasoning, content

    return GuardedReasoning(full, split)


def _tokenizer_option(kind: Any, field: str, full: str, policy: PolicyTokenizer) -> dict[str, Any]:
    if "tokenizer" not in inspect.signature(kind).parameters:
        return {}
    return {"tokenizer": transformers_tokenizer(field, full, policy)}


# Third parties' parsers, by import path.


def made_by(field: str, path: str, policy: PolicyTokenizer) -> object:
    """Call the factory at ``package.module:name`` for a policy. Raises `ConfigError` if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: cannot import '{path}' ({error})") from error
    if not callable(factory):
        raise ConfigError(f"{field}: '{path}' is not callable; a factory is called with the policy's tokenizer")
    parser: object = factory(policy)
    return parser
