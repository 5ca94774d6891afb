"""``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and later."""

from __future__ import annotations

from nemo_gym.gateway.parsing.tagged_calls import TaggedCalls


class Glm45(TaggedCalls):
    def __init__(self) -> None:
        super().__init__(
            opening=r"<tool_call>\s{0,16}([^\s<>{}\"]{1,256})",
            parameter=r"<arg_key>([^<>\n]{1,256})</arg_key>\s{0,16}<arg_value>",
            parameter_end=r"</arg_value>",
            closing=r"</tool_call>",
        )
