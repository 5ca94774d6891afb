"""Attempts of an environment: which is current, what its seed answered, and its first verdict.

With a state directory the attempt numbers and verdicts outlive the process (SQLite in WAL mode: what was answered
survives a kill); without one they live in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from nemo_gym.errors import ConfigError, ContractError, FencedError
from nemo_gym.session import RolloutIdentity

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
"""


class AttemptKey(NamedTuple):
    """Which attempt a token or a session belongs to."""

    run_id: str
    rollout_id: str
    attempt: int

    @classmethod
    def of(cls, rollout: RolloutIdentity) -> AttemptKey:
        return cls(rollout.run_id, rollout.rollout_id, rollout.attempt)


@dataclass(slots=True)
class Seed:
    """What a seed answered, to be answered again to the same request."""

    digest: str
    reply: Mapping[str, Any]
    session: Mapping[str, Any]


@dataclass(slots=True)
class StoredVerdict:
    """The first verdict of an attempt. Not ``final`` when it is invalid: the same work may then be graded again."""

    digest: str
    final: bool
    reply: Mapping[str, Any]


@dataclass(slots=True)
class _Rollout:
    attempt: int = 0
    closed: bool = False
    seed: Seed | None = None
    verdicts: dict[int, StoredVerdict] = field(default_factory=dict)


