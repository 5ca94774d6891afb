"""Where records of calls go."""

from __future__ import annotations

from typing import Protocol

from nemo_gym.gateway.capture.records import CallRecord


class CallCapture(Protocol):
    """Takes one record per inference call. No method raises."""

    @property
    def bodies(self) -> bool:
        """Whether records should hold request and answer bodies."""
        ...

    def record(self, record: CallRecord) -> None:
        """Take a finished record, which its caller does not change any more. Returns at once."""
        ...

    def figures(self) -> dict[str, int]:
        """Counts since the start: ``taken``, ``written``, ``dropped``."""
        ...

    def close(self) -> None:
        """Write what was taken, and stop. Blocks for a few seconds at most."""
        ...


class NoCapture:
    """Keeps nothing."""

    bodies = False

    def record(self, record: CallRecord) -> None:
        pass

    def figures(self) -> dict[str, int]:
        return {"taken": 0, "written": 0, "dropped": 0}

    def close(self) -> None:
        pass
