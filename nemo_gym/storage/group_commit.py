"""One thread that owns a database connection and commits what many callers ask for in one transaction.

A commit costs a sync to disk (or a round trip) whatever is in it, so callers that wait at the same time share one. A
caller's future resolves after its transaction is durable, never before. What a transaction is, and what follows when
one fails, is the database's: it subclasses `GroupCommitThread`.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nemo_gym.contract.errors import NemoGymError

MAX_BATCH = 512
"""Operations in one transaction, at most."""


@dataclass(slots=True)
class Waiting:
    """One caller's operation, subclassed to say which; ``outcome`` or ``error`` is what the future gets."""

    future: asyncio.Future[Any]
    outcome: Any = None
    error: BaseException | None = None


T = TypeVar("T")
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


@dataclass(slots=True, kw_only=True)
class _Request(Waiting):
    operation: Callable[[sqlite3.Connection], Any]
    row: tuple[str, bytes] | None


class SqliteWriter(GroupCommitThread[_Request]):
    """Runs operations in order on its own thread and SQLite connection, one transaction for all who wait.

    Args:
        connect: makes the connection, on the thread.
        after_commit: sees the rows of a transaction before its callers learn that it stands.
        translate: the error that callers get for what the database raised.
        stops_when_broken: the first transaction that fails stops the writer for good: every later call raises the
            same error, so that nothing is acknowledged on top of a hole. Otherwise it fails for its own callers alone.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        *,
        name: str,
        after_commit: Callable[[list[tuple[str, bytes]]], None] | None = None,
        translate: Callable[[Exception], NemoGymError],
        stops_when_broken: bool = True,
    ) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._name = name
        self._after_commit = after_commit
        self._translate = translate
        self._stops_when_broken = stops_when_broken
        self._broken: NemoGymError | None = None
        super().__init__(name=name)

    def call(
        self, operation: Callable[[sqlite3.Connection], T], *, row: tuple[str, bytes] | None = None
    ) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. It must raise before it writes, or not at all. ``row`` goes to
        ``after_commit`` when the operation succeeded."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._broken is not None:
            future.set_exception(self._broken)
        elif self._closed:
            future.set_exception(RuntimeError(f"{self._name} is closed"))
        else:
            self._put(_Request(future, operation=operation, row=row))
        return future

    def call_here(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run ``operation``, which writes nothing that a commit would have to sync, on this thread when nothing waits;
        otherwise in its turn. The connection must be one that any thread may use."""
        if not self._idle or self._connection is None:
            return self.call(operation)
        future: asyncio.Future[T] = self._loop.create_future()
        alone = [_Request(future, operation=operation, row=None)]
        self._settle(alone)
        resolve(alone)
        return future

    def _settle(self, batch: list[_Request]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            self._connection = self._connection or self._connect()
            self._commit(self._connection, batch)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
            broken = error if isinstance(error, NemoGymError) else self._translate(error)
            if self._stops_when_broken:
                self._broken = broken
            for request in batch:
                request.error = request.error or broken

    def _commit(self, connection: sqlite3.Connection, batch: list[_Request]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for request in batch:
                try:
                    request.outcome = request.operation(connection)
                except NemoGymError as error:  # refused before it wrote anything: its caller's affair alone
                    request.error = error
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if self._after_commit is not None:
            rows = [request.row for request in batch if request.row is not None and request.error is None]
            if rows:
                self._after_commit(rows)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
