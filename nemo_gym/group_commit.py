"""One thread that owns a database connection and commits what many callers ask for in one transaction.

A commit costs a sync to disk (or a round trip) whatever is in it, so callers that wait at the same time share one. A
caller's future resolves after its transaction is durable, never before. What a transaction is, and what follows when
one fails, is the database's: it subclasses `GroupCommitThread`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

MAX_BATCH = 512
"""Operations in one transaction, at most."""


@dataclass(slots=True)
class Waiting:
    """One caller's operation, subclassed to say which; ``outcome`` or ``error`` is what the future gets."""

    future: asyncio.Future[Any]
    outcome: Any = None
    error: BaseException | None = None


W = TypeVar("W", bound=Waiting)


class GroupCommitThread(ABC, Generic[W]):
    """Takes batches of what waits, in order, on a thread of its own. Belongs to the event loop it was made in."""

    def __init__(self, *, name: str) -> None:
        self._requests: queue.SimpleQueue[W | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._under_way = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _settle(self, batch: list[W]) -> None:
        """Commit the batch, and write to each of it its outcome or error. Never raises."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the connection; nothing is asked afterwards."""

    def _put(self, request: W) -> None:
        self._under_way += 1
        self._requests.put(request)

    @property
    def _idle(self) -> bool:
        """For the loop's thread: whether nothing waits. Until the next `_put` the connection is then this thread's, if
        it can be used from any."""
        return self._under_way == 0 and not self._closed

    async def aclose(self) -> None:
        """Commit what waits, then end the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self._settle(batch)
            self._loop.call_soon_threadsafe(self._settled, batch)
        self._disconnect()

    def _settled(self, batch: list[W]) -> None:
        self._under_way -= len(batch)
        resolve(batch)

    def _next(self) -> list[W] | None:
        """What waits, at least one; ``None`` when closed."""
        first = self._requests.get()
        if first is None:
            return None
        batch = [first]
        while len(batch) < MAX_BATCH:
            try:
                item = self._requests.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._requests.put(None)
                break
            batch.append(item)
        return batch


def resolve(batch: list[W]) -> None:
    """Tell each caller what became of its operation."""
    for request in batch:
        if request.future.done():  # its caller was cancelled; the write stands
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.outcome)
