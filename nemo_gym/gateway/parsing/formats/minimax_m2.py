"""``<invoke name="f"><parameter name="key">value</parameter></invoke>`` in ``<minimax:tool_call>``: MiniMax M2."""

from __future__ import annotations

from nemo_gym.gateway.parsing.tagged_calls import TaggedCalls


class MinimaxM2(TaggedCalls):
    def __init__(self) -> None:
        super().__init__(
            opening=r"(?:<minimax:tool_call>\s{0,16})?<invoke name=\"([^<>\"\n]{1,256})\">",
            parameter=r"<parameter name=\"([^<>\"\n]{1,256})\">",
            parameter_end=r"</parameter>",
            closing=r"</invoke>(?:\s{0,16}</minimax:tool_call>)?",
        )
