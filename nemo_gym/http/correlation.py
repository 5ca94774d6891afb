"""What travels with a request: which rollout it belongs to, and which replicas serve that rollout.

A rollout's requests to one server all go to the same replica, which holds its session. The pipeline chooses the least
busy one, and says so in a header (``X-NeMo-Gym-Replicas: math=1``): replicas are told by their number in the
configuration, so a header can name none that is not configured. Callers outside a pipeline are told apart by their
rollout's id. A replica that refused a connection is left out for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any
from urllib.parse import quote, unquote

from pydantic import BaseModel

from nemo_gym.config_types import ROLLOUT_PATH_PREFIX
from nemo_gym.contract.rows import ATTEMPT_INDEX_KEY, ROLLOUT_ID_KEY, ROLLOUT_INDEX_KEY, TASK_INDEX_KEY

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
        yield
    finally:
        _rollout_id.reset(token)


def name_rollout(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: log lines name the rollout that is being worked on.

    Bound to structlog's own context instead, the id costs every request eight microseconds, whether it logs or not.
    """
    if (rollout_id := _rollout_id.get()) is not None:
        event.setdefault("rollout_id", rollout_id)
    return event


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


REPLICAS_HEADER = "X-NeMo-Gym-Replicas"
LEFT_OUT_S = 15.0
"""How long nothing new goes to a replica that could not be connected to."""
MAX_HEADER_CHARS = 4096
_ENTRY = re.compile(r"^([A-Za-z0-9_.~%-]+)=(\d{1,4})$")

_current: ContextVar[Mapping[str, int]] = ContextVar("nemo_gym_replicas", default={})  # noqa: B039 - never changed


def current_replicas() -> Mapping[str, int]:
    """Server instance → replica, as whoever sent the current request chose."""
    return _current.get()


@contextlib.contextmanager
def replica_context(replicas: Mapping[str, int]) -> Iterator[None]:
    """Requests made inside go to these replicas, and say so."""
    reset = _current.set({**_current.get(), **replicas})
    try:
        yield
    finally:
        _current.reset(reset)


def encode_replicas(replicas: Mapping[str, int]) -> str:
    return ",".join(f"{quote(name, safe='')}={number}" for name, number in replicas.items())


def decode_replicas(header: str) -> dict[str, int]:
    """What a header says; what cannot be read is left out, for it only says where sessions are."""
    found: dict[str, int] = {}
    for entry in header[:MAX_HEADER_CHARS].split(","):
        if match := _ENTRY.match(entry.strip()):
            found[unquote(match[1])] = int(match[2])
    return found


class Chooser:
    """What one process knows of the replicas it calls: how busy it keeps each, and which cannot be reached."""

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self._left_out: dict[str, float] = {}
        self._turn = count()

    def order(self, urls: Sequence[str], key: str | None = None) -> list[int]:
        """The replicas' numbers, best first: the same order for the same ``key``, the least busy first without one;
        those that could not be reached are last."""
        if key is None:
            turn = next(self._turn)
            ranked = sorted(range(len(urls)), key=lambda i: (self._busy[urls[i]], (i - turn) % len(urls)))
        else:
            ranked = sorted(range(len(urls)), key=lambda i: hashlib.sha256(f"{key}\n{urls[i]}".encode()).digest())
        return sorted(ranked, key=lambda i: self.is_left_out(urls[i]))

    def is_left_out(self, url: str) -> bool:
        return self._left_out.get(url, 0.0) > time.monotonic()

    def unreachable(self, url: str) -> None:
        """It refused a connection."""
        self._left_out[url] = time.monotonic() + LEFT_OUT_S

    @contextlib.contextmanager
    def busy(self, url: str) -> Iterator[None]:
        """A request to it is under way."""
        self._busy[url] += 1
        try:
            yield
        finally:
            self._busy[url] -= 1
