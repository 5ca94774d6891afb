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
