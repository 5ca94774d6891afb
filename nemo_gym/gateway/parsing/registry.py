"""Answer parsers by name: those of this package, those of engines that are installed, and third parties'."""

from __future__ import annotations

import logging
from collections.abc import Collection

from nemo_gym._util.suggest import nearest
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.adapters.guarded import GuardedReasoning
from nemo_gym.gateway.parsing.adapters.sglang import sglang_calls, sglang_reasoning
from nemo_gym.gateway.parsing.adapters.third_party import guarded_parse, guarded_split, made_by
from nemo_gym.gateway.parsing.adapters.transformers import transformers_answers
from nemo_gym.gateway.parsing.adapters.vllm import vllm_calls, vllm_reasoning
from nemo_gym.gateway.parsing.answers import AnswerParser, CallFormat, ReasoningFormat
from nemo_gym.gateway.parsing.composed import ComposedParser
from nemo_gym.gateway.parsing.detection import detected_calls, detected_reasoning
from nemo_gym.gateway.parsing.formats import CALL_FORMATS
from nemo_gym.gateway.parsing.formats.harmony import Harmony
from nemo_gym.gateway.parsing.reasoning import REASONING_FORMATS
from nemo_gym.gateway.tokens.policy import PolicyTokenizer

_log = logging.getLogger(__name__)
_TOOL_PARSERS = ("auto", "none", *CALL_FORMATS, "harmony")
_REASONING_PARSERS = ("auto", *REASONING_FORMATS)
_ELSEWHERE = "'vllm:name', 'sglang:name' or 'package.module:factory'"


def answer_parser(
    policy: PolicyTokenizer, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> AnswerParser:
    """The parser for a policy's answers.

    ``auto`` takes the format that the policy's chat template writes; where that is none of those known here, answers
    stay text, which the log and the parser's ``name`` say (``text``).

    Either may also be ``vllm:name`` or ``sglang:name`` (their parsers, where the package is installed), or
    ``package.module:factory``: called with the policy, it makes a `CallFormat` or a `ReasoningFormat`. Parsers of
    whole answers go in ``tool_parser`` alone: ``harmony``, ``transformers:path`` (to a model's directory or a
    ``response_template``), or a factory that makes an `AnswerParser`.

    Raises `ConfigError` for unknown names, listing those there are, and for packages that are missing.
    """
    calls = _calls(policy, tool_parser)
    if not isinstance(calls, tuple):
        if reasoning_parser not in ("auto", "none"):
            raise ConfigError(
                f"reasoning_parser: tool_parser '{tool_parser}' parses whole answers, reasoning included; leave it out"
            )
        return calls
    reasoning, reasoning_name = _reasoning(policy, reasoning_parser)
    return ComposedParser(f"{calls[1]}+{reasoning_name}", reasoning, calls[0])


def _calls(policy: PolicyTokenizer, name: str) -> tuple[CallFormat | None, str] | AnswerParser:
    if name == "auto":
        found = detected_calls(policy)
        if found is None:
            _log.warning(
                "tool_parser: the policy's chat template writes tool calls in none of the known formats; answers stay"
                " text (set tool_parser to one of %s, or to %s)",
                ", ".join(_TOOL_PARSERS[1:]),
                _ELSEWHERE,
            )
            return None, "text"
        name = found
    if name == "none":
        return None, "text"
    if name == "harmony":
        return Harmony()
    if name in CALL_FORMATS:
        return CALL_FORMATS[name], name
    package, colon, rest = name.partition(":")
    if not colon:
        raise _unknown("tool_parser", name, _TOOL_PARSERS)
    if package == "vllm":
        return vllm_calls(rest, policy), name
    if package == "sglang":
        return sglang_calls(rest, policy), name
    if package == "transformers":
        return transformers_answers(rest)
    made = made_by("tool_parser", name, policy)
    if isinstance(made, CallFormat):
        return guarded_split(name, made), name
    if callable(parse := getattr(made, "parse", None)):
        return guarded_parse(name, parse)
    raise ConfigError(f"tool_parser: what '{name}' makes has neither a method 'split' nor 'parse'")


def _reasoning(policy: PolicyTokenizer, name: str) -> tuple[ReasoningFormat, str]:
    if name == "auto":
        name = detected_reasoning(policy)
    if name in REASONING_FORMATS:
        return REASONING_FORMATS[name], name
    package, colon, rest = name.partition(":")
    if not colon:
        raise _unknown("reasoning_parser", name, _REASONING_PARSERS)
    if package == "vllm":
        return vllm_reasoning(rest, policy), name
    if package == "sglang":
        return sglang_reasoning(rest, policy), name
    made = made_by("reasoning_parser", name, policy)
    if not callable(split := getattr(made, "split", None)):
        raise ConfigError(f"reasoning_parser: what '{name}' makes has no method 'split'")
    return GuardedReasoning(name, split), name


def _unknown(field: str, name: str, known: Collection[str]) -> ConfigError:
    return ConfigError(
        f"{field}: unknown parser '{name}'{nearest(name, known)}; known are {', '.join(known)}, and {_ELSEWHERE}"
    )
