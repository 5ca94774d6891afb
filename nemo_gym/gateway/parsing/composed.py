"""One answer parser made of a format for reasoning and one for calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_gym.gateway.parsing.answers import CallFormat, ParsedAnswer, ParsedCall, ReasoningFormat, Segment, Tool


@dataclass(frozen=True, slots=True)
class ComposedParser:
    """Takes the reasoning off first: calls that a policy only thinks of are not made."""

    name: str
    reasoning: ReasoningFormat
    calls: CallFormat | None
    """Nothing for policies that call no tools."""

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        reasoning, rest = self.reasoning.split(text, prompt_tail)
        if rest is None:
            return ParsedAnswer(None, reasoning)
        if self.calls is None or not parse_calls:
            return _answer(rest, reasoning)
        segments = self.calls.split(rest, tools)
        calls = tuple(segment for segment in segments if isinstance(segment, ParsedCall))
        if not calls:
            return _answer(rest, reasoning)
        return ParsedAnswer(_content(segments), reasoning, calls)


def _answer(rest: str, reasoning: str | None) -> ParsedAnswer:
    return ParsedAnswer(None if reasoning is not None and not rest else rest, reasoning)


def _content(segments: Sequence[Segment]) -> str | None:
    """The text around calls. Whitespace next to a call is the format's; what the policy said between calls stays, on
    a line of its own."""
    texts = []
    for index, segment in enumerate(segments):
        if isinstance(segment, str):
            text = segment if index == 0 else segment.lstrip()
            text = text if index == len(segments) - 1 else text.rstrip()
            if text.strip():
                texts.append(text)
    return "\n".join(texts) or None
