"""An environment's attempts: the current attempt of each rollout, its seed's reply, and its first verdict.

A SQLite database is the source of truth. Every query or update is one operation on it, run one at a time, so no two
interleave, and confirmed writes survive a kill (WAL mode). Without a state directory the database is a temporary file.
Seeds are always in a temporary file, because the session state behind a seed ends with the process. This process's
memory caches a bounded number of attempts, the most recently used.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from nemo_gym.contract.errors import ConfigError, ContractError, CredentialError, FencedError, ServerError
from nemo_gym.contract.session import NO_SESSION, RolloutIdentity
from nemo_gym.contract.verdict import RowAccess, row_digest
from nemo_gym.http.client import encode_json
from nemo_gym.storage import SqliteWriter

MAX_KNOWN = 4096
"""Rollouts whose newest attempt and its state this process caches in memory."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollout (
    run_id TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, closed INTEGER NOT NULL,
    PRIMARY KEY (run_id, rollout_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS verdict (
    run_id TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    digest TEXT NOT NULL, final INTEGER NOT NULL, reply BLOB NOT NULL,
    PRIMARY KEY (run_id, rollout_id, attempt)
) WITHOUT ROWID;
CREATE TEMP TABLE seed (
    run_id TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    digest TEXT NOT NULL, reply BLOB NOT NULL, session BLOB NOT NULL,
    PRIMARY KEY (run_id, rollout_id)
) WITHOUT ROWID;
CREATE TEMP TABLE given (
    run_id TEXT NOT NULL, rollout_id TEXT NOT NULL, attempt INTEGER NOT NULL, ref TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL, rollout TEXT NOT NULL, access TEXT NOT NULL, row BLOB NOT NULL,
    PRIMARY KEY (run_id, rollout_id)
);
"""
_ROLLOUT = "run_id = ? AND rollout_id = ?"

T = TypeVar("T")


class AttemptKey(NamedTuple):
    """The identity of the attempt that a token or a session belongs to."""

    run_id: str
    rollout_id: str
    attempt: int

    @classmethod
    def of(cls, rollout: RolloutIdentity) -> AttemptKey:
        return cls(rollout.run_id, rollout.rollout_id, rollout.attempt)


@dataclass(slots=True)
class Seed:
    """A seed's reply and session, kept to answer a repeated seed the same way."""

    digest: str
    reply: Mapping[str, Any]
    session: Mapping[str, Any]


@dataclass(slots=True)
class StoredVerdict:
    """The first verdict of an attempt. An invalid verdict is not ``final``: the same work may be graded again."""

    digest: str
    final: bool
    reply: Mapping[str, Any]


class _RolloutState(NamedTuple):
    """The newest attempt of a rollout; 0 if it has none yet."""

    attempt: int = 0
    closed: bool = False


class AttemptStore:
    """The database of attempts. A write is durable when it returns. Belongs to the first event loop that uses it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: OrderedDict[tuple[str, str], _RolloutState] = OrderedDict()
        self._refused: set[AttemptKey] = set()
        """Attempts whose session was asked for and is not here. They are few: those that were open when the process
        before this one ended, because a session's cookie or token comes from a seed."""
        self._unseeded: set[AttemptKey] = set()
        """Attempts without a seed whose first verdict, which this process stored, was invalid."""
        self._writer: SqliteWriter | None = None
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._open()
        except (OSError, sqlite3.Error) as error:
            where = path or "a temporary file"
            raise ConfigError(
                f"state_dir: cannot keep verdicts in {where} ({error}); choose a writable directory",
                key="state_dir",
            ) from error

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path or "", isolation_level=None, check_same_thread=False)
        if self._path is not None:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA wal_autocheckpoint=4000")
        db.execute("PRAGMA temp_store=FILE")
        db.executescript(_SCHEMA)
        return db

    def ask(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run one operation on the database; `RowStore` uses this too."""
        return self._opened_writer().call(operation)

    def _run_here(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run an operation that only reads, or writes only temporary tables, on this thread if the writer is idle:
        handing it to the writer's thread takes twice as long as the operation."""
        return self._opened_writer().call_here(operation)

    def _opened_writer(self) -> SqliteWriter:
        if self._writer is None:
            self._writer = SqliteWriter(
                lambda: self._db, name="attempts", translate=self._unwritable, stops_when_broken=False
            )
        return self._writer

    def _unwritable(self, error: Exception) -> ServerError:
        where = self._path or "a temporary file"
        return ServerError(
            f"cannot keep attempts and verdicts in {where}: {error}; free disk space or fix the error, then retry",
            retryable=True,
        )

    def _remember(self, key: tuple[str, str], attempt: int, *, closed: bool) -> None:
        """Cache a rollout's state. Results may arrive out of order, so a newer or closed attempt stays."""
        state = self._known.pop(key, _RolloutState())
        self._known[key] = max(state, _RolloutState(attempt, closed))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def require_current(self, rollout: RolloutIdentity) -> None:
        """Raise `FencedError` when a newer attempt has replaced this one."""
        key = _key(rollout)
        _check_current(rollout, await self.ask(lambda db: _load_state(db, key)))

    async def require_live(self, run_id: str, rollout_id: str, attempt: int) -> None:
        """Raise `FencedError` when the attempt was replaced or closed."""
        key = (run_id, rollout_id)
        state = self._known.get(key)
        if state is None:
            state = await self.ask(lambda db: _load_state(db, key))
            self._remember(key, state.attempt, closed=state.closed)
        if state.attempt > attempt or (state.closed and state.attempt == attempt):
            raise FencedError(
                f"attempt {attempt} of rollout '{rollout_id}' was replaced or closed",
                rollout_id=rollout_id,
                attempt=attempt,
            )

    async def session_of(self, run_id: str, rollout_id: str, attempt: int) -> Mapping[str, Any]:
        """The session of an open attempt. Raises `FencedError` if the attempt was replaced or closed, and
        `ContractError` if it was not seeded since this process started."""
        await self.require_live(run_id, rollout_id, attempt)
        key = AttemptKey(run_id, rollout_id, attempt)
        query = f"SELECT session FROM seed WHERE {_ROLLOUT} AND attempt = ?"
        found = await self._run_here(lambda db: db.execute(query, key).fetchone())
        if found is None:
            self._refused.add(key)
            raise ContractError(
                f"attempt {attempt} of rollout '{rollout_id}' has no session here; it must be seeded first",
                rollout_id=rollout_id,
                code_hint=NO_SESSION,
            )
        session: Mapping[str, Any] = orjson.loads(found[0])
        return session

    async def keep_session(self, run_id: str, rollout_id: str, attempt: int, session: Mapping[str, Any]) -> None:
        """Store ``session`` for this attempt's next calls. Does nothing for an attempt that is over."""
        values = (_json(session), run_id, rollout_id, attempt)
        query = f"UPDATE seed SET session = ? WHERE {_ROLLOUT} AND attempt = ?"
        await self.ask(lambda db: db.execute(query, values).rowcount)

    async def seed_of(self, rollout: RolloutIdentity, digest: str) -> Seed | None:
        """The stored seed of this attempt, if any. Raises `FencedError` if the attempt was replaced or closed, and
        `ContractError` if it was seeded with another row."""
        key = _key(rollout)

        def operation(db: sqlite3.Connection) -> Seed | None:
            state = _load_state(db, key)
            _check_current(rollout, state)
            if state.attempt != rollout.attempt:
                return None
            _check_open(rollout, state)
            return _load_seed(db, key, rollout.attempt)

        seed = await self._run_here(operation)
        _check_row(rollout, seed, digest)
        return seed

    async def require_row(self, rollout: RolloutIdentity, digest: str) -> None:
        """Raise `ContractError` if this attempt is open here with another row. The row of a closed attempt, or of one
        that an earlier process seeded, is no longer known and not checked."""
        key = _key(rollout)
        _check_row(rollout, await self.ask(lambda db: _load_seed(db, key, rollout.attempt)), digest)

    async def enter(self, rollout: RolloutIdentity) -> RolloutIdentity | None:
        """Make this the current attempt and fence older ones; returns the older attempt that was open, if any."""
        key = _key(rollout)

        def operation(db: sqlite3.Connection) -> _RolloutState:
            state = _load_state(db, key)
            _check_current(rollout, state)
            if state.attempt != rollout.attempt:
                _save(db, key, rollout.attempt, closed=False)
            return state

        previous = await self.ask(operation)
        self._remember(key, rollout.attempt, closed=previous == _RolloutState(rollout.attempt, True))
        if previous.attempt in (0, rollout.attempt) or previous.closed:
            return None
        return rollout.model_copy(update={"attempt": previous.attempt})

    async def keep_seed(self, rollout: RolloutIdentity, seed: Seed) -> None:
        """Store a seed's reply. Raises `FencedError` if the attempt was replaced or closed meanwhile."""
        key = _key(rollout)
        values = (*key, rollout.attempt, seed.digest, _json(seed.reply), _json(seed.session))

        def operation(db: sqlite3.Connection) -> None:
            state = _load_state(db, key)
            _check_current(rollout, state)
            _check_open(rollout, state)
            db.execute("INSERT OR REPLACE INTO seed VALUES (?,?,?,?,?,?)", values)

        await self._run_here(operation)

    async def verdict_of(self, rollout: RolloutIdentity) -> StoredVerdict | None:
        key = _key(rollout)
        return await self.ask(lambda db: _load_verdict(db, key, rollout.attempt))

    async def admit_verdict(
        self, rollout: RolloutIdentity, row: str, digest: str, *, needs_session: Callable[[], bool] = lambda: False
    ) -> StoredVerdict | None:
        """Return the final verdict to replay, or ``None`` if the work must be graded. ``row`` is the row's digest,
        checked first as in `require_row`. Raises `FencedError` for a replaced attempt, for work that differs from the
        work this attempt was first judged by, and for an open attempt that an earlier process seeded, if its verdict
        ``needs_session`` or its agent missed the session."""
        key, attempt = _key(rollout), AttemptKey.of(rollout)

        def operation(db: sqlite3.Connection) -> tuple[StoredVerdict | None, bool]:
            seed, state = _load_seed(db, key, rollout.attempt), _load_state(db, key)
            _check_row(rollout, seed, row)
            _check_current(rollout, state)
            is_open = state == _RolloutState(rollout.attempt, False)
            return _load_verdict(db, key, rollout.attempt), is_open and seed is None and attempt not in self._unseeded

        stored, is_lost = await self._run_here(operation)
        if stored is not None:
            _check_work(rollout, stored, digest)
            if stored.final:
                return stored
        if is_lost and (attempt in self._refused or needs_session()):
            raise FencedError(
                f"the environment's server restarted since it seeded {rollout}, and lost its session; the task takes a"
                " new attempt",
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                code_hint=NO_SESSION,
            )
        return None

    async def keep_verdict(
        self, rollout: RolloutIdentity, verdict: StoredVerdict, *, closes: bool = False
    ) -> StoredVerdict:
        """Store a verdict unless a final one is stored, and return the stored one. An invalid verdict is replaced only
        by one of the same work. With ``closes`` the same write closes the attempt if the result is final. Raises
        `FencedError` if the stored verdict is for other work."""
        key = _key(rollout)
        values = (*key, rollout.attempt, verdict.digest, verdict.final, _json(verdict.reply))

        def operation(db: sqlite3.Connection) -> StoredVerdict:
            _check_current(rollout, _load_state(db, key))
            db.execute(
                "INSERT INTO verdict VALUES (?,?,?,?,?,?) ON CONFLICT DO UPDATE SET final = excluded.final,"
                " reply = excluded.reply WHERE digest = excluded.digest AND NOT final",
                values,
            )
            new = db.execute("INSERT INTO rollout VALUES (?,?,?,0) ON CONFLICT DO NOTHING", (*key, rollout.attempt))
            if new.rowcount and not verdict.final:
                self._unseeded.add(AttemptKey.of(rollout))
            stored = _load_verdict(db, key, rollout.attempt)
            assert stored is not None
            if closes and stored.final and stored.digest == verdict.digest:
                _close(db, key, rollout.attempt)
            return stored

        stored = await self.ask(operation)
        _check_work(rollout, stored, verdict.digest)
        if closes and stored.final:
            self._remember(key, rollout.attempt, closed=True)
        return stored

    async def close(self, rollout: RolloutIdentity) -> bool:
        """Close the attempt, even an unknown one, so that a late seed of it is refused, and delete its stored row.
        Returns whether it was open."""
        key = _key(rollout)

        def operation(db: sqlite3.Connection) -> bool:
            state = _load_state(db, key)
            _check_current(rollout, state)
            _close(db, key, rollout.attempt)
            return state == _RolloutState(rollout.attempt, False)

        was_open = await self.ask(operation)
        self._remember(key, rollout.attempt, closed=True)
        return was_open

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
        else:
            self._db.close()


def _key(rollout: RolloutIdentity) -> tuple[str, str]:
    return rollout.run_id, rollout.rollout_id


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(value), option=orjson.OPT_NON_STR_KEYS)


