"""What a script is told of a call, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nemo_gym_testing.gateway.tiny.rendering import AnswerRenderer, tools_in


@dataclass(frozen=True)
class CallView:
    """One call as a script sees it: all of it is read from the prompt, so a retry gets the same answer."""

    prompt: str
    """The decoded prompt, special tokens included."""
    prompt_ids: Sequence[int]
    number: int
    """Calls that this engine had before."""
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
"""An assistant message (``content``, ``reasoning_content``, ``tool_calls`` as in Chat Completions or as ``{name,
arguments}``), which the policy's chat template writes; or text, which is forced as it stands; or nothing, and the
model samples."""
