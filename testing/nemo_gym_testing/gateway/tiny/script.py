"""A script's input, a view of a call, and its output, an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_gym_testing.gateway.tiny.rendering import AnswerRenderer, tools_in


@dataclass(frozen=True)
class CallView:
    """The view of one call. Except ``number``, it depends on the prompt alone, so a retry gets the same answer."""

    prompt: str
    """The decoded prompt, special tokens included."""
    prompt_ids: Sequence[int]
    number: int
    """Calls that this engine has received before."""
    renderer: AnswerRenderer

    @cached_property
    def answers(self) -> int:
        """Answers that the conversation already holds."""
        return self.renderer.answers_in(self.prompt)

    @cached_property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the prompt defines."""
        return tools_in(self.prompt)


Script = Callable[[CallView], "Mapping[str, Any] | str | None"]
"""Returns an assistant message (``content``, ``reasoning_content``, ``tool_calls`` as in Chat Completions or as
``{name, arguments}``), which the policy's chat template writes; or text, which is forced unchanged; or ``None``, and
the model samples."""
