"""Histories as JSON for an endpoint's requests, at the cost of what is new in them.

Each request repeats the messages of the one before it, as the same objects; their JSON is kept, so that it is copied
instead of written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from nemo_gym.gateway.tokens.history import Prefix

Message = Mapping[str, Any]

_VIEWS = 4
"""Histories remembered: the main conversation's and those of sub-agents that run at the same time."""
_REWRITTEN = 4
"""Messages. A harness may change the end of its history without starting another conversation."""
_KEPT_BYTES = 256 << 10
"""All remembered histories together, where the latest is not larger by itself."""


@dataclass(slots=True)
class _View:
    messages: Prefix[Message] = field(default_factory=Prefix)
    text: bytearray = field(default_factory=bytearray)
    """The messages with commas between them."""
    ends: list[int] = field(default_factory=list)
    """Of each message in ``text``."""

    def cut(self, length: int) -> None:
        """Leave the first ``length`` messages."""
        if length < len(self.ends):
            self.messages = self.messages.grown(length, ())
            del self.ends[length:]
            del self.text[self.ends[-1] if self.ends else 0 :]

    def extend(self, new: Sequence[Message]) -> None:
        written = [orjson.dumps(message) for message in new]  # all of it, or an error before anything is kept
        for one in written:
            if self.ends:
                self.text += b","
            self.text += one
            self.ends.append(len(self.text))
        self.messages = self.messages.grown(len(self.messages), new)

    def branch(self, length: int) -> _View:
        """Another that begins with the first ``length`` messages."""
        end = self.ends[length - 1] if length else 0
        return _View(self.messages.grown(length, ()), self.text[:end], self.ends[:length])


class MessagesJson:
    """The memory of one session. Messages must not be changed after they were seen here."""

    def __init__(self) -> None:
        self._views: list[_View] = []

    def array(self, messages: Sequence[Message]) -> bytes:
        """``messages`` as a JSON array. Raises what ``orjson.dumps`` does."""
        view, shared = self._nearest(messages)
        if shared < len(view.ends) - _REWRITTEN:
            view = view.branch(shared)
        else:
            view.cut(shared)
        view.extend(messages[shared:])
        self._views = [view, *(other for other in self._views if other is not view)][:_VIEWS]
        while len(self._views) > 1 and sum(len(one.text) for one in self._views) > max(len(view.text), _KEPT_BYTES):
            self._views.pop()
        return b"".join((b"[", view.text, b"]"))

    def _nearest(self, messages: Sequence[Message]) -> tuple[_View, int]:
        nearest, most = _View(), 0
        for view in self._views:
            common = view.messages.common(messages)
            if common > most:
                nearest, most = view, common
                if common == len(view.ends):
                    break
        return nearest, most