def _check_row(rollout: RolloutIdentity, seed: Seed | None, digest: str) -> None:
    if seed is not None and seed.digest != digest:
        raise ContractError(
            f"{rollout} was seeded with another row; a new row needs a new rollout id",
            rollout_id=rollout.rollout_id,
        )


def _check_work(rollout: RolloutIdentity, stored: StoredVerdict, digest: str) -> None:
    if stored.digest != digest:
        raise FencedError(
            f"{rollout} was already judged by other work; the first verdict is final",
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
        )


def _check_current(rollout: RolloutIdentity, state: _RolloutState) -> None:
    if state.attempt > rollout.attempt:
        raise FencedError(
            f"{rollout} was replaced by attempt {state.attempt}",
            rollout_id=rollout.rollout_id,
            attempt=rollout.attempt,
            current_attempt=state.attempt,
        )


def _check_open(rollout: RolloutIdentity, state: _RolloutState) -> None:
    if state == _RolloutState(rollout.attempt, True):
        raise FencedError(f"{rollout} was closed", rollout_id=rollout.rollout_id)


def _load_state(db: sqlite3.Connection, key: tuple[str, str]) -> _RolloutState:
    row = db.execute(f"SELECT attempt, closed FROM rollout WHERE {_ROLLOUT}", key).fetchone()
    return _RolloutState(int(row[0]), bool(row[1])) if row is not None else _RolloutState()