class AttemptStore:
    """The truth about attempts. All methods are immediate; a write is durable when it returns."""

    def __init__(self, path: Path | None = None) -> None:
        self._rollouts: dict[tuple[str, str], _Rollout] = {}
        self._db: sqlite3.Connection | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute("PRAGMA wal_autocheckpoint=4000")
                self._db.executescript(_SCHEMA)
            except (OSError, sqlite3.Error) as error:
                raise ConfigError(
                    f"state_dir: cannot keep verdicts in {path} ({error}); choose a writable directory",
                    key="state_dir",
                ) from error

    def _of(self, rollout: RolloutIdentity) -> _Rollout:
        key = (rollout.run_id, rollout.rollout_id)
        known = self._rollouts.get(key)
        if known is None:
            known = self._rollouts[key] = self._load(key)
        return known

    def _load(self, key: tuple[str, str]) -> _Rollout:
        loaded = _Rollout()
        if self._db is not None:
            row = self._db.execute(
                "SELECT attempt, closed FROM rollout WHERE run_id=? AND rollout_id=?", key
            ).fetchone()
            if row is not None:
                loaded.attempt, loaded.closed = int(row[0]), bool(row[1])
            for attempt, digest, final, reply in self._db.execute(
                "SELECT attempt, digest, final, reply FROM verdict WHERE run_id=? AND rollout_id=?", key
            ):
                loaded.verdicts[int(attempt)] = StoredVerdict(digest, bool(final), orjson.loads(reply))
        return loaded

    def _save(self, rollout: RolloutIdentity, known: _Rollout) -> None:
        if self._db is not None:
            self._db.execute(
                "INSERT INTO rollout VALUES (?,?,?,?) ON CONFLICT DO UPDATE SET attempt=excluded.attempt,"
                " closed=excluded.closed",
                (rollout.run_id, rollout.rollout_id, known.attempt, known.closed),
            )

    def require_current(self, rollout: RolloutIdentity) -> None:
        """Raise `FencedError` when a newer attempt has replaced this one."""
        current = self._of(rollout).attempt
        if current > rollout.attempt:
            raise FencedError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was replaced by attempt {current}",
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
                current_attempt=current,
            )

    def require_live(self, run_id: str, rollout_id: str, attempt: int) -> None:
        """Raise `FencedError` when the attempt was replaced or closed."""
        known = self._rollouts.get((run_id, rollout_id))
        if known is not None and (known.attempt > attempt or (known.closed and known.attempt == attempt)):
            raise FencedError(
                f"attempt {attempt} of rollout '{rollout_id}' was replaced or closed",
                rollout_id=rollout_id,
                attempt=attempt,
            )

    def session_of(self, run_id: str, rollout_id: str, attempt: int) -> Mapping[str, Any]:
        """The session of an open attempt. Raises `FencedError` for one that was replaced or closed, and
        `ContractError` for one that was not seeded since this process started."""
        return self._open_seed(run_id, rollout_id, attempt).session

    def keep_session(self, run_id: str, rollout_id: str, attempt: int, session: Mapping[str, Any]) -> None:
        """Make ``session`` the one of this attempt's calls from now on; nothing for an attempt that is over."""
        known = self._rollouts.get((run_id, rollout_id))
        if known is not None and known.attempt == attempt and known.seed is not None:
            known.seed.session = dict(session)

    def _open_seed(self, run_id: str, rollout_id: str, attempt: int) -> Seed:
        self.require_live(run_id, rollout_id, attempt)
        known = self._rollouts.get((run_id, rollout_id))
        if known is None or known.attempt != attempt or known.seed is None:
            raise ContractError(
                f"attempt {attempt} of rollout '{rollout_id}' has no session here; it must be seeded first",
                rollout_id=rollout_id,
            )
        return known.seed

    def seed_of(self, rollout: RolloutIdentity, digest: str) -> Seed | None:
        """The stored seed of this attempt. Raises `FencedError` for an attempt that was replaced or closed, and
        `ContractError` for one that was seeded with another row."""
        self.require_current(rollout)
        known = self._of(rollout)
        if known.attempt != rollout.attempt:
            return None
        if known.closed:
            raise FencedError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was closed",
                rollout_id=rollout.rollout_id,
            )
        self.require_row(rollout, digest)
        return known.seed

    def require_row(self, rollout: RolloutIdentity, digest: str) -> None:
        """Raise `ContractError` when this attempt is open here with another row. An attempt that is closed, or that an
        earlier process seeded, is not known by its row any more."""
        known = self._of(rollout)
        if known.attempt == rollout.attempt and known.seed is not None and known.seed.digest != digest:
            raise ContractError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was seeded with another row; a new row"
                " needs a new rollout id",
                rollout_id=rollout.rollout_id,
            )

    def enter(self, rollout: RolloutIdentity) -> RolloutIdentity | None:
        """Make this the current attempt and fence older ones; returns the attempt that was open until now."""
        self.require_current(rollout)
        known = self._of(rollout)
        if known.attempt == rollout.attempt:
            return None
        open_before = known.attempt and not known.closed
        replaced = rollout.model_copy(update={"attempt": known.attempt}) if open_before else None
        known.attempt, known.closed, known.seed = rollout.attempt, False, None
        self._save(rollout, known)
        return replaced

    def keep_seed(self, rollout: RolloutIdentity, seed: Seed) -> None:
        self.require_current(rollout)
        self._of(rollout).seed = seed

    def verdict_of(self, rollout: RolloutIdentity) -> StoredVerdict | None:
        return self._of(rollout).verdicts.get(rollout.attempt)

    def admit_verdict(self, rollout: RolloutIdentity, digest: str) -> StoredVerdict | None:
        """The final verdict to replay, or ``None`` when the work is to be graded. Raises `FencedError` for a replaced
        attempt and for work other than what this attempt was first judged by."""
        self.require_current(rollout)
        stored = self.verdict_of(rollout)
        if stored is None:
            return None
        if stored.digest != digest:
            raise FencedError(
                f"attempt {rollout.attempt} of rollout '{rollout.rollout_id}' was already judged by other work; the"
                " first verdict is final",
                rollout_id=rollout.rollout_id,
                attempt=rollout.attempt,
            )
        return stored if stored.final else None

    def keep_verdict(self, rollout: RolloutIdentity, verdict: StoredVerdict) -> None:
        self.require_current(rollout)
        known = self._of(rollout)
        known.verdicts[rollout.attempt] = verdict
        if known.attempt == 0:
            known.attempt = rollout.attempt
        if self._db is not None:
            self._db.execute(
                "INSERT INTO verdict VALUES (?,?,?,?,?,?) ON CONFLICT DO UPDATE SET digest=excluded.digest,"
                " final=excluded.final, reply=excluded.reply",
                (
                    rollout.run_id,
                    rollout.rollout_id,
                    rollout.attempt,
                    verdict.digest,
                    verdict.final,
                    orjson.dumps(verdict.reply, option=orjson.OPT_NON_STR_KEYS),
                ),
            )
            self._save(rollout, known)

    def close(self, rollout: RolloutIdentity) -> bool:
        """Close the attempt, known or not, so that a late seed of it is refused. Whether it was open."""
        self.require_current(rollout)
        known = self._of(rollout)
        was_open = known.attempt == rollout.attempt and not known.closed
        known.attempt, known.closed, known.seed = rollout.attempt, True, None
        self._save(rollout, known)
        return was_open

    def aclose(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
