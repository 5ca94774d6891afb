"""Rows, what of them is public, and references that stand for them where they must not be seen.

Public is ``responses_create_params`` without its ``metadata`` (allow-listed keys excepted), and the keys by which a
run numbers its rows. Everything else is the environment's alone.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from nemo_gym.environment.attempts import AttemptStore
from nemo_gym.errors import CredentialError, FencedError
from nemo_gym.serving.client import encode_json
from nemo_gym.session import RolloutIdentity

_OF_ROLLOUT = "run_id = ? AND rollout_id = ?"
PARAMS_KEY = "responses_create_params"
RESPONSE_KEY = "response"
SESSION_KEY = "_ng_session"
NO_PROMPT = "the row has no prompt: 'responses_create_params.input' is missing or blank"
PUBLIC_ROW_KEYS = frozenset(
    {"agent_ref", "skills_ref", "_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id"}
)
PUBLIC_VERDICT_KEYS = frozenset({"reward", "valid", "mask_sample", "failure_kind"})


class RowAccess(StrEnum):
    """What of a row an agent server gets."""

    PUBLIC = "public"
    FULL = "full"
    """The whole row; results are labelled so."""
    VALIDATION = "validation"
    """Private fields only in the explicit validation mode (oracle agents)."""


def public_params(params: Any, metadata_keys: Collection[str] = ()) -> Any:
    """The public part of ``responses_create_params``."""
    if not isinstance(params, Mapping) or "metadata" not in params:
        return params
    public = {key: value for key, value in params.items() if key != "metadata"}
    metadata = params["metadata"]
    if isinstance(metadata, Mapping) and (kept := {k: v for k, v in metadata.items() if k in metadata_keys}):
        public["metadata"] = kept
    return public


def public_row(row: Mapping[str, Any], metadata_keys: Collection[str] = ()) -> dict[str, Any]:
    """The public part of a row."""
    public = {key: value for key, value in row.items() if key in PUBLIC_ROW_KEYS}
    if PARAMS_KEY in row:
        public[PARAMS_KEY] = public_params(row[PARAMS_KEY], metadata_keys)
    return public


def has_prompt(params: Any) -> bool:
    """Whether ``responses_create_params`` ask anything: text that is not blank, an image, an earlier tool call."""
    return _says(params.get("input")) if isinstance(params, Mapping) else False


def _says(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(map(_says, value))
    if not isinstance(value, Mapping):
        return False
    if "content" in value or "text" in value:
        return _says(value.get("content")) or _says(value.get("text"))
    # A message without content says nothing; an image, a file or a call of a tool does.
    return bool(value.get("type", "message") != "message")


def public_verdict(reply: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent server may see of a verdict: numbers and flags this suite defines, and reward components. Other
    fields of a plugin's reply may quote the expected answer under any name; the pipeline reads them by itself."""
    public = {key: reply[key] for key in PUBLIC_VERDICT_KEYS if key in reply}
    components = reply.get("reward_components")
    if isinstance(components, Mapping):
        public["reward_components"] = {
            str(name): value for name, value in components.items() if isinstance(value, int | float)
        }
    return public


def row_digest(row: Mapping[str, Any]) -> str:
    """What identifies a task's row. The response is no part of it: a verify's body has one, its seed's had none."""
    row = {key: value for key, value in row.items() if key != RESPONSE_KEY}
    return hashlib.sha256(orjson.dumps(row, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)).hexdigest()


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
