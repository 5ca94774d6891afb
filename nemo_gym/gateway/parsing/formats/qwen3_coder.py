"""``<function=name><parameter=key>value</parameter></function>``, usually inside ``<tool_call>``: Qwen3-Coder."""

from __future__ import annotations

from nemo_gym.gateway.parsing.tagged_calls import TaggedCalls


class Qwen3Coder(TaggedCalls):
    def __init__(self) -> None:
        super().__init__(
            opening=r"(?:<tool_call>\s{0,16})?<function=([^<>\n]{1,256})>",
            parameter=r"<parameter=([^<>\n]{1,256})>",
            parameter_end=r"</parameter>",
            closing=r"</function>(?:\s{0,16}</tool_call>)?",
            value_newlines=True,
        )
