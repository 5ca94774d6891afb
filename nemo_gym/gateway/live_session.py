"""One session in the memory of the running gateway, and its durable answers.

A retry gets the answer that was sampled before, a deliberate resample gets a new one:

    (new) ─▶ SAMPLING ─▶ COMMITTING ─▶ COMMITTED ─▶ SENT
                │  ▲          │            │  ▲       │
    nobody waits│  └─ joined ─┘     replayed│  └───────┘ found undelivered
    or it failed▼                           ▼
             (gone)                  answer again

*Committed* is durable: the turn is in the journal. *Sent* means that all of it was handed to the network. The same
request in any state before *sent* is a retry; after *sent* it is a new sample, unless its idempotency key, or what
the server knows about the connection, shows that it is a retry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from nemo_gym.contract.errors import ContractError, RowError
from nemo_gym.gateway.backend import C, SessionShare
from nemo_gym.gateway.dialects.chat import ConversationCache
from nemo_gym.gateway.journal import JournaledBody, SessionRecord, SessionState
from nemo_gym.gateway.policy_request import Answer, AnswerEnd, AnswerUsage, Buffer, JsonText, written
from nemo_gym.gateway.sessions import StoredSession
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
    """Nothing. The request gets a new sample, unless it carries the idempotency key of the first."""
    RETRY = "retry"
    """The client declares a retry."""
    RESAMPLE = "resample"
    """It came on the connection on which the whole answer was read. Only an equal idempotency key makes it a retry."""


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
        self.superseded = False
        """Whether a later equal request, which asked for a new sample, failed. Its retry must not get this answer."""

    def tell(self, outcome: Callable[[asyncio.Future[A]], object]) -> None:
        """Apply ``outcome`` to the future of every waiter."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                outcome(waiter)

    def ended(self, task: asyncio.Task[A]) -> None:
        """Pass a failure of the task on to all waiters, even if it was cancelled before it began."""
        if task.cancelled():
            self.tell(lambda waiter: waiter.cancel())
        elif (error := task.exception()) is not None:  # retrieved, so that asyncio does not log it if nobody waits
            self.tell(lambda waiter: waiter.set_exception(error))


class Delivery(Generic[A]):
    """An answer for one caller. Call ``sent()`` when its last byte has left."""

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
        """Call when the caller cannot have read all of the answer, for example because its connection was reset."""
        if self._entry.state is AnswerState.SENT:
            self._entry.state = AnswerState.COMMITTED


class SessionAnswers(Generic[A]):
    """The answers of one session. At most ``kept`` finished ones stay in memory; the oldest are dropped first."""

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
        """Sample and commit the answer to a request, or return the answer of the equal request that this one repeats.

        ``sample`` is cancelled when all its waiters have left; nothing is kept then. ``commit`` makes its result
        durable and is never interrupted; its answer is kept even if nobody waits any more. An error of either is
        raised in all waiters, and the request may be made again. Raises `IdempotencyKeyError`."""
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
        """Put back an answer from the journal. Call it in the order of commits."""
        entry = _Entry[A](fingerprint, key)
        entry.answer = answer
        entry.state = AnswerState.SENT if sent else AnswerState.COMMITTED
        self._entries.append(entry)
        self._forget_oldest()

    async def aclose(self) -> None:
        """Cancel the answers that are being sampled, and wait for those that are being committed."""
        for entry in [*self._entries]:
            if entry.task is not None and not entry.task.done():
                if entry.state is AnswerState.SAMPLING:
                    entry.task.cancel()
                await asyncio.wait({entry.task})

    @property
    def states(self) -> list[AnswerState]:
        """The states of all answers in memory, oldest first."""
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
                return entry if repeat is Repeat.RETRY and not entry.superseded else None
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
            self._drop_failed(entry)
            raise
        entry.state = AnswerState.COMMITTED
        self._forget_oldest()
        entry.tell(lambda waiter: waiter.set_result(answer))  # sooner than in the task's done callback
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
                # Removed now and not when the task has ended: a request that comes meanwhile must not join it.
                self._drop_failed(entry)
                task.cancel()
            raise

    def _drop_failed(self, failed: _Entry[A]) -> None:
        if failed in self._entries:
            self._entries.remove(failed)
            for entry in self._entries:
                if entry.fingerprint == failed.fingerprint and entry.state is AnswerState.SENT:
                    entry.superseded = True

    def _forget_oldest(self) -> None:
        finished = [e for e in self._entries if e.state in (AnswerState.COMMITTED, AnswerState.SENT)]
        for entry in finished[: max(0, len(finished) - self._kept)]:
            self._entries.remove(entry)


# Signs in a request that it is a retry of a request whose answer was sent.
#
# A server cannot see what a client has read. But an HTTP/1.1 client sends its next request on a connection only after
# it has read the whole answer there, and never on a broken connection; and some clients declare their retries.

IDEMPOTENCY_HEADERS = ("idempotency-key", "x-idempotency-key")
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""The SDKs of OpenAI and Anthropic count their own retries in it. Claude Code always sends 0, which shows nothing."""


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The arguments ``key`` and ``repeat`` of `SessionAnswers.once`."""

    key: str | None
    repeat: Repeat


