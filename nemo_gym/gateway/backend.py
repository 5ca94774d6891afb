"""`Backend`, the interface between sessions and the two kinds of engine, and the limits of one request or session.

The limits (`CallLimits`, `SessionShare`) are far above what harnesses need: the longest conversations of CLIs are
thousands of messages in a few MB, and images are tens of MB in few values. A long history is read and encoded once, in
a thread. The other steps of a request within the limits can still hold the event loop for some tens of milliseconds; a
session that does so waits as long before its next step, after all other sessions that did so before it.
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
from nemo_gym.gateway.engines.types import TokenizerProbe, asked_otherwise
from nemo_gym.gateway.policy_request import Answer, AnswerTokens, PolicyRequest
from nemo_gym.gateway.tokens.forest import Prepared, TokenForest
from nemo_gym.gateway.tokens.turns import SplitReason

LONG_S = 0.005
"""Steps that hold the event loop for longer are charged to their session."""
SMALL_BYTES = 32 << 10
"""The steps for a body up to this size are so short that reading the clock would be a good part of their time."""
LARGE_BYTES = 512 << 10
"""The steps for a body above this size take long."""
_COME_BACK_S = 1
_LONG_STEP_THREAD = ThreadPoolExecutor(1, "long requests")
"""One thread: each further thread that competes for the interpreter would cost the event loop some milliseconds."""
T = TypeVar("T")


class SessionTooLargeError(ModelError):
    """A session has reached the limit of messages or bytes that it may keep."""

    code = "session_too_large"
    status = 413


class SessionBusyError(ModelError):
    """The session's calls in flight have too many bytes."""

    code = "session_busy"
    status = 429


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of calls; each has the name of its configuration key."""

    max_body_bytes: int = 32 << 20
    max_body_values: int = 200_000
    max_messages: int = 10_000
    max_session_messages: int = 50_000
    max_session_bytes: int = 512 << 20
    max_session_in_flight_bytes: int = 128 << 20

    def check_share(self, share: SessionShare) -> None:
        """Raise `SessionTooLargeError` for a session that keeps too much."""
        if share.messages > self.max_session_messages:
            raise SessionTooLargeError(
                f"the session has {share.messages} messages; the limit is {self.max_session_messages}; raise the"
                " gateway's 'max_session_messages' if that is what its harness needs"
            )
        if share.bytes > self.max_session_bytes:
            raise SessionTooLargeError(
                f"the session's turns have {share.bytes} bytes; the limit is {self.max_session_bytes}; raise the"
                " gateway's 'max_session_bytes' if that is what its harness needs"
            )


@dataclass(slots=True)
class SessionShare:
    """The resources that one session uses."""

    messages: int = 0
    """Messages of all turns; a turn's messages that its parent has are not counted again."""
    bytes: int = 0
    """Bytes of all turns in the journal, without the large texts that memory need not hold."""
    in_flight_bytes: int = 0
    """Bytes of the bodies of unanswered calls, and of replies that their callers have not taken."""
    unsent_bytes: int = 0
    """Bytes of these replies alone."""
    owed_s: float = 0.0
    """Seconds for which it held the event loop and has not waited yet."""
    _conversations: dict[int, int] = field(default_factory=dict)
    """By turn id: the number of messages up to and including that turn."""

    @contextlib.contextmanager
    def claimed(self, size: int, at_most: int) -> Iterator[None]:
        """Claim ``size`` bytes of a body, from before it is read until its call is over. Raises `SessionBusyError`."""
        if self.in_flight_bytes:
            self._require_room(size, at_most)
        self.in_flight_bytes += size
        try:
            yield
        finally:
            self.in_flight_bytes -= size

    def claim_reply(self, size: int, at_most: int) -> None:
        """Claim ``size`` bytes of a reply until `reply_left`. Raises `SessionBusyError`, never for the only reply."""
        if self.unsent_bytes:
            self._require_room(size, at_most)
        self.unsent_bytes += size
        self.in_flight_bytes += size

    def reply_left(self, size: int) -> None:
        """End the claim of a reply of ``size`` bytes, all of which have left this process."""
        self.unsent_bytes -= size
        self.in_flight_bytes -= size

    def _require_room(self, size: int, at_most: int) -> None:
        if self.in_flight_bytes + size > at_most:
            raise SessionBusyError(
                f"the session's calls in flight have {self.in_flight_bytes} bytes of bodies and of replies that nobody"
                f" has read; the limit is {at_most} ('max_session_in_flight_bytes'); retry when some are answered",
                retryable=True,
                retry_after_s=_COME_BACK_S,
            )

    def count_turn(self, turn: Mapping[str, Any], size: int) -> None:
        """Count a durable turn of ``size`` bytes; ``turn`` is its record in the journal."""
        count: int = turn["message_count"]
        self.messages += count - self._conversations.get(turn["parent"], 0)
        self._conversations[turn["turn_id"]] = count
        self.bytes += size

    def worked(self, began: float) -> None:
        """Charge a finished step to the session if it was long; ``began`` is the result of `step_begins`."""
        if began and (took := time.thread_time() - began) > LONG_S:
            self.owed_s += took


