"""Which of a server's replicas a request goes to.

A rollout's requests to one server all go to the same replica, which holds its session. The pipeline chooses, the least
busy one first, and says so in a header that travels along (``X-NeMo-Gym-Replicas: math=1``): replicas are told by
their number in the configuration, so a header can name none that is not configured. Callers outside a pipeline are
told apart by their rollout's id. A replica that refused a connection is left out for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import count
from urllib.parse import quote, unquote

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