def request_hints(
    headers: Mapping[str, str], connection: Connection | None, answered_on: Connection | None
) -> RequestHints:
    """Return the hints of a request from its headers (lower-case names), the connection it came on, and the connection
    on which this session's last answer to an equal request was sent, if any."""
    key = next((headers[name].strip() for name in IDEMPOTENCY_HEADERS if headers.get(name)), None)
    count = headers.get(RETRY_COUNT_HEADER, "")
    if count.isdecimal() and count.strip("0"):  # as text: an integer of thousands of digits is an error
        return RequestHints(key or None, Repeat.RETRY)
    if connection is not None and connection == answered_on:
        return RequestHints(key or None, Repeat.RESAMPLE)
    return RequestHints(key or None, Repeat.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Committed:
    """One answer and its turn. ``answer`` carries no tokens: the turn has them."""

    answer: Answer
    turn_id: int
    index: int = 0
    """The turn's place in the journal; also 0 for a call without a session."""
    size: int = 0
    """Bytes of the turn in the journal, likewise."""


_LARGE_TEXT_BYTES = 64 << 10
"""The least size of a text that memory drops: reading a smaller one back costs more than keeping it."""
_USAGE = tuple(one.name for one in fields(AnswerUsage))


class _Body(msgspec.Struct):
    answer: dict[str, Any]
    turn: dict[str, Any]
    relayed: dict[str, msgspec.Raw] = {}


_BODIES = msgspec.json.Decoder(_Body)


def encode_committed(answer: Answer, turn: Mapping[str, Any]) -> list[Buffer]:
    """Return the journal's body of a turn, in pieces. The texts in ``turn["relayed"]`` (`JsonText` by name) are not
    copied."""
    answer_data = {
        "id": answer.answer_id,
        "created_at": answer.created_at,
        "model": answer.model,
        "message": answer.message,
        "end": answer.end,
        "usage": {name: getattr(answer.usage, name) for name in _USAGE},
        "stop": answer.stop,
    }
    # The answer's message is usually the turn's as well, and then written once.
    turn_data = {name: value for name, value in turn.items() if name != "relayed" and value is not answer.message}
    return written({"answer": answer_data, "turn": turn_data, "relayed": turn.get("relayed") or {}})


@dataclass(frozen=True, slots=True)
class LargeText:
    """A relayed text that memory need not hold once its answer has left; the journal has it."""

    text: JsonText
    offset: int
    """Its place in the journal's body of the turn, in bytes."""
    length: int

    def let_go(self, body: JournaledBody) -> None:
        self.text.let_go(partial(body.read, self.offset, self.length))


def large_in(turn: Mapping[str, Any]) -> list[JsonText]:
    """Return the large texts among those that a turn relays."""
    return [text for text in (turn.get("relayed") or {}).values() if len(text.data) >= _LARGE_TEXT_BYTES]


def large_texts(turn: Mapping[str, Any], pieces: Sequence[Buffer]) -> list[LargeText]:
    """Return the large texts of ``turn`` with their places in ``pieces``, the journal's body of the turn."""
    texts = large_in(turn)
    if not texts:
        return []
    starts: dict[int, int] = {}
    at = 0
    for piece in pieces:
        starts[id(piece)] = at
        at += len(piece)
    return [LargeText(text, starts[id(text.data)], len(text.data)) for text in texts]


def large_texts_of(turn: Mapping[str, Any], body: bytes) -> list[LargeText]:
    """Return the large texts of ``turn``, which `decode_committed` read from ``body``, with their places in it."""
    return [LargeText(text, body.find(text.data), len(text.data)) for text in large_in(turn)]


def decode_committed(body: bytes, index: int) -> tuple[Committed, Mapping[str, Any]]:
    """Return the answer and its turn's record. Raises `RowError` for a body of another version."""
    try:
        data = _BODIES.decode(body)
        answer_data, turn = data.answer, data.turn
        turn.setdefault("message", answer_data["message"])
        # Not as views, which would keep the whole body in memory.
        turn["relayed"] = {name: JsonText(bytes(raw)) for name, raw in data.relayed.items()}
        answer = Answer(
            answer_data["id"],
            answer_data["created_at"],
            answer_data["model"],
            answer_data["message"],
            AnswerEnd(answer_data["end"]),
            AnswerUsage(**answer_data["usage"]),
            answer_data["stop"],
        )
        return Committed(answer, turn["turn_id"], index, len(body)), turn
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
        raise RowError(f"the journal holds a turn that this version cannot read ({error})") from error


# One session in the memory of the running gateway.

_REMEMBERED_CONNECTIONS = 64


@dataclass(slots=True)
class LiveSession(StoredSession, Generic[C]):
    """One session. ``session`` is the part that routes use."""

    record: SessionRecord
    conversations: C
    state: SessionState = SessionState.OPEN
    reason: str | None = None
    """Why it was aborted."""
    closed_at: float | None = None
    """Unix seconds; set when the end is durable."""
    reward_info: dict[str, Any] = field(default_factory=dict)
    """The data that came with the reward, including ``reward`` itself."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session changes its state."""
    answers: SessionAnswers[Committed] = field(default_factory=SessionAnswers)
    cache: ConversationCache = field(default_factory=ConversationCache)
    in_flight: int = 0
    share: SessionShare = field(default_factory=SessionShare)
    _answered_on: dict[str, Connection] = field(default_factory=dict)

    def answered_on(self, fingerprint: str) -> Connection | None:
        """Return the connection on which the last answer to an equal request was sent, if it is still known."""
        return self._answered_on.get(fingerprint)

    def sent_on(self, fingerprint: str, connection: Connection | None) -> None:
        self._answered_on.pop(fingerprint, None)
        if connection is not None:
            self._answered_on[fingerprint] = connection
            if len(self._answered_on) > _REMEMBERED_CONNECTIONS:
                del self._answered_on[next(iter(self._answered_on))]

    def forget_requests(self) -> None:
        """Drop the caches that only make further calls cheaper."""
        self.cache = ConversationCache()
        self.conversations.forget_requests()
