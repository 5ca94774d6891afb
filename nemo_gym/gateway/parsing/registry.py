"""Answer parsers by name: those of this package, those of engines that are installed, and third parties'."""

from __future__ import annotations

import logging
from collections.abc import Collection

from nemo_gym.configuration.suggest import nearest
from nemo_gym.errors import ConfigError
from nemo_gym.gateway.parsing.answers import AnswerParser, CallFormat, ReasoningFormat
from nemo_gym.gateway.parsing.composed import ComposedParser
from nemo_gym.gateway.parsing.detection import detected_calls, detected_reasoning
from nemo_gym.gateway.parsing.formats import CALL_FORMATS
from nemo_gym.gateway.parsing.reasoning import REASONING_FORMATS
from nemo_gym.gateway.tokens.policy import PolicyTokenizer

_log = logging.getLogger(__name__)


def answer_parser(
    policy: PolicyTokenizer, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> AnswerParser:
    """The parser for a policy's answers.

    ``auto`` takes the format that the policy's chat template writes; where that is none of those known here, answers
    stay text, which the log and the parser's ``name`` say (``text``).
    Raises `ConfigError` for unknown names, listing those there are.
    """
    calls, calls_name = _calls(policy, tool_parser)
    reasoning, reasoning_name = _reasoning(policy, reasoning_parser)
    return ComposedParser(f"{calls_name}+{reasoning_name}", reasoning, calls)


def _calls(policy: PolicyTokenizer, name: str) -> tuple[CallFormat | None, str]:
    if name == "auto":
        found = detected_calls(policy)
        if found is None:
            _log.warning(
                "tool_parser: the policy's chat template writes tool calls in none of the known formats; answers stay"
                " text (set tool_parser to one of %s)",
                ", ".join(CALL_FORMATS),
            )
            return None, "text"
        name = found
    if name == "none":
        return None, "text"
    if name not in CALL_FORMATS:
        raise _unknown("tool_parser", name, ["auto", "none", *CALL_FORMATS])
    return CALL_FORMATS[name], name


def _reasoning(policy: PolicyTokenizer, name: str) -> tuple[ReasoningFormat, str]:
    if name == "auto":
        name = detected_reasoning(policy)
    if name not in REASONING_FORMATS:
        raise _unknown("reasoning_parser", name, ["auto", *REASONING_FORMATS])
    return REASONING_FORMATS[name], name


def _unknown(field: str, name: str, known: Collection[str]) -> ConfigError:
    return ConfigError(f"{field}: unknown parser '{name}'{nearest(name, known)}; known are {', '.join(known)}")