def _save(db: sqlite3.Connection, key: tuple[str, str], attempt: int, *, closed: bool) -> None:
    """Write a rollout's new state and delete its seed, which belongs to an earlier or a closed attempt."""
    db.execute(f"DELETE FROM seed WHERE {_ROLLOUT}", key)
    db.execute("INSERT OR REPLACE INTO rollout VALUES (?,?,?,?)", (*key, attempt, closed))


def _close(db: sqlite3.Connection, key: tuple[str, str], attempt: int) -> None:
    _save(db, key, attempt, closed=True)
    db.execute(f"DELETE FROM given WHERE {_ROLLOUT} AND attempt <= ?", (*key, attempt))


def _load_seed(db: sqlite3.Connection, key: tuple[str, str], attempt: int) -> Seed | None:
    query = f"SELECT digest, reply, session FROM seed WHERE {_ROLLOUT} AND attempt = ?"
    row = db.execute(query, (*key, attempt)).fetchone()
    return Seed(row[0], orjson.loads(row[1]), orjson.loads(row[2])) if row is not None else None


def _load_verdict(db: sqlite3.Connection, key: tuple[str, str], attempt: int) -> StoredVerdict | None:
    query = f"SELECT digest, final, reply FROM verdict WHERE {_ROLLOUT} AND attempt = ?"
    row = db.execute(query, (*key, attempt)).fetchone()
    return StoredVerdict(row[0], bool(row[1]), orjson.loads(row[2])) if row is not None else None


