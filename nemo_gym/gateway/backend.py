"""What gives answers: the seam between sessions and the two kinds of engine; and what one request or session may take.

The limits (`CallLimits`, `SessionShare`) are far above what harnesses need: the longest conversations of CLIs are
thousands of messages in a few MB, and images are tens of MB in few values. What a long history costs once, reading and
encoding it, is done in a thread. The other steps of a request below the limits can still hold the event loop for some
tens of milliseconds; a session that does so waits as long before its next step, behind all others that did.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from nemo_gym.contract.errors import ModelError
from nemo_gym.gateway.engines.types import TokenizerProbe
from nemo_gym.gateway.policy_request import Answer, AnswerTokens, PolicyRequest
from nemo_gym.gateway.tokens.forest import Prepared, TokenForest
from nemo_gym.gateway.tokens.turns import SplitReason
from nemo_gym.http.requests import check_messages

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

    def count_turn(self, turn: Mapping[str, Any], size: int) -> None:
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


class Conversations(Protocol):
    """What one session has said: a forest of turns."""

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put back recorded turns, in the order they were committed."""
        ...

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Its trajectories as JSON data, one per conversation."""
        ...

    def tokens_of(self, turn_id: int, *, texts: bool = True, relayed: bool = False) -> AnswerTokens | None:
        """The exact tokens of one answer, where the engine gave them; the text of each only where ``texts`` are
        wanted. With ``relayed`` those that were kept as they came need not be parsed."""
        ...

    def forget_requests(self) -> None:
        """Let go of what only makes further answers cheaper."""
        ...


class Preparing:
    """Prepares the requests of one session, one at a time: long ones without holding the event loop."""

    def __init__(self, forest: TokenForest) -> None:
        self._forest = forest
        self._lock = asyncio.Lock()

    async def prepared(self, request: PolicyRequest, context: CallContext) -> Prepared:
        """See `TokenForest.prepare`."""
        async with self._lock:
            if context.body_bytes <= SMALL_BYTES:
                return self._forest.prepare(request.messages, request.tools)
            working = step_begins(context.body_bytes)
            step = partial(_next, self._forest.preparing(request.messages, request.tools))
            reached = step()
            while not isinstance(reached, Prepared):
                if reached:
                    context.share.worked(working)
                    reached = await apart(step)
                    working = step_begins(context.body_bytes)
                else:
                    reached = step()
            context.share.worked(working)
            return reached


def _next(steps: Generator[bool, None, Prepared]) -> bool | Prepared:
    try:
        return next(steps)
    except StopIteration as done:
        prepared: Prepared = done.value
        return prepared


C = TypeVar("C", bound=Conversations)
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class CallContext:
    """What is known about a call beside its request."""

    session_id: str | None
    """Of the session, for stickiness; nothing for a call without one."""
    call_id: str
    """32 hexadecimal digits, unique: the answer's id, and the beginning of the engine's request ids."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """The session's sampling parameters, which win over the request's."""
    body_bytes: int = 0
    """Of the request; 0 where that is not known."""
    share: SessionShare = field(default_factory=SessionShare)
    """Of the session; told of steps that held the event loop."""
    turns: LoopTurns = field(default_factory=LoopTurns)
    """Waited for before such a step."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What observers want to know about a committed turn."""

    turn_id: int
    engines: tuple[str, ...]
    """Who sampled it, in order."""
    weights_version: str | None
    split_reason: SplitReason | None


class Backend(Protocol[C, D]):
    """Samples answers. ``sample`` may be cancelled at any await and then has changed nothing; ``commit`` does not
    await, and is called once for what ``sample`` returned."""

    @property
    def context_tokens(self) -> int | None:
        """Prompt and answer together, as configured; nothing where the engines alone know."""
        ...

    @property
    def tokenizer_probe(self) -> TokenizerProbe | None:
        """For engines that take token ids: what shows whether they serve this policy."""
        ...

    def conversations(self, now: datetime) -> C:
        """For a new session. ``now`` is the session's own time, for templates that print the date."""
        ...

    async def sample(self, conversations: C, request: PolicyRequest, context: CallContext) -> D:
        """Raises `EngineError`, `ContextOverflowError`, `InvalidBodyError`."""
        ...

    def commit(
        self, conversations: C, request: PolicyRequest, sampled: D
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        """Keep what was sampled: the answer, the turn as the journal records it, and facts about it."""
        ...

    def take_back(self, conversations: C, turn_id: int) -> None:
        """Undo the latest ``commit``: its turn could not be made durable."""
        ...

    async def count_tokens(self, request: PolicyRequest) -> int | None:
        """Tokens of the request as a prompt; nothing where that cannot be known."""
        ...

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        ...
