"""``functions.name:0`` and JSON arguments between tokens: Kimi K2."""

from __future__ import annotations

import re

from nemo_gym.gateway.parsing.json_calls import NAME, FramedJson


class KimiK2(FramedJson):
    def __init__(self) -> None:
        super().__init__(
            re.compile(
                r"(?:<\|tool_calls_section_begin\|>\s{0,16})?<\|tool_call_begin\|>\s{0,16}"
                rf"(?:functions\.)?(?P<name>{NAME})(?::[0-9]{{1,9}})?\s{{0,16}}<\|tool_call_argument_begin\|>"
            ),
            re.compile(r"\s*+(?:<\|tool_call_end\|>(?:\s{0,16}<\|tool_calls_section_end\|>)?|\Z)"),
        )
