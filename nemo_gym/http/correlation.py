"""Which rollout the current request belongs to: read from the request, carried along to the calls it makes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import structlog
from pydantic import BaseModel

from nemo_gym.contract.identity import ATTEMPT_INDEX_KEY, ROLLOUT_ID_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY

__all__ = [
    "ROLLOUT_ID_HEADER",
    "ROLLOUT_ID_PATTERN",
    "ROLLOUT_PATH_PREFIX",
    "TOKEN_CAPTURE_PATH_SEGMENT",
    "apply_rollout_prefix",
    "current_rollout_id",
    "maybe_rollout_id_from_run_body",
    "rollout_context",
    "rollout_path_prefix",
]

ROLLOUT_PATH_PREFIX = "ng-rollout"
"""First segment of ``/ng-rollout/<rollout id>/…``, for clients that can be given a base URL but no header."""
TOKEN_CAPTURE_PATH_SEGMENT = "training-token-capture"
ROLLOUT_ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
ROLLOUT_ID_HEADER = "X-NeMo-Gym-Rollout-Id"

_rollout_id: ContextVar[str | None] = ContextVar("nemo_gym_rollout_id", default=None)


def current_rollout_id() -> str | None:
    return _rollout_id.get()


@contextmanager
def rollout_context(rollout_id: str | None) -> Iterator[None]:
    """Everything called and logged inside belongs to ``rollout_id``."""
    token = _rollout_id.set(rollout_id)
    try:
        with structlog.contextvars.bound_contextvars(rollout_id=rollout_id):
            yield
    finally:
        _rollout_id.reset(token)


def maybe_rollout_id_from_run_body(body: BaseModel | Mapping[str, Any] | None) -> str | None:
    """``_ng_rollout_id``, else ``<task index>-<rollout index>``, with ``-a<n>`` on a retry; ``None`` without them.

    Raises ``ValueError`` for an explicit id with characters that do not survive a URL path.
    """
    if body is None or not isinstance(body, BaseModel | Mapping):
        return None

    def read(key: str) -> Any:
        return body.get(key) if isinstance(body, Mapping) else getattr(body, key, None)

    rollout_id = read(ROLLOUT_ID_KEY)
    if rollout_id is None:
        task, sample = read(TASK_INDEX_KEY), read(ROLLOUT_INDEX_KEY)
        if task is None or sample is None:
            return None
        rollout_id = f"{task}-{sample}"
    elif not isinstance(rollout_id, str) or not ROLLOUT_ID_PATTERN.match(rollout_id):
        raise ValueError(
            f"{ROLLOUT_ID_KEY} is {rollout_id!r}; it must start with a letter or digit and hold only letters, digits,"
            " '.', '_' and '-'"
        )
    attempt = read(ATTEMPT_INDEX_KEY)
    return f"{rollout_id}-a{int(attempt)}" if attempt is not None and int(attempt) > 0 else rollout_id


def rollout_path_prefix(rollout_id: str | None, *, token_capture: bool = False) -> str:
    """The path prefix that names ``rollout_id``, or an empty string."""
    if not rollout_id:
        return ""
    prefix = f"/{ROLLOUT_PATH_PREFIX}/{rollout_id}"
    return f"{prefix}/{TOKEN_CAPTURE_PATH_SEGMENT}" if token_capture else prefix


def apply_rollout_prefix(base_url: str, rollout_id: str | None, *, token_capture: bool = False) -> str:
    """``base_url`` with the rollout's path prefix at its end."""
    return base_url.rstrip("/") + rollout_path_prefix(rollout_id, token_capture=token_capture)