def step_begins(body_bytes: int) -> float:
    """Return the start time of a step for `SessionShare.worked`, or 0 if the body is too small to be charged."""
    return time.thread_time() if body_bytes > SMALL_BYTES else 0.0


async def apart(step: Callable[[], T]) -> T:
    """Run a long step in a thread, so that it does not hold the event loop. If cancelled, wait for the step to end."""
    work = _LONG_STEP_THREAD.submit(step)
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
    """Divides the event loop's time among sessions that use much of it: one at a time, at most half of the time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, share: SessionShare) -> None:
        """Wait until a session has paid the time it owes. The caller's step must follow without another await."""
        while share.owed_s:
            async with self._lock:
                owed = share.owed_s
                await asyncio.sleep(owed)
                share.owed_s = max(0.0, share.owed_s - owed)  # after the sleep: a cancelled wait has paid nothing


class Conversations(Protocol):
    """The conversations of one session: a forest of turns."""

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put back recorded turns, in the order they were committed."""
        ...

    def rows(
        self, session_id: str, *, reward: float | None, reward_info: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """Return the trajectories as JSON data, one per conversation."""
        ...

    def tokens_of(self, turn_id: int, *, texts: bool = True, relayed: bool = False) -> AnswerTokens | None:
        """Return the exact tokens of one answer, if the engine gave them; the text of each only with ``texts``. With
        ``relayed`` the result may hold the engine's unparsed JSON instead."""
        ...

    def forget_requests(self) -> None:
        """Drop the caches that only make further answers cheaper."""
        ...


class ForestConversations:
    """Conversations kept as turns of a `TokenForest`."""

    def __init__(self, forest: TokenForest) -> None:
        self.forest = forest
        self._preparing = asyncio.Lock()

    async def prepared(self, request: PolicyRequest, context: CallContext) -> Prepared:
        """See `TokenForest.prepare`. Prepares one request at a time, a long one without holding the event loop."""
        async with self._preparing:
            if context.body_bytes <= SMALL_BYTES:
                return self.forest.prepare(request.messages, request.tools)
            working = step_begins(context.body_bytes)
            step = partial(_next, self.forest.preparing(request.messages, request.tools))
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
    """The data of a call in addition to its request."""

    session_id: str | None
    """The session's id, for stickiness; ``None`` for a call without one."""
    call_id: str
    """32 hexadecimal digits, unique: the answer's id, and the prefix of the engine's request ids."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """The session's sampling parameters, which override the request's."""
    body_bytes: int = 0
    """Size of the request's body; 0 if unknown."""
    share: SessionShare = field(default_factory=SessionShare)
    """The session's share, charged for steps that held the event loop."""
    turns: LoopTurns = field(default_factory=LoopTurns)
    """Await its turn before such a step."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """Facts about a committed turn, for observers."""

    turn_id: int
    engines: tuple[str, ...]
    """The engines that sampled it, in order."""
    weights_version: str | None
    split_reason: SplitReason | None


def call_details(request: PolicyRequest, context: CallContext, engine: str, seconds: float) -> dict[str, Any]:
    """Return the details of a turn that ``engine`` sampled in ``seconds``; see `Sampled.details`."""
    details: dict[str, Any] = {"call_id": context.call_id, "engine": engine, "seconds": round(seconds, 4)}
    if otherwise := asked_otherwise(request.asked, context.pinned):
        details["asked_otherwise"] = otherwise
    return details


class Backend(Protocol[C, D]):
    """Samples answers. ``sample`` may be cancelled at any await, and then has changed nothing. ``commit`` does not
    await; call it once for each result of ``sample``."""

    @property
    def context_tokens(self) -> int | None:
        """The configured limit of prompt and answer together; ``None`` if only the engines know their limits."""
        ...

    @property
    def tokenizer_probe(self) -> TokenizerProbe | None:
        """A text and its token ids that show whether an engine that takes token ids serves this policy."""
        ...

    def conversations(self, now: datetime) -> C:
        """Return the conversations of a new session. ``now`` is its start, for templates that print the date."""
        ...

    async def sample(self, conversations: C, request: PolicyRequest, context: CallContext) -> D:
        """Sample an answer. Raises `EngineError`, `ContextOverflowError`, `InvalidBodyError`."""
        ...

    def commit(
        self, conversations: C, request: PolicyRequest, sampled: D
    ) -> tuple[Answer, Mapping[str, Any], TurnFacts]:
        """Keep a sample. Returns the answer, the turn as the journal records it, and facts about the turn."""
        ...

    def take_back(self, conversations: C, turn_id: int) -> None:
        """Undo the latest ``commit``, whose turn could not be made durable."""
        ...

    async def count_tokens(self, request: PolicyRequest) -> int | None:
        """Return the number of tokens of the request as a prompt; ``None`` if it cannot be known."""
        ...

    def forget(self, session_id: str) -> None:
        """Forget a session, which has ended."""
        ...
