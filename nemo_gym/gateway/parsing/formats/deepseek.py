"""DeepSeek V3, R1 and V3.1: calls between tokens, the name before a separator or a fenced block of JSON."""

from __future__ import annotations

import re

from nemo_gym.gateway.parsing.json_calls import NAME, FramedJson


class DeepSeek(FramedJson):
    """V3 writes ``function⟨sep⟩name``, a line break and the arguments in a block fenced as JSON; V3.1 writes
    ``name⟨sep⟩`` and the arguments. Both are read, and tokens around a run of calls go with them."""

    def __init__(self) -> None:
        super().__init__(
            re.compile(
                r"(?:<｜tool▁calls▁begin｜>\s{0,16})?<｜tool▁call▁begin｜>"
                rf"(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>|\s{{0,16}}```json\b)"
            ),
            re.compile(
                r"\s*+(?:```\s{0,16})?"
                r"(?:<｜tool▁call▁end｜>(?:\s{0,16}<｜tool▁calls▁end｜>)?|<｜tool▁calls▁end｜>|\Z)"
            ),
        )
