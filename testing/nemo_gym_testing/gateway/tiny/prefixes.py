"""The engine's prefix cache: a conversation's next turn computes only what is new."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_gym_testing.gateway.tiny.model import KeyValues, ModelShape


@dataclass(slots=True)
class _Entry:
    ids: NDArray[np.int32]
    cache: KeyValues


class PrefixCache:
    """Keys and values of earlier calls, by their tokens. Every call works on its own copy, so calls that share a
    prefix cannot affect each other. Not thread-safe."""

    def __init__(self, shape: ModelShape, max_tokens: int = 250_000) -> None:
        """``max_tokens``: limit of the tokens kept over all entries, about 0.5 KiB each; the least recently used
        entries are dropped first."""
        self._shape = shape
        self._max_tokens = max_tokens
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._next = 0
        self.tokens = 0
        """Tokens kept now."""

    def start(self, ids: NDArray[np.int64]) -> KeyValues:
        """Return keys and values of the longest cached prefix of ``ids``, never with the last token, whose output must
        be computed to sample the next one."""
        best, longest = None, 0
        for key, entry in self._entries.items():
            shared = common_prefix(entry.ids, ids[:-1])
            if shared > longest:
                best, longest = key, shared
        if best is None:
            return KeyValues(self._shape)
        self._entries.move_to_end(best)
        return self._entries[best].cache.copy(longest)

    def keep(self, ids: NDArray[np.int64], cache: KeyValues) -> None:
        """Store what a call has computed: ``cache`` of the first ``cache.count`` of ``ids``."""
        computed = ids[: cache.count].astype(np.int32)
        for key, entry in list(self._entries.items()):
            if len(entry.ids) <= len(computed) and np.array_equal(entry.ids, computed[: len(entry.ids)]):
                self._drop(key)
        self._entries[self._next] = _Entry(computed, cache)
        self._next += 1
        self.tokens += len(computed)
        while self.tokens > self._max_tokens and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0

    def _drop(self, key: int) -> None:
        self.tokens -= len(self._entries.pop(key).ids)


def common_prefix(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """Return the number of leading tokens that are the same."""
    count = min(len(first), len(second))
    if not count or first[0] != second[0]:
        return 0
    differs = first[:count] != second[:count]
    at = int(differs.argmax())
    return at if differs[at] else count
