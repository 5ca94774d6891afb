"""A bound on the answers that go through a door, exact also for requests that are made at once."""

from __future__ import annotations

import asyncio


class AnswerLimit:
    """Admits requests as long as they can all be answered within the limit.

    A request that could become one answer too many waits for those under way: they may fail, and then it is admitted.
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        """Answers that may still be given."""
        self._under_way = 0
        self._changed = asyncio.Event()

    async def enter(self) -> bool:
        """Whether the request may be forwarded; each that may must `leave`."""
        while 0 < self.left <= self._under_way:
            await self._changed.wait()
        if not self.left:
            return False
        self._under_way += 1
        return True

    def leave(self, *, answered: bool) -> None:
        self._under_way -= 1
        self.left -= answered
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
