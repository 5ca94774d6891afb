"""What one request and one session may take of a gateway that others use as well.

The limits are far above what harnesses need: the longest conversations of CLIs are thousands of messages in a few MB,
and images are tens of MB in few values. What a long history costs once, reading and encoding it, is done in a thread.
The other steps of a request below the limits can still hold the event loop for some tens of milliseconds; a session
that does so waits as long before its next step, behind all others that did.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemo_gym.contract.errors import ModelError
from nemo_gym.http.json_bodies import check_messages

LONG_S = 0.005
"""Steps that hold the event loop for longer are charged to their session."""
SMALL_BYTES = 32 << 10
"""The steps of a body up to this size are short: asking for the time would be a good part of them."""
LARGE_BYTES = 512 << 10
"""The steps of a body above this size take long."""
_COME_BACK_S = 1
_APART = ThreadPoolExecutor(1, "long requests")
"""One thread: each further one that wants the interpreter would cost the event loop some milliseconds."""
T = TypeVar("T")


class SessionTooLargeError(ModelError):
    """What a session has kept so far is all that it may keep."""

    code = "session_too_large"
    status = 413


class SessionBusyError(ModelError):
    """A session has too much in flight."""

    code = "session_busy"
    status = 429


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Each has the name of the configuration's key."""

    max_body_bytes: int = 32 << 20
    max_body_values: int = 200_000
    max_messages: int = 10_000
    max_session_messages: int = 50_000
    max_session_bytes: int = 512 << 20
    max_session_in_flight_bytes: int = 128 << 20

    def check_body(self, body: Mapping[str, Any]) -> None:
        """Raises `TooManyMessagesError`."""
        check_messages(body, self.max_messages)

    def check_kept(self, kept: SessionShare) -> None:
        """Raises `SessionTooLargeError`."""
        if kept.messages > self.max_session_messages:
            raise SessionTooLargeError(
                f"the session has {kept.messages} messages, and may have {self.max_session_messages}; raise the"
                " gateway's 'max_session_messages' if that is what its harness needs"
            )
        if kept.bytes > self.max_session_bytes:
            raise SessionTooLargeError(
                f"the session's turns have {kept.bytes} bytes, and may have {self.max_session_bytes}; raise the"
                " gateway's 'max_session_bytes' if that is what its harness needs"
            )


@dataclass(slots=True)
class SessionShare:
    """What one session takes."""

    messages: int = 0
    """Of all turns; what a turn repeats of the one before it is not counted again."""
    bytes: int = 0
    """Of all turns, as the journal has them, without what memory need not hold."""
    in_flight_bytes: int = 0
    """Bodies of calls that are not answered yet."""
    owed_s: float = 0.0
    """Time of the event loop that it has had more than others."""
    _conversations: dict[int, int] = field(default_factory=dict)
    """Messages up to each turn."""

    @contextlib.contextmanager
    def claimed(self, size: int, at_most: int) -> Iterator[None]:
        """From before a body of ``size`` bytes is read until its call is over. Raises `SessionBusyError`."""
        if self.in_flight_bytes and self.in_flight_bytes + size > at_most:
            raise SessionBusyError(
                f"the session's calls in flight have {self.in_flight_bytes} bytes of bodies, and may have {at_most}"
                " ('max_session_in_flight_bytes'); come back when some are answered",
                retryable=True,
                retry_after_s=_COME_BACK_S,
            )
        self.in_flight_bytes += size
        try:
            yield
        finally:
            self.in_flight_bytes -= size

    def kept(self, turn: Mapping[str, Any], size: int) -> None:
        """A turn is durable; ``turn`` as the journal has it."""
        count: int = turn["message_count"]
        self.messages += count - self._conversations.get(turn["parent"], 0)
        self._conversations[turn["turn_id"]] = count
        self.bytes += size

    def worked(self, began: float) -> None:
        """A step that held the loop is over; ``began`` is what `step_begins` said."""
        if began and (took := time.thread_time() - began) > LONG_S:
            self.owed_s += took


def step_begins(body_bytes: int) -> float:
    """Before a step with a body of that size; for `SessionShare.worked`."""
    return time.thread_time() if body_bytes > SMALL_BYTES else 0.0


async def apart(step: Callable[[], T]) -> T:
    """Run a long step where it does not hold the event loop. It is over when this is, also when this is cancelled."""
    work = _APART.submit(step)
    running = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        work.cancel()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running})
        running.cancelled() or running.exception()  # nobody else asks for it
        raise


class LoopTurns:
    """The event loop's time among sessions that take much of it: one of them at a time, and half of it at most."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, share: SessionShare) -> None:
        """Until a session has paid what it owes. The step that follows must do so without an await in between."""
        while share.owed_s:
            async with self._lock:
                owed = share.owed_s
                await asyncio.sleep(owed)
                share.owed_s = max(0.0, share.owed_s - owed)  # now: who leaves has paid nothing
