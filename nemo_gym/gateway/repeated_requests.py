"""One session's answers: a retry gets the answer that was sampled, a deliberate resample gets a new one.

    (new) ─▶ SAMPLING ─▶ COMMITTING ─▶ COMMITTED ─▶ SENT
                │  ▲          │            │  ▲       │
    nobody waits│  └─ joined ─┘     replayed│  └───────┘ found undelivered
    or it failed▼                           ▼
             (gone)                  answer again

*Committed* is durable: the turn is in the journal. *Sent* means that all of it was handed to the network. The same
request in any state before *sent* is a retry; after *sent* it is a new sample, unless its idempotency key, or what
the server knows about the connection, says that it is a retry after all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from nemo_gym.contract.errors import ContractError
from nemo_gym.http.delivery import Connection

S = TypeVar("S")
A = TypeVar("A")

KEPT_ANSWERS = 64


class AnswerState(StrEnum):
    SAMPLING = "sampling"
    COMMITTING = "committing"
    COMMITTED = "committed"
    SENT = "sent"


class Repeat(StrEnum):
    """What the server knows about a request that equals one whose answer was sent."""

    UNKNOWN = "unknown"
    """Nothing: a new sample, unless it carries the idempotency key of the first."""
    RETRY = "retry"
    """The client says so, or its connection broke before it can have read the answer."""
    RESAMPLE = "resample"
    """It comes on the connection that the whole answer was read from. Only an idempotency key says otherwise."""


class IdempotencyKeyError(ContractError):
    """An idempotency key was used for two different requests."""

    code = "idempotency_key"
    status = 422


class _Entry(Generic[A]):
    def __init__(self, fingerprint: str, key: str | None) -> None:
        self.fingerprint = fingerprint
        self.key = key
        self.state = AnswerState.SAMPLING
        self.waiters: list[asyncio.Future[A]] = []
        self.task: asyncio.Task[A] | None = None
        self.answer: A | None = None

    def tell(self, outcome: Callable[[asyncio.Future[A]], object]) -> None:
        """All who wait."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                outcome(waiter)

    def ended(self, task: asyncio.Task[A]) -> None:
        """Also where the task ended before it began."""
        if task.cancelled():
            self.tell(lambda waiter: waiter.cancel())
        elif (error := task.exception()) is not None:  # a failure that nobody waits for any more is no news
            self.tell(lambda waiter: waiter.set_exception(error))


class Delivery(Generic[A]):
    """An answer for one caller. Say ``sent()`` when its last byte has left."""

    def __init__(self, entry: _Entry[A], answer: A, *, repeated: bool) -> None:
        self._entry = entry
        self.answer = answer
        self.repeated = repeated
        """Whether this answer was sampled for an earlier request."""

    def sent(self) -> None:
        self._entry.state = AnswerState.SENT

    @property
    def counts_as_sent(self) -> bool:
        return self._entry.state is AnswerState.SENT

    def undelivered(self) -> None:
        """It turned out that the caller cannot have read all of it, for example because its connection was reset."""
        if self._entry.state is AnswerState.SENT:
            self._entry.state = AnswerState.COMMITTED


