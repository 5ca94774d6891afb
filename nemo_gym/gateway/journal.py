"""The journal's records of sessions: their states, their turns, and the places of their turns' bodies.

The states of a gateway session:

    OPEN ──complete──▶ COMPLETE ──finalize──▶ FINALIZED
      │ └───────────────finalize──────────────▲
      └──abort──▶ ABORTED ◀──abort── COMPLETE

Each step may be repeated and then changes nothing. A finalized session cannot be aborted, and an aborted one cannot be
finalized: the first end is final.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson
import structlog

from nemo_gym.contract.errors import ContractError, FencedError
from nemo_gym.gateway.journal_log import SEGMENT_BYTES, Durability, JournalDamagedError, JournalError, JournalLog
from nemo_gym.gateway.policy_request import Buffer, size_of

log = structlog.get_logger(__name__)


class SessionState(StrEnum):
    OPEN = "open"
    """Accepts inference."""
    COMPLETE = "complete"
    """The runner reported that it is done; accepts no inference, and waits for its owner to finalize or abort."""
    FINALIZED = "finalized"
    ABORTED = "aborted"


_STEPS = {
    SessionState.OPEN: frozenset({SessionState.COMPLETE, SessionState.FINALIZED, SessionState.ABORTED}),
    SessionState.COMPLETE: frozenset({SessionState.FINALIZED, SessionState.ABORTED}),
    SessionState.FINALIZED: frozenset[SessionState](),
    SessionState.ABORTED: frozenset[SessionState](),
}


# The place of a record's body in the journal, for callers that read it again instead of keeping it in memory.


@dataclass(frozen=True, slots=True)
class JournaledBody:
    """The place of a body in a segment's file, in bytes. It is valid until its session is forgotten."""

    path: Path
    start: int

    def read(self, offset: int, length: int) -> bytes:
        """Read a part of the body. Raises `JournalError` if it no longer exists."""
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), length, self.start + offset)
        except OSError as error:
            raise JournalError(f"the journal {self.path} cannot be read: {error}", retryable=True) from error
        if len(data) != length:
            raise JournalError(f"the journal {self.path} has been cut off at byte {self.start + offset + len(data)}")
        return data


# The records about sessions: a small header as JSON, and a body that only the journal's user reads.


class RecordKind(StrEnum):
    OPENED = "opened"
    TURN = "turn"
    SENT = "sent"
    STATE = "state"
    FORGOTTEN = "forgotten"


def encode(kind: RecordKind, session_id: str, body: bytes = b"", **header: Any) -> bytes:
    return orjson.dumps({"kind": kind, "session": session_id, **header}) + b"\n" + body


