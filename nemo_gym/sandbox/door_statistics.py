"""What went through one door, counted on the host's side, where nothing in the box can change it.

A harness's exit status and events are what a process in the box says. These counts are evidence from outside: whether
the model (or an MCP server) was asked at all, answered, or failed. What a box can provoke by itself (a malformed
request that gets a 400) is counted, and is never a failure of the target.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

_SAID_BYTES = 2048
_TAIL_BYTES = 16 * 1024
_OF_THE_REQUEST = (b"context_length", b"invalid_request")
"""In an error at the end of a stream: what the request asked for cannot be had."""
_FAILURES = frozenset({401, 403, 408, 429})
"""Beside 5xx: the target does not serve whoever asks, however good the request (the door sets the credentials)."""


@dataclass
class DoorStatistics:
    """Counts of one door since it was opened."""

    requests: int = 0
    """Requests that were forwarded."""
    answered: int = 0
    """Answers below 400 that went through to their end."""
    refused: int = 0
    """4xx answers that speak of the request itself."""
    failed: int = 0
    """401, 403, 408, 429 and 5xx answers, and streams that ended in an error."""
    unreachable: int = 0
    """Requests that got no answer at all."""
    broken: int = 0
    """Answers that the target broke off."""
    abandoned: int = 0
    """Requests that the box hung up on."""
    forbidden: int = 0
    """Requests that the door did not forward: a route outside its allow-list."""
    turns: int = 0
    """Answers of the routes that the door counts (a model's answers), those included that the box hung up on after
    they had begun."""
    over_limit: int = 0
    """Requests that were not forwarded because ``turns`` had reached the door's ``max_answers``."""
    failures_since_answer: int = 0
    """Failed, unreachable and broken exchanges since the last answer that went through; of counted routes alone where
    the door counts any."""
    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status → answers that began with it."""
    last_error: str | None = None
    """The last failure or refusal in the target's own words, cut to 2 KiB."""
    seconds: float = 0.0
    """Time that exchanges took, added up; more than the wall clock's where they overlap."""
    open: int = 0
    """Exchanges under way."""

    @property
    def failures(self) -> int:
        return self.failed + self.unreachable + self.broken

    @property
    def failing(self) -> bool:
        """Whether the latest evidence is that the target does not serve."""
        return self.failures_since_answer > 0

    @contextmanager
    def exchange(self, *, counts: bool = False, tells: bool = True) -> Iterator[Exchange]:
        """One forwarded request; an exchange that nobody ended was abandoned by the box.

        Args:
            counts: whether its answer is one of ``turns``.
            tells: whether it says anything of whether the target serves.
        """
        exchange = Exchange(self, tells=tells)
        self.requests += 1
        self.open += 1
        started = time.monotonic()
        try:
            yield exchange
        finally:
            self.open -= 1
            self.seconds += time.monotonic() - started
            if not exchange.ended:
                self.abandoned += 1
            exchange.is_turn = counts and exchange.has_answered
            self.turns += exchange.is_turn

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for observations; zeros are left out."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "statuses"}
        values["seconds"] = round(self.seconds, 3)
        statuses = {str(status): count for status, count in sorted(self.statuses.items())}
        return {**{name: value for name, value in values.items() if value}, "statuses": statuses}


class Exchange:
    """One request through a door, as it goes on."""

    def __init__(self, statistics: DoorStatistics, *, tells: bool = True) -> None:
        self.ended = False
        self.is_turn = False
        """Known once the exchange is over."""
        self._failed = False
        self._tells = tells
        self._statistics = statistics
        self._status = 0
        self._readable = self._stream = False
        self._seen = b""

    @property
    def has_answered(self) -> bool:
        """Whether the box got an answer, or hung up on one. The target's failures are none."""
        return not self._failed and 0 < self._status < 400

    def unreachable(self, said: str) -> None:
        self._statistics.unreachable += 1
        self._fails(said)

    def answers(self, status: int, headers: Mapping[str, str]) -> None:
        """The target's head has come."""
        statuses = self._statistics.statuses
        statuses[status] = statuses.get(status, 0) + 1
        self._status = status
        self._readable = headers.get("Content-Encoding", "identity") == "identity"
        self._stream = headers.get("Content-Type", "").startswith("text/event-stream")

    def saw(self, data: bytes) -> None:
        """A piece of the body. Only error bodies and the ends of event streams are kept."""
        if not self._readable:
            return
        if self._status >= 400:
            self._seen = (self._seen + data)[:_SAID_BYTES]
        elif self._stream:
            self._seen = (self._seen + data)[-_TAIL_BYTES:]

    def broke_off(self, said: str) -> None:
        self._statistics.broken += 1
        self._fails(said)

    def ends(self) -> None:
        """The whole answer has come."""
        statistics = self._statistics
        if self._status >= 500 or self._status in _FAILURES:
            statistics.failed += 1
            self._fails(f"{self._status}: {_text(self._seen)}")
        elif self._status >= 400:
            statistics.refused += 1
            statistics.last_error = f"{self._status}: {_text(self._seen)}"
            self.ended = True
        elif self._stream and (error := _error_at_the_end(self._seen)) is not None:
            if any(words in self._seen for words in _OF_THE_REQUEST):
                statistics.refused += 1
                statistics.last_error = error
                self.ended = self._failed = True
            else:
                statistics.failed += 1
                self._fails(error)
        else:
            statistics.answered += 1
            if self._tells:
                statistics.failures_since_answer = 0
            self.ended = True

    def _fails(self, said: str) -> None:
        self._statistics.failures_since_answer += self._tells
        self._statistics.last_error = said[:_SAID_BYTES]
        self.ended = self._failed = True


def _error_at_the_end(tail: bytes) -> str | None:
    """The error that an event stream (Chat Completions, Responses, Messages) ended with, if it did."""
    for line in reversed(tail.splitlines()):
        if not line.startswith(b"data:") or line[5:].strip() in (b"", b"[DONE]"):
            continue
        try:
            event = orjson.loads(line[5:])
        except orjson.JSONDecodeError:
            return None
        if not isinstance(event, dict):
            return None
        is_error = event.get("type") in ("error", "response.failed") or bool(event.get("error"))
        return _text(line[5:].strip()) if is_error else None
    return None


def _text(data: bytes) -> str:
    return data[:_SAID_BYTES].decode("utf-8", "replace")


# -- Limit ---------------------------------------------------------------------------------------------------------


class AnswerLimit:
    """Admits requests as long as they can all be answered within the limit.

    A request that could become one answer too many waits for those under way: they may fail, and then it is admitted.
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        """Answers that may still be given."""
        self._under_way = 0
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Whether the request may be forwarded; each that may must `leave`."""
        while 0 < self.left <= self._under_way:
            await self._changed.wait()
        if not self.left:
            return False
        self._under_way += 1
        return True

    def leave(self, *, answered: bool) -> None:
        self._under_way -= 1
        self.left -= answered
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
