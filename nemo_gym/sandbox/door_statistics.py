"""Statistics of one door, counted on the host, where no process in the box can change them.

A harness's exit status and events come from a process in the box. These counts are evidence from outside: whether the
model (or an MCP server) received requests at all, responded, or failed. Errors that a box can provoke by itself (a
malformed request that gets a 400) are counted, but never as a failure of the target.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

_ERROR_BYTES = 2048
_TAIL_BYTES = 16 * 1024
_REQUEST_ERROR_MARKERS = (b"context_length", b"invalid_request")
"""Strings in the error event of a stream which show that the request caused the error, not the target."""
_FAILURES = frozenset({401, 403, 408, 429})
"""Statuses that, like 5xx, are failures of the target: the box cannot avoid them, as the door sets the credentials."""
_OWN_CALLS = b"max_session_in_flight_bytes"
"""A gateway's 429 names this limit if the box's own calls have used up what their session may hold."""


@dataclass
class DoorStatistics:
    """Counts of one door since it was opened."""

    requests: int = 0
    """Requests that were forwarded."""
    answered: int = 0
    """Complete responses with a status below 400."""
    refused: int = 0
    """4xx responses that reject the request itself, and streams that ended in an error that the request caused."""
    failed: int = 0
    """401, 403, 408, 429 and 5xx responses, and streams that ended in any other error."""
    unreachable: int = 0
    """Requests that got no response at all."""
    broken: int = 0
    """Responses that the target broke off."""
    abandoned: int = 0
    """Requests whose connection the box closed before the response was complete."""
    forbidden: int = 0
    """Requests that the door did not forward because their route is not in its allow-list."""
    turns: int = 0
    """Responses on the routes that the door counts (a model's responses), including those that had begun when the box
    closed the connection."""
    over_limit: int = 0
    """Requests that were not forwarded because ``turns`` had reached the door's ``max_answers``."""
    failures_since_answer: int = 0
    """Failed, unreachable and broken exchanges since the last complete response. If the door counts any routes, only
    exchanges on those routes matter here."""
    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status → number of responses that began with it."""
    last_error: str | None = None
    """The last failure or refusal in the target's own words, cut to 2 KiB."""
    seconds: float = 0.0
    """Total duration of all exchanges; overlapping exchanges each count in full."""
    open: int = 0
    """Exchanges in progress."""

    @property
    def failures(self) -> int:
        return self.failed + self.unreachable + self.broken

    @property
    def failing(self) -> bool:
        """Whether the most recent exchanges show that the target does not work."""
        return self.failures_since_answer > 0

    @property
    def explains_timeout(self) -> bool:
        """Whether a caller whose time is up ran out of it because the target did not answer."""
        # A single failure followed by a long generation means that the caller was too slow.
        return self.failures_since_answer > 1 or bool(self.requests and not self.answered and not self.refused)

    @property
    def last_status(self) -> int | None:
        """The HTTP status of the last error, or ``None`` if the target sent no response."""
        status = (self.last_error or "").partition(":")[0]
        return int(status) if status.isdecimal() else None

    @property
    def reason(self) -> str:
        """The target's last error, after a space and in parentheses; empty without one."""
        return f" ({self.last_error[:500]})" if self.last_error else ""

    def unanswered(self, target: str) -> str:
        """Say how many of the requests to ``target`` were not answered, and why."""
        count = f"the last {self.failures_since_answer}" if self.failing else str(self.requests - self.answered)
        return f"{count} of {self.requests} requests to {target} were not answered{self.reason}"

    @contextmanager
    def exchange(self, *, counts: bool = False, tells: bool = True) -> Iterator[Exchange]:
        """Count one forwarded request. If the context ends before the exchange does, the box abandoned the request.

        Args:
            counts: whether its response is one of ``turns``.
            tells: whether its result affects ``failures_since_answer``.
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
        """Return the statistics as plain data for observations, without those that are zero."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "statuses"}
        values["seconds"] = round(self.seconds, 3)
        statuses = {str(status): count for status, count in sorted(self.statuses.items())}
        return {**{name: value for name, value in values.items() if value}, "statuses": statuses}


class Exchange:
    """One request through a door, and the progress of its response."""

    def __init__(self, statistics: DoorStatistics, *, tells: bool = True) -> None:
        self.ended = False
        self.is_turn = False
        """Set once the exchange is over."""
        self._failed = False
        self._tells = tells
        self._statistics = statistics
        self._status = 0
        self._readable = self._stream = False
        self._kept_body = b""

    @property
    def has_answered(self) -> bool:
        """Whether the target began a response with a status below 400 and did not fail, even if the box then closed
        the connection."""
        return not self._failed and 0 < self._status < 400

    def unreachable(self, said: str) -> None:
        self._statistics.unreachable += 1
        self._record_failure(said)

    def answers(self, status: int, headers: Mapping[str, str]) -> None:
        """Record the status and headers of the target's response."""
        statuses = self._statistics.statuses
        statuses[status] = statuses.get(status, 0) + 1
        self._status = status
        self._readable = headers.get("Content-Encoding", "identity") == "identity"
        self._stream = headers.get("Content-Type", "").startswith("text/event-stream")

    def saw(self, data: bytes) -> None:
        """Take a piece of the response body. Only error bodies and the ends of event streams are kept."""
        if not self._readable:
            return
        if self._status >= 400:
            self._kept_body = (self._kept_body + data)[:_ERROR_BYTES]
        elif self._stream:
            self._kept_body = (self._kept_body + data)[-_TAIL_BYTES:]

    def broke_off(self, said: str) -> None:
        self._statistics.broken += 1
        self._record_failure(said)

    def ends(self, *, asked: bool = True) -> None:
        """Classify the response, now that it is complete. ``asked`` is whether the box has sent its whole request: a
        target that waits in vain for the rest of one answers 408."""
        statistics = self._statistics
        is_own_doing = not asked if self._status == 408 else self._status == 429 and _OWN_CALLS in self._kept_body
        if (self._status >= 500 or self._status in _FAILURES) and not is_own_doing:
            statistics.failed += 1
            self._record_failure(f"{self._status}: {_text(self._kept_body)}")
        elif self._status >= 400:
            statistics.refused += 1
            statistics.last_error = f"{self._status}: {_text(self._kept_body)}"
            self.ended = True
        elif self._stream and (error := _final_error(self._kept_body)) is not None:
            if any(marker in self._kept_body for marker in _REQUEST_ERROR_MARKERS):
                statistics.refused += 1
                statistics.last_error = error
                self.ended = self._failed = True
            else:
                statistics.failed += 1
                self._record_failure(error)
        else:
            statistics.answered += 1
            if self._tells:
                statistics.failures_since_answer = 0
            self.ended = True

    def _record_failure(self, error_text: str) -> None:
        self._statistics.failures_since_answer += self._tells
        self._statistics.last_error = error_text[:_ERROR_BYTES]
        self.ended = self._failed = True


def _final_error(tail: bytes) -> str | None:
    """Return the error with which an event stream (Chat Completions, Responses, Messages) ended, if any."""
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
    return data[:_ERROR_BYTES].decode("utf-8", "replace")


# -- Limit ---------------------------------------------------------------------------------------------------------


class AnswerLimit:
    """Admits requests as long as the limit allows a response to each.

    A request that could exceed the limit waits for those in progress: if one of them fails, the request is admitted.
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        """Responses that are still allowed."""
        self._under_way = 0
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Return whether the request may be forwarded. If so, the caller must call `leave` at its end."""
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
