"""What a sampled answer says: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

Tool: TypeAlias = Mapping[str, Any]
"""A function tool as in Chat Completions."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call. It may name a tool that was not offered: the harness answers that, and the policy sees it."""

    name: str
    arguments: str
    """JSON text, as the policy wrote it wherever that is valid JSON."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """One answer, parsed."""

    content: str | None
    """Nothing where the answer holds only reasoning or calls."""
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()


Segment: TypeAlias = str | ParsedCall
"""A stretch of an answer: text, or a call."""


class AnswerParser(Protocol):
    """Parses whole answers. Made by `answer_parser`."""

    @property
    def name(self) -> str:
        """The formats it knows, for logs: ``hermes+think``."""
        ...

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        """``text``: the sampled text, special tokens kept, without the token that ended it. ``prompt_tail``: the last
        ~256 characters of the prompt. ``parse_calls``: calls stay content where they are not wanted.

        Never raises: what is no call stays content.
        """
        ...


@runtime_checkable
class CallFormat(Protocol):
    """How one family of policies writes tool calls."""

    def split(self, text: str, tools: Sequence[Tool] | None) -> list[Segment]:
        """The text of an answer, its reasoning removed, as text and calls in order. Never raises, drops no text but
        the markup of calls, and takes time linear in the text."""
        ...


@runtime_checkable
class ReasoningFormat(Protocol):
    """How one family of policies writes what it thinks before it answers."""

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        """``(reasoning, rest)``; ``rest`` is the text itself where there is no reasoning, and ``None`` where the
        answer ended amid its reasoning. Never raises."""
        ...


# Reasoning between tags, wherever the opening one is: in the prompt, sampled, or nowhere.


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Reasoning between ``opening`` and ``closing``, at the start of the answer.

    It is open from the start where the prompt ends with ``opening``. An answer that ends before ``closing`` is all
    reasoning. A ``closing`` that nothing opened ends reasoning too (policies whose prompts leave the opening out),
    unless the prompt has just closed it. Tags further on belong to the content. Whitespace between tags, reasoning
    and content is the format's, not the policy's words.
    """

    opening: str
    closing: str

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        ended = prompt_tail.rstrip()
        body = text.lstrip()
        opened = ended.endswith(self.opening)
        if body.startswith(self.opening):
            body, opened = body[len(self.opening) :], True
        reasoning, closing, rest = body.partition(self.closing)
        if not opened and (not closing or self.opening in reasoning or ended.endswith(self.closing)):
            return None, text
        thought = reasoning.strip() or None
        return (thought, rest.lstrip()) if closing else (thought, None)


class NoReasoning:
    """All text is content."""

    def split(self, text: str, prompt_tail: str) -> tuple[str | None, str | None]:
        return None, text


THINK = TaggedReasoning("<think>", "</think>")
REASONING_FORMATS: dict[str, TaggedReasoning | NoReasoning] = {
    "none": NoReasoning(),
    "think": THINK,
    "bracket_think": TaggedReasoning("[THINK]", "[/THINK]"),
    "seed_think": TaggedReasoning("<seed:think>", "</seed:think>"),
}


# One answer parser made of a format for reasoning and one for calls.


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
