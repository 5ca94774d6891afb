"""Foreign parsers behind one door: they may raise, and their calls are checked before anybody relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from nemo_gym.gateway.parsing.answers import ParsedAnswer, ParsedCall, Segment, Tool
from nemo_gym.gateway.parsing.json_text import is_object

_log = logging.getLogger(__name__)

ExtractCalls = Callable[[str, Sequence[Tool] | None], tuple[str | None, Iterable[tuple[object, object]]]]
"""``(text, tools)`` → what is left of the text, and the calls' names and arguments."""
ExtractReasoning = Callable[[str, str], tuple[str | None, str | None]]
"""``(text, prompt_tail)`` → reasoning and content."""
ExtractAnswer = Callable[[str, str, Sequence[Tool] | None], ParsedAnswer]
"""``(text, prompt_tail, tools)`` → the whole answer."""


@dataclass(slots=True)
class _Warned:
    """A parser that fails on one answer fails on many; the log says so once."""

    name: str
    done: bool = False

    def warn(self, error: Exception) -> None:
        if not self.done:
            self.done = True
            _log.warning(
                "parser '%s' failed on an answer, which stays text (%s: %s)", self.name, type(error).__name__, error
            )


@dataclass(slots=True)
class GuardedCalls:
    """Calls as another package's parser finds them. It tells no places, so its text comes before its calls."""

    name: str
    extract: ExtractCalls
    _warned: _Warned = field(init=False)

    def __post_init__(self) -> None:
        self._warned = _Warned(self.name)

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        try:
            content, found = self.extract(text, tools)
            calls = [_checked(*call) for call in found]
        except Exception as error:  # noqa: BLE001 - foreign code; an answer it fails on is an answer all the same
            self._warned.warn(error)
            return [text]
        return [content or "", *calls] if calls else [text]


@dataclass(slots=True)
class GuardedReasoning:
    """Reasoning as another package's parser finds it."""

    name: str
    extract: ExtractReasoning
    _warned: _Warned = field(init=False)

    def __post_init__(self) -> None:
        self._warned = _Warned(self.name)

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        try:
            reasoning, content = self.extract(text, prompt_tail)
        except Exception as error:  # noqa: BLE001 - foreign code; see above
            self._warned.warn(error)
            return None, text
        thought = (reasoning or "").strip() or None
        if thought is None and (content or "").strip() == text.strip():
            return None, text
        return thought, (content or "").lstrip() or None


@dataclass(slots=True)
class GuardedAnswers:
    """Whole answers as another package's parser reads them."""

    name: str
    extract: ExtractAnswer
    _warned: _Warned = field(init=False)

    def __post_init__(self) -> None:
        self._warned = _Warned(self.name)

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        try:
            answer = self.extract(text, prompt_tail, tools)
            for call in answer.calls:
                _checked(call.name, call.arguments)
        except Exception as error:  # noqa: BLE001 - foreign code; see above
            self._warned.warn(error)
            return ParsedAnswer(text)
        return answer if parse_calls or not answer.calls else ParsedAnswer(text)


def _checked(name: object, arguments: object) -> ParsedCall:
    if not isinstance(name, str) or not name or not isinstance(arguments, str) or not is_object(arguments):
        raise ValueError(f"it gave a call '{name}' whose arguments are no JSON object")
    return ParsedCall(name, arguments)