class SessionAnswers(Generic[A]):
    """The answers of one session. At most ``kept`` finished ones are held, the oldest go first."""

    def __init__(self, *, kept: int = KEPT_ANSWERS) -> None:
        self._kept = kept
        self._entries: list[_Entry[A]] = []

    async def once(
        self,
        fingerprint: str,
        sample: Callable[[], Awaitable[S]],
        commit: Callable[[S], Awaitable[A]],
        *,
        key: str | None = None,
        repeat: Repeat = Repeat.UNKNOWN,
    ) -> Delivery[A]:
        """The answer to a request: sampled and committed now, or the one of an equal request that this one repeats.

        ``sample`` is cancelled when all who wait for it have left, and then nothing has happened. ``commit`` makes its
        result durable and is never interrupted; its answer is kept even if nobody waits any more. What either raises
        reaches everybody who waits, and the request may be made again. Raises `IdempotencyKeyError`."""
        entry = self._find(fingerprint, key, repeat)
        repeated = entry is not None
        if entry is None:
            entry = _Entry[A](fingerprint, key)
            entry.task = asyncio.create_task(self._produce(entry, sample, commit))
            entry.task.add_done_callback(entry.ended)
            self._entries.append(entry)
        if entry.key is None:
            entry.key = key
        return Delivery(entry, await self._answer_of(entry), repeated=repeated)

    def restore(self, fingerprint: str, key: str | None, answer: A, *, sent: bool) -> None:
        """Put back what the journal knows, in the order of commits."""
        entry = _Entry[A](fingerprint, key)
        entry.answer = answer
        entry.state = AnswerState.SENT if sent else AnswerState.COMMITTED
        self._entries.append(entry)
        self._forget_oldest()

    async def aclose(self) -> None:
        """End what is being sampled; what is being committed is waited for."""
        for entry in [*self._entries]:
            if entry.task is not None and not entry.task.done():
                if entry.state is AnswerState.SAMPLING:
                    entry.task.cancel()
                await asyncio.wait({entry.task})

    @property
    def states(self) -> list[AnswerState]:
        """Of all entries held, oldest first."""
        return [entry.state for entry in self._entries]

    def _find(self, fingerprint: str, key: str | None, repeat: Repeat) -> _Entry[A] | None:
        if key is not None:
            for entry in reversed(self._entries):
                if entry.key == key:
                    if entry.fingerprint != fingerprint:
                        raise IdempotencyKeyError(
                            f"the idempotency key '{key}' was used for another request; give each request its own"
                        )
                    return entry
        for entry in reversed(self._entries):
            if entry.fingerprint != fingerprint or (key is not None and entry.key is not None):
                continue
            if entry.state is AnswerState.SENT:
                # The latest one decides: earlier ones were already superseded by a deliberate resample.
                return entry if repeat is Repeat.RETRY else None
            return entry
        return None

    async def _produce(
        self, entry: _Entry[A], sample: Callable[[], Awaitable[S]], commit: Callable[[S], Awaitable[A]]
    ) -> A:
        try:
            sampled = await sample()
            entry.state = AnswerState.COMMITTING
            entry.answer = answer = await commit(sampled)
        except BaseException:
            if entry in self._entries:
                self._entries.remove(entry)
            raise
        entry.state = AnswerState.COMMITTED
        self._forget_oldest()
        entry.tell(lambda waiter: waiter.set_result(answer))  # sooner than the end of the task would
        return answer

    async def _answer_of(self, entry: _Entry[A]) -> A:
        task = entry.task
        if task is None:
            assert entry.answer is not None
            return entry.answer
        if task.done():
            return task.result()
        waiter: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in entry.waiters:
                entry.waiters.remove(waiter)
            if not entry.waiters and not task.done() and entry.state is AnswerState.SAMPLING:
                # Gone at once, not when the task has ended: a request that comes meanwhile must not join it.
                self._entries.remove(entry)
                task.cancel()
            raise

    def _forget_oldest(self) -> None:
        finished = [e for e in self._entries if e.state in (AnswerState.COMMITTED, AnswerState.SENT)]
        for entry in finished[: max(0, len(finished) - self._kept)]:
            self._entries.remove(entry)


# What a request itself tells about being a retry of one whose answer was sent.
#
# A server cannot see what a client has read. But HTTP/1.1 clients send their next request on a connection only after
# they have read the whole answer on it, and never on one that broke; and some say outright that they retry.

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key")
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""The SDKs of OpenAI and Anthropic count their own retries in it. Claude Code sends 0 always, which says nothing."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """``key`` and ``repeat`` are what `SessionAnswers.once` takes."""

    key: str | None
    repeat: Repeat


def request_hints(
    headers: Mapping[str, str], connection: Connection | None, answered_on: Connection | None
) -> RequestHints:
    """From a request's headers (lower-case names), the connection it came on, and the one on which this session's last
    answer to an equal request was sent, if any."""
    key = next((headers[name].strip() for name in IDEMPOTENCY_HEADERS if headers.get(name)), None)
    count = headers.get(RETRY_COUNT_HEADER, "")
    if count.isdecimal() and count.strip("0"):  # as text: an integer of thousands of digits is an error
        return RequestHints(key or None, Repeat.RETRY)
    if connection is not None and connection == answered_on:
        return RequestHints(key or None, Repeat.RESAMPLE)
    return RequestHints(key or None, Repeat.UNKNOWN)
