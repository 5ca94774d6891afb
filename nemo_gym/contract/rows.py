"""Rows of a dataset and of results: their keys and names, and what of them is public.

Public is ``responses_create_params`` without its ``metadata`` (allow-listed keys excepted), and the keys by which a
run numbers its rows. Everything else is the environment's alone.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

import orjson

from nemo_gym.contract.session import IDENTIFIER

TASK_INDEX_KEY = "_ng_task_index"
ROLLOUT_INDEX_KEY = "_ng_rollout_index"
ROLLOUT_ID_KEY = "_ng_rollout_id"
ATTEMPT_INDEX_KEY = "_ng_attempt_index"
"""From 0, as NeMo Gym counts: the first attempt of a rollout is 0."""
AGENT_REF_KEY = "agent_ref"


_TASK_ID_FIELDS = ("task_id", "instance_id", "id", "uuid")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_TASK_ID = 128


def new_run_id() -> str:
    """``<UTC time>-<6 random hex digits>``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def rollout_id_of(run_id: str, task_index: int, rollout_index: int) -> str:
    """NeMo Gym's ``<task>-<rollout>``, unique across runs: ``<run>.<task>-<rollout>``. Stable over attempts."""
    return f"{run_id}.{task_index}-{rollout_index}"


def group_id_of(run_id: str, task_index: int) -> str:
    return f"{run_id}.{task_index}"


def task_id_of(row: dict[str, Any], task_index: int) -> str:
    """The row's own public name where it has one, else its index."""
    for field in _TASK_ID_FIELDS:
        value = row.get(field)
        if isinstance(value, str | int) and not isinstance(value, bool):
            name = _UNSAFE.sub("-", str(value)).strip("-._")[:MAX_TASK_ID]
            if IDENTIFIER.match(name):
                return name
    return str(task_index)


PARAMS_KEY = "responses_create_params"
RESPONSE_KEY = "response"
SESSION_KEY = "_ng_session"
"""What the pipeline adds to a row for the servers; never stored."""
NG_FAILURE_CLASS_KEY = "_ng_failure_class"
NG_TERMINAL_KEY = "_ng_failure_terminal"
NG_NO_PERSIST_KEY = "_ng_no_persist"
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
