"""Harmony, the format of gpt-oss: every part of an answer is a message on a channel, calls have a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>

The keeper's own package parses tokens of a vocabulary that it downloads; the text says the same, offline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemo_gym.gateway.parsing.answers import ParsedAnswer, ParsedCall, Tool
from nemo_gym.gateway.parsing.json_text import is_object

_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,32})")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<>]{1,256})")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s{0,8}(?:to=[^\s<>]{1,256})?")
_MESSAGE = "<|message|>"


class Harmony:
    """``analysis`` is reasoning, what has a recipient and JSON arguments is a call, the rest is content."""

    name = "harmony"

    def parse(
        self, text: str, *, prompt_tail: str, tools: Sequence[Tool] | None, parse_calls: bool = True
    ) -> ParsedAnswer:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ParsedCall] = []
        at, found = 0, False
        while (opened := text.find(_MESSAGE, at)) >= 0:
            found = True
            header = text[at:opened]
            if (stray := _HEADER.sub("", header.partition("<|channel|>")[0])).strip():
                content.append(stray)
            ended = _ENDS.search(text, opened + len(_MESSAGE))
            body = text[opened + len(_MESSAGE) : ended.start() if ended else len(text)]
            at = len(text) if ended is None else ended.end()
            channel = _CHANNEL.search(header)
            recipient = _RECIPIENT.search(header)
            if recipient is not None and parse_calls and is_object(body):
                calls.append(ParsedCall(recipient[1], body.strip()))
            elif recipient is None and channel is not None and channel[1] == "analysis":
                reasoning.append(body.strip())
            else:
                content.append(body if recipient is None else f"{header}{_MESSAGE}{body}")
        if not found:
            return ParsedAnswer(text)
        if (rest := _HEADER.sub("", text[at:])).strip():
            content.append(rest)
        said = "\n".join(part for part in content if part) or None
        return ParsedAnswer(said, "\n".join(filter(None, reasoning)) or None, tuple(calls))