# Rows stored for agents, which may see only a part of them


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row that an attempt's agent refers to."""

    row: Mapping[str, Any]
    rollout: RolloutIdentity
    access: RowAccess = RowAccess.PUBLIC


class RowStore:
    """Rows by unguessable reference, one per attempt, kept until the attempt ends. Like seeds they are in a temporary
    file, because many attempts are never closed."""

    def __init__(self, attempts: AttemptStore) -> None:
        self._attempts = attempts

    async def put(self, stored: StoredRow) -> str:
        """Store the row and return a reference to it. The same attempt and row get the same reference; an older
        attempt's is deleted. Raises `InvalidBodyError` for a row that is nested too deeply."""
        rollout, written = stored.rollout, encode_json(dict(stored.row))
        key, digest = (rollout.run_id, rollout.rollout_id), row_digest(stored.row)
        ref = f"ngr_{secrets.token_urlsafe(32)}"

        def operation(db: sqlite3.Connection) -> str:
            known = db.execute(f"SELECT attempt, digest, ref FROM given WHERE {_ROLLOUT}", key).fetchone()
            if known is not None and known[0] > rollout.attempt:
                raise FencedError(f"attempt {rollout.attempt} of '{rollout.rollout_id}' was replaced by {known[0]}")
            if known is not None and known[:2] == (rollout.attempt, digest):
                return str(known[2])
            values = (*key, rollout.attempt, ref, digest, rollout.model_dump_json(), stored.access, written)
            db.execute("INSERT OR REPLACE INTO given VALUES (?,?,?,?,?,?,?,?)", values)
            return ref

        return await self._attempts.ask(operation)

    async def get(self, ref: str) -> StoredRow:
        """The stored row. An unknown reference raises `CredentialError`, because the reference grants access too."""
        query = "SELECT row, rollout, access FROM given WHERE ref = ?"
        found_row = await self._attempts.ask(lambda db: db.execute(query, (ref,)).fetchone())
        if found_row is None:
            raise CredentialError(
                "the row reference is unknown: its attempt was replaced or closed, or the server restarted since",
                retryable=True,
            )
        rollout = RolloutIdentity.model_validate_json(found_row[1])
        return StoredRow(orjson.loads(found_row[0]), rollout, RowAccess(found_row[2]))
