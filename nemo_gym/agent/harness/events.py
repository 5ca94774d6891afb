"""Readers of a CLI's standard output.

A harness that prints one JSON object a line subclasses `JsonEventReader` and implements ``event``. What a CLI prints
is untrusted: a reader takes any bytes, and an event that is not as expected is a gap in the transcript and no error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from nemo_gym.agent.harness.transcript import Transcript

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line is dropped, and the transcript says so."""


class EventReader(ABC):
    """Reads standard output, one line at a time and in order, into ``transcript``."""

    def __init__(self) -> None:
        self.transcript = Transcript()

    @abstractmethod
    def feed(self, line: bytes) -> None:
        """One line without its end. Must not raise for what a line says."""

    def finish(self) -> None:  # noqa: B027 - most readers have nothing left to do
        """The output has ended; called once, however the process ended."""


class JsonEventReader(EventReader):
    """Hands each JSON object on to ``event``; other lines are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.other_lines = 0

    def feed(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            self.other_lines += 1
            return
        try:
            self.event(event)
        # An event of another version, or one that the policy made the CLI print, can have any shape.
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.transcript.gap("unreadable_event", f"{event.get('type')}: {type(error).__name__}: {error}")

    @abstractmethod
    def event(self, event: dict[str, Any]) -> None:
        """One JSON object. Errors of looking into it (`KeyError`, `TypeError`, …) become a gap."""


class TextReader(EventReader):
    """For a CLI that prints its answer and nothing else: the end of standard output is what the agent said."""

    MAX_BYTES = 64 * 1024

    def __init__(self) -> None:
        super().__init__()
        self._tail = b""

    def feed(self, line: bytes) -> None:
        self._tail = (self._tail + line + b"\n")[-self.MAX_BYTES :]

    def finish(self) -> None:
        self.transcript.says(self._tail.decode("utf-8", "replace").strip())


class LineSplitter:
    """Chunks of a stream into lines, with a bound on what is held."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader
        self._held = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            if not self._dropping:
                self._reader.feed(bytes(self._held) + line if self._held else line)
            self._held.clear()
            self._dropping = False
        if self._dropping or len(self._held) + len(rest) > MAX_LINE_BYTES:
            if not self._dropping:
                self._reader.transcript.gap("line_too_long", f"a line of more than {MAX_LINE_BYTES} bytes")
            self._dropping = True
            self._held.clear()
        else:
            self._held += rest

    def finish(self) -> None:
        if self._held and not self._dropping:
            self._reader.feed(bytes(self._held))
        self._held.clear()
        self._reader.finish()
