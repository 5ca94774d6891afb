"""Third parties' parsers, by import path."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.parsing.adapters.guarded import GuardedAnswers
from nemo_gym.gateway.parsing.answers import CallFormat, ParsedAnswer, ParsedCall, Segment, Tool

if TYPE_CHECKING:
    from nemo_gym.gateway.tokens.policy import PolicyTokenizer

_log = logging.getLogger(__name__)


def made_by(field: str, path: str, policy: PolicyTokenizer) -> object:
    """What the factory at ``package.module:name`` makes for a policy. Raises `ConfigError` when it cannot be had."""
    module, _, name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{field}: cannot import '{path}' ({error})") from error
    if not callable(factory):
        raise ConfigError(f"{field}: '{path}' is no factory; it is called with the policy's tokenizer")
    made: object = factory(policy)
    return made


def guarded_parse(name: str, parse: Callable[..., ParsedAnswer]) -> GuardedAnswers:
    """A third party's parser of whole answers."""

    def extract(text: str, prompt_tail: str, tools: Sequence[Tool] | None) -> ParsedAnswer:
        return parse(text, prompt_tail=prompt_tail, tools=tools)

    return GuardedAnswers(name, extract)


def guarded_split(name: str, calls: CallFormat) -> CallFormat:
    """A third party's format of calls, which keeps the places of text and calls."""
    return _GuardedSplit(name, calls)


class _GuardedSplit:
    def __init__(self, name: str, calls: CallFormat) -> None:
        self._name = name
        self._calls = calls
        self._warned = False

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        try:
            segments = list(self._calls.split(text, tools))
            if not all(isinstance(segment, str | ParsedCall) for segment in segments):
                raise TypeError("it gave something that is neither text nor a ParsedCall")
        except Exception as error:  # noqa: BLE001 - foreign code; an answer it fails on is an answer all the same
            if not self._warned:
                self._warned = True
                _log.warning("parser '%s' failed on an answer, which stays text (%s)", self._name, error)
            return [text]
        return segments
