"""References that stand for rows where the rows must not be seen."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from nemo_gym.contract.errors import CredentialError, FencedError
from nemo_gym.contract.rows import RowAccess, row_digest
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.environment.attempts import AttemptStore
from nemo_gym.http.client import encode_json

_OF_ROLLOUT = "run_id = ? AND rollout_id = ?"


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row that an attempt's agent refers to."""

    row: Mapping[str, Any]
    rollout: RolloutIdentity
    access: RowAccess = RowAccess.PUBLIC


class RowStore:
    """Rows by unguessable reference, one per attempt, for as long as the attempt lives. They are in a temporary file,
    as seeds are: many attempts are never closed."""

    def __init__(self, attempts: AttemptStore) -> None:
        self._attempts = attempts

    async def put(self, stored: StoredRow) -> str:
        """A reference to the row; the same attempt gets the same one, and an older attempt's is forgotten. Raises
        `InvalidBodyError` for a row that is nested too deeply."""
        rollout, written = stored.rollout, encode_json(dict(stored.row))
        key, digest = (rollout.run_id, rollout.rollout_id), row_digest(stored.row)
        ref = f"ngr_{secrets.token_urlsafe(32)}"

        def operation(db: sqlite3.Connection) -> str:
            known = db.execute(f"SELECT attempt, digest, ref FROM given WHERE {_OF_ROLLOUT}", key).fetchone()
            if known is not None and known[0] > rollout.attempt:
                raise FencedError(f"attempt {rollout.attempt} of '{rollout.rollout_id}' was replaced by {known[0]}")
            if known is not None and known[:2] == (rollout.attempt, digest):
                return str(known[2])
            values = (*key, rollout.attempt, ref, digest, rollout.model_dump_json(), stored.access, written)
            db.execute("INSERT OR REPLACE INTO given VALUES (?,?,?,?,?,?,?,?)", values)
            return ref

        return await self._attempts.ask(operation)

    async def get(self, ref: str) -> StoredRow:
        """The stored row; raises `CredentialError`, because a reference is also the right to use it."""
        query = "SELECT row, rollout, access FROM given WHERE ref = ?"
        found = await self._attempts.ask(lambda db: db.execute(query, (ref,)).fetchone())
        if found is None:
            raise CredentialError(
                "the row reference is unknown: its attempt was replaced or closed, or the server restarted since",
                retryable=True,
            )
        rollout = RolloutIdentity.model_validate_json(found[1])
        return StoredRow(orjson.loads(found[0]), rollout, RowAccess(found[2]))
