"""Token usage, as each dialect reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.contract.errors import ModelError

_COUNT_BELOW = 1 << 53
"""What every reader of JSON takes for the same number."""


def tokens_counted(reported: Any) -> int:
    """A number of tokens as somebody else reports it; 0 where nothing is reported. Raises `ValueError` for what
    counts nothing."""
    if reported is None:
        return 0
    if isinstance(reported, bool) or not isinstance(reported, int | float) or not 0 <= reported < _COUNT_BELOW:
        raise ValueError(f"a usage of {str(reported)[:40]!r} tokens")
    return int(reported)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one or several calls."""

    input_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens)

    def as_dict(self) -> dict[str, int]:
        return {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.output_tokens,
        }

    @classmethod
    def of(cls, reported: Any) -> Usage:
        """From a ``usage`` object of Chat Completions, Responses or Messages; nothing where nothing is reported.
        Raises `ModelError` for one that counts nothing."""
        if not isinstance(reported, Mapping):
            return cls()
        try:
            # Messages counts the prompt's cached tokens beside its others.
            cached = sum(tokens_counted(reported.get(f"cache_{kind}_input_tokens")) for kind in ("read", "creation"))
            return cls(
                tokens_counted(reported.get("input_tokens") or reported.get("prompt_tokens")) + cached,
                tokens_counted(reported.get("output_tokens") or reported.get("completion_tokens")),
            )
        except ValueError as error:
            raise ModelError(f"the model endpoint reported {error}", retryable=True) from None


class StreamedUsage:
    """Finds the usage in server-sent events while they pass by."""

    def __init__(self) -> None:
        self._rest = b""
        self._input = 0
        self._output = 0
        self.completed = False
        """Whether the stream said by itself that it is complete."""

    @property
    def usage(self) -> Usage:
        return Usage(self._input, self._output)

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.completed = True
            return
        if b'"usage"' not in data and b"message_stop" not in data and b"response." not in data:
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(event, dict):
            return
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete", "message_stop"):
            self.completed = True
        inner = event.get("response") or event.get("message") or event
        try:
            usage = Usage.of(inner.get("usage") if isinstance(inner, dict) else None)
        except ModelError:
            return  # the event is on its way already
        self._input = max(self._input, usage.input_tokens)
        self._output = max(self._output, usage.output_tokens)
