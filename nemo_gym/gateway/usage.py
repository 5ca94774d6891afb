"""Token usage, as each dialect reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson


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
        """From a ``usage`` object of Chat Completions, Responses or Messages; nothing where nothing is reported."""
        if not isinstance(reported, Mapping):
            return cls()
        # Messages counts the prompt's cached tokens beside its others.
        cached = sum(int(reported.get(f"cache_{kind}_input_tokens") or 0) for kind in ("read", "creation"))
        return cls(
            int(reported.get("input_tokens") or reported.get("prompt_tokens") or 0) + cached,
            int(reported.get("output_tokens") or reported.get("completion_tokens") or 0),
        )


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
        usage = Usage.of(inner.get("usage") if isinstance(inner, dict) else None)
        self._input = max(self._input, usage.input_tokens)
        self._output = max(self._output, usage.output_tokens)
