"""Reasoning between tags, wherever the opening one is: in the prompt, sampled, or nowhere."""

from __future__ import annotations

from dataclasses import dataclass


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
