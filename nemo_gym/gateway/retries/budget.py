"""Bounds on retries that hold for all calls of an engine pool, and for all of one session, whoever repeats them: so
failing engines are not buried under repetition, and one session's requests do not use up what others may need."""

from __future__ import annotations


class RetryBudget:
    """Each first try earns ``ratio`` of a retry, each retry spends one; at most ``capacity`` are saved up, which is
    also what there is at the start. With everything failing, engines see at most ``1 + ratio`` times the calls, after
    the savings are spent."""

    def __init__(self, *, ratio: float = 0.2, capacity: float = 20.0) -> None:
        self._ratio = ratio
        self._capacity = capacity
        self._saved = capacity

    @property
    def saved(self) -> float:
        return self._saved

    def earn(self) -> None:
        """A call begins."""
        self._saved = min(self._capacity, self._saved + self._ratio)

    def spend(self) -> bool:
        """Whether a retry may be made; if so it is paid for."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
