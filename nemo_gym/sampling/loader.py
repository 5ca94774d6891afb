"""Rows for a sampler: a data loader, and the sampler's position in it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollouts.rows import read_row

Row = Mapping[str, Any]


class RowFile:
    """The rows of a JSONL file, or its first ``limit`` rows; each iteration is one epoch. ``shuffle_seed`` gives every
    epoch its own order.

    Raises `ConfigError` for a file without rows, and `RowError` for a line that is no JSON object.
    """

    def __init__(self, path: str | Path, *, shuffle_seed: int | None = None, limit: int | None = None) -> None:
        self.path = Path(path)
        self._seed = shuffle_seed
        self._epoch = 0
        self._position = 0
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"input '{path}' cannot be read: {error}", key="input") from error
        self._lines = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
        if not self._lines:
            raise ConfigError(f"input '{path}' holds no rows", key="input")
        for number, line in self._lines:
            self._row(number, line)  # report a bad line before anything runs

    def __iter__(self) -> Iterator[Row]:
        """Yield the rest of the current epoch."""
        order = list(range(len(self._lines)))
        if self._seed is not None:
            random.Random(f"{self._seed}:{self._epoch}").shuffle(order)
        while self._position < len(order):
            number, line = self._lines[order[self._position]]
            self._position += 1
            yield self._row(number, line)
        self._epoch, self._position = self._epoch + 1, 0

    def _row(self, number: int, line: bytes) -> Row:
        return read_row(line, self.path, number)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])


class LoaderCursor:
    """Takes rows from ``loader``, which yields rows or lists of rows.

    If the loader has ``state_dict`` and ``load_state_dict`` (like torchdata's ``StatefulDataLoader``), a checkpoint
    holds its state. Otherwise a checkpoint holds the number of rows taken, and restoring it skips as many rows.
    """

    def __init__(self, loader: Iterable[Any], epochs: int | None) -> None:
        self._loader = loader
        self._epochs_left = epochs
        self._rows: Iterator[Any] | None = None
        self._restored = False
        self._pending: deque[Row] = deque()
        self.taken = 0
        """The number of rows taken since the start of the data."""
        self.passes = 0
        """The number of passes over the data that this object has ended."""

    def next_row(self) -> Row | None:
        """Return the next row, or ``None`` at the end of the data. Raises `RowError` for an item that is no row."""
        while not self._pending:
            item = self._next_item()
            if item is None:
                return None
            self._pending.extend(self._rows_of(item))
        self.taken += 1
        return self._pending.popleft()

    def _next_item(self) -> Any:
        # A loader that was restored at the end of a pass yields no more items in that pass.
        fresh = self._rows is None and not self._restored
        self._restored = False
        if self._rows is None:
            if self._epochs_left == 0:
                return None
            self._rows = iter(self._loader)
        item = next(self._rows, None)
        if item is not None:
            return item
        is_iterator = self._rows is self._loader
        self._rows = None
        self.passes += 1
        if self._epochs_left is not None:
            self._epochs_left -= 1
        # A pass that is empty from its start means that the data has ended, as does an iterator that is used up.
        return None if fresh or is_iterator else self._next_item()

    def _rows_of(self, item: Any) -> list[Row]:
        rows = [item] if isinstance(item, Mapping) else item
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
            raise RowError(
                f"the data loader yields a {type(item).__name__} after {self.taken} rows; a sampler takes rows (JSON"
                " objects) or lists of rows: give it a loader with an identity collate_fn"
            )
        return list(rows)

    def state_dict(self) -> dict[str, Any]:
        state = getattr(self._loader, "state_dict", None)
        return {
            "taken": self.taken,
            "epochs_left": self._epochs_left,
            "pending": [dict(row) for row in self._pending],
            "loader": state() if callable(state) else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to the position that ``state`` records."""
        load = getattr(self._loader, "load_state_dict", None)
        if state["loader"] is None or not callable(load):
            self.pass_over(int(state["taken"]) - self.taken)
            return
        load(state["loader"])
        self._rows, self._restored = None, True
        self._epochs_left = state["epochs_left"]
        self._pending = deque(state["pending"])
        self.taken = int(state["taken"])

    def pass_over(self, count: int) -> None:
        """Skip ``count`` rows that were taken before."""
        for _ in range(count):
            if self.next_row() is None:
                raise ConfigError(
                    f"the data loader ended after {self.taken} rows, but this run has already taken more: use the"
                    " loader that the run started with",
                    key="loader",
                )
