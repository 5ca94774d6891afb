"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many tuned after them."""

from __future__ import annotations

import re

from nemo_gym.gateway.parsing.json_calls import FramedJson


class Hermes(FramedJson):
    def __init__(self) -> None:
        super().__init__(re.compile(r"<tool_call>"), re.compile(r"\s*+(?:</tool_call>|\Z)"))
