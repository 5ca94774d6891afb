"""What a preparation shows on standard error while it works: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

_STYLES = {"built": "green", "cached": "cyan", "failed": "bold red"}
_MAX_ACTIVE_ROWS = 12


class Progress:
    """Rows being worked on, their step and how long it has taken; failures stay in view above it."""

    def __init__(self, instances: Sequence[str], console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = len(instances)
        self._counts = dict.fromkeys(_STYLES, 0)
        self._active: dict[str, tuple[str, float]] = {}
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        self._console.print(
            f"prepared: {self._summary()} in {time.monotonic() - self._started:.0f} s", highlight=False
        )

    def step(self, instance: str, step: str) -> None:
        """Say what is being done for an instance now."""
        self._active[instance] = (step, time.monotonic())

    def done(
        self, instance: str, status: str, seconds: float, error: str | None = None, controls: str | None = None
    ) -> None:
        """Say how an instance ended, and how well its tests are controlled."""
        self._active.pop(instance, None)
        self._counts[status] += 1
        ended = sum(self._counts.values())
        line = f"[{ended}/{self._total}] {instance}: {status}" + (f" in {seconds:.1f} s" if status == "built" else "")
        line += f" (controls: {controls})" if controls else ""
        self._console.print(line, style=_STYLES[status], markup=False, highlight=False, soft_wrap=True)
        if error:
            self._console.print(f"    {error}", markup=False, highlight=False, soft_wrap=True)

    def _summary(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in self._counts.items())

    def _table(self) -> Table:
        table = Table(title=f"{self._summary()}, of {self._total}", expand=False)
        for column in ("instance", "step", "seconds"):
            table.add_column(column)
        for instance, (step, since) in list(self._active.items())[:_MAX_ACTIVE_ROWS]:
            table.add_row(escape(instance), escape(step), f"{time.monotonic() - since:.0f}")
        return table