def decode(payload: memoryview) -> tuple[dict[str, Any], bytes]:
    """Return header and body. JSON on one line has no newline, so the first newline ends the header."""
    head, _, body = bytes(payload).partition(b"\n")
    header: dict[str, Any] = orjson.loads(head)
    return header, body


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The data of a session at its opening. Tokens are stored as digests only."""

    session_id: str
    rollout: Mapping[str, Any]
    inference_digest: str
    control_digest: str
    opened_at: float
    deadline_at: float
    """Unix seconds; an unfinished session is aborted then."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further plain data of the gateway."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One committed turn. ``index`` counts from 0 within its session."""

    index: int
    fingerprint: str
    key: str | None
    body: bytes
    journaled: JournaledBody
    """The place of ``body`` in the journal."""
    sent: bool = False
    """Whether the whole answer was handed to the network before the restart."""


@dataclass(slots=True)
class ReplayedSession:
    """A session that a restarted gateway reads from the journal."""

    record: SessionRecord
    state: SessionState = SessionState.OPEN
    turns: list[TurnRecord] = field(default_factory=list)
    result: bytes = b""
    """The body of the step that ended it: the reward info of a completed session, the summary of a finalized one."""
    reason: str | None = None
    """Why it was aborted."""


# The journal of gateway sessions: acknowledged changes survive the death of the process.

DEADLINE_REASON = "deadline"


@dataclass(slots=True)
class _Session:
    record: SessionRecord
    state: SessionState = SessionState.OPEN
    turns: int = 0
    result: bytes = b""
    reason: str | None = None
    segments: set[int] = field(default_factory=set)


class SessionJournal:
    """Sessions and their committed turns. Each method takes effect at once for later calls, and returns when its
    change is durable. Turns themselves are not kept in memory: only `open`, after a restart, returns them."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._forgetting: dict[str, _Session] = {}
        self._log: JournalLog
        self._oldest_segment = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        durability: Durability = "power_loss",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> tuple[SessionJournal, list[ReplayedSession]]:
        """Open the journal in ``directory``. Also returns every session in it that was not forgotten, in order of
        opening. Raises `JournalBusyError`, `JournalDamagedError`."""
        self = cls()
        replayed: dict[str, ReplayedSession] = {}
        segments: dict[str, set[int]] = {}
        incomplete: set[str] = set()

        def on_record(segment: int, payload: memoryview, place: tuple[Path, int]) -> None:
            header, body = decode(payload)
            session_id = header["session"]
            if header["kind"] == RecordKind.FORGOTTEN:
                replayed.pop(session_id, None)
                incomplete.discard(session_id)
            elif session_id not in replayed and header["kind"] != RecordKind.OPENED:
                # Its first segment was dropped, which is correct if a later record says that it was forgotten.
                incomplete.add(session_id)
            else:
                segments.setdefault(session_id, set()).add(segment)
                _apply(replayed, header, body, JournaledBody(place[0], place[1] - len(body)))

        def on_end() -> None:
            if incomplete:
                raise JournalDamagedError(f"{directory} lacks the beginning of sessions {sorted(incomplete)}")

        self._log = JournalLog.open(
            directory, on_record, on_end=on_end, durability=durability, segment_bytes=segment_bytes
        )
        for session_id, session in replayed.items():
            self._sessions[session_id] = _Session(
                session.record, session.state, len(session.turns), session.result, session.reason, segments[session_id]
            )
        self._oldest_segment = self._first_segment()
        self._drop_segments()
        return self, [*replayed.values()]

    @property
    def log(self) -> JournalLog:
        return self._log

    def state(self, session_id: str) -> SessionState:
        return self._require_session(session_id).state

    def turns(self, session_id: str) -> int:
        """Return the number of committed turns."""
        return self._require_session(session_id).turns

    async def opened(self, record: SessionRecord) -> None:
        """Record a new session. Raises `ContractError` for an id in use."""
        if record.session_id in self._sessions:
            raise ContractError(f"there is a session '{record.session_id}' already", session_id=record.session_id)
        data = encode(RecordKind.OPENED, record.session_id, record=asdict(record))
        self._sessions[record.session_id] = _Session(record)
        await self._append(record.session_id, data, lambda: self._sessions.pop(record.session_id))

    async def commit_turn(
        self,
        session_id: str,
        body: bytes | Sequence[Buffer],
        *,
        fingerprint: str,
        key: str | None = None,
        undo: Callable[[], None] | None = None,
    ) -> tuple[int, JournaledBody]:
        """Commit one turn, whole or in pieces, and return its index and the place from which the body can be read.
        Cancelling the wait does not undo the turn. If the turn does not become durable, ``undo`` is called before any
        other change to the session. Raises `FencedError` if the session accepts no more turns, `JournalFullError` if
        the disk is full."""
        session = self._require_session(session_id)
        if session.state is not SessionState.OPEN:
            raise FencedError(f"session '{session_id}' is {session.state}", session_id=session_id)
        index = session.turns
        head = encode(RecordKind.TURN, session_id, index=index, fingerprint=fingerprint, key=key)
        data = [head, body] if isinstance(body, bytes) else [head, *body]
        session.turns += 1

        def roll_back() -> None:
            session.turns -= 1
            if undo is not None:
                undo()

        durable = self._append(session_id, data, roll_back)
        path, end = self._log.place
        await durable
        return index, JournaledBody(path, end - size_of(data[1:]))

    def sent(self, session_id: str, index: int) -> None:
        """Record that the answer of a turn was handed to the network. Does not wait: if a crash loses this record, an
        equal request gets the same answer once more."""
        self._note(session_id, encode(RecordKind.SENT, session_id, index=index))

    def undelivered(self, session_id: str, index: int) -> None:
        """Record that the caller cannot have read the answer of a turn. Does not wait either."""
        self._note(session_id, encode(RecordKind.SENT, session_id, index=index, delivered=False))

    async def complete(self, session_id: str, reward_info: bytes = b"") -> None:
        """Record that the session's runner is done. A repeated call changes nothing."""
        await self._step(session_id, SessionState.COMPLETE, reward_info, None)

    async def finalize(self, session_id: str, summary: bytes) -> bytes:
        """End a session with its result, and return the result; a repeated call returns the first result."""
        return await self._step(session_id, SessionState.FINALIZED, summary, None)

    async def abort(self, session_id: str, reason: str) -> None:
        """End a session without a result. A repeated call changes nothing."""
        await self._step(session_id, SessionState.ABORTED, b"", reason)

    async def forget(self, session_id: str) -> None:
        """Free the space of a session whose result has been taken. Forgetting twice is no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            # Its segments are needed until the record that it was forgotten is durable.
            self._forgetting[session_id] = session
            await asyncio.shield(self._record_forgotten(session_id))

    async def aclose(self) -> None:
        await self._log.aclose()

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_session(self, session_id: str) -> _Session:
        if session_id not in self._sessions:
            raise ContractError(f"session '{session_id}' is not known here", session_id=session_id)
        return self._sessions[session_id]

    def _append(
        self, session_id: str, data: bytes | Sequence[Buffer], undo: Callable[[], object] | None = None
    ) -> asyncio.Future[None]:
        session = self._sessions[session_id]
        future = self._log.append(data, undo=undo)
        session.segments.add(self._log.segment)
        return future

    def _note(self, session_id: str, data: bytes) -> None:
        if session_id in self._sessions:
            self._append(session_id, data).add_done_callback(_retrieve_exception)

    async def _step(self, session_id: str, then: SessionState, result: bytes, reason: str | None) -> bytes:
        session = self._require_session(session_id)
        if session.state is then:
            # The first call's record may not be durable yet; another record becomes durable only after it.
            result, reason = session.result, session.reason
        elif then not in _STEPS[session.state]:
            raise FencedError(
                f"session '{session_id}' is {session.state}; it cannot become {then}", session_id=session_id
            )
        data = encode(RecordKind.STATE, session_id, result, state=then, reason=reason)
        before = session.state, session.result, session.reason
        session.state, session.result, session.reason = then, result, reason

        def undo() -> None:
            session.state, session.result, session.reason = before

        await self._append(session_id, data, undo)
        return result

    async def _record_forgotten(self, session_id: str) -> None:
        def undo() -> None:
            self._sessions[session_id] = self._forgetting.pop(session_id)

        await self._log.append(encode(RecordKind.FORGOTTEN, session_id), undo=undo)
        del self._forgetting[session_id]
        self._drop_segments()

    def _drop_segments(self) -> None:
        """Remove the oldest segments that no session needs, but none after a needed one: the record that a session was
        forgotten must outlive all its earlier records."""
        # Called for every forgotten session. Nothing can be removed while the oldest segment is still written to.
        while self._oldest_segment < self._log.segment and not self._is_needed(self._oldest_segment):
            try:
                self._log.drop_segment(self._oldest_segment)
            except OSError as error:  # tried again for the next forgotten session
                log.warning("segment of the journal not removed", segment=self._oldest_segment, error=str(error))
                return
            self._oldest_segment = self._first_segment()

    def _is_needed(self, segment: int) -> bool:
        return any(
            segment in session.segments
            for sessions in (self._sessions, self._forgetting)
            for session in sessions.values()
        )

    def _first_segment(self) -> int:
        return next(iter(self._log.segments()), self._log.segment)


def _apply(
    replayed: dict[str, ReplayedSession], header: dict[str, Any], body: bytes, journaled: JournaledBody
) -> None:
    session_id, kind = header["session"], RecordKind(header["kind"])
    if kind is RecordKind.OPENED:
        replayed[session_id] = ReplayedSession(SessionRecord(**header["record"]))
        return
    session = replayed[session_id]
    if kind is RecordKind.TURN:
        if header["index"] != len(session.turns):
            raise JournalDamagedError(
                f"session '{session_id}' has turn {header['index']} where turn {len(session.turns)} belongs"
            )
        session.turns.append(TurnRecord(header["index"], header["fingerprint"], header["key"], body, journaled))
    elif kind is RecordKind.SENT:
        if header["index"] < len(session.turns):
            sent = header.get("delivered", True)
            session.turns[header["index"]] = replace(session.turns[header["index"]], sent=sent)
    else:
        session.state, session.result, session.reason = SessionState(header["state"]), body, header["reason"]


def _retrieve_exception(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()
