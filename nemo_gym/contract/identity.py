"""Names of runs, tasks and rollouts, and the row keys that carry them."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

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
