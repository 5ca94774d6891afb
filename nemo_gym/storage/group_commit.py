"""Group commit: one thread owns a database connection and commits the operations of many callers in one transaction.

Every commit costs a sync to disk (or a round trip), however small it is, so callers that wait at the same time share
one. A caller's future resolves after its transaction is durable, never before. A subclass of `GroupCommitThread` for
each database implements the transaction and the handling of its failure.
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
"""Maximum number of operations in one transaction."""


@dataclass(slots=True)
class Waiting:
    """One caller's operation, which subclasses define. The future gets ``error`` or else ``outcome``."""

    future: asyncio.Future[Any]
    outcome: Any = None
    error: BaseException | None = None


T = TypeVar("T")
W = TypeVar("W", bound=Waiting)
ConnectionT = TypeVar("ConnectionT")


class GroupCommitThread(ABC, Generic[W]):
    """Commits waiting requests in order and in batches, on its own thread. Create and use it in one event loop."""

    def __init__(self, *, name: str) -> None:
        self._requests: queue.SimpleQueue[W | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._under_way = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _settle(self, batch: list[W]) -> None:
        """Commit the batch, and set the outcome or error of each request in it. Never raises."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection, if there is one. The thread calls this at its end."""

    def _put(self, request: W) -> None:
        self._under_way += 1
        self._requests.put(request)

    @property
    def _idle(self) -> bool:
        """Whether no request is waiting or in progress. If so, the event loop's thread may use the connection until
        its next `_put`, provided that the connection works on any thread. Only for the event loop's thread."""
        return self._under_way == 0 and not self._closed

    async def aclose(self) -> None:
        """Commit the waiting requests, then end the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self._settle(batch)
            self._loop.call_soon_threadsafe(self._settled, batch)
            del batch  # otherwise its requests stay in memory until the next one arrives
        self._disconnect()

    def _settled(self, batch: list[W]) -> None:
        self._under_way -= len(batch)
        resolve(batch)

    def _next(self) -> list[W] | None:
        """Wait for at least one request; return all that wait, up to `MAX_BATCH`, or ``None`` when closed."""
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
    """Resolve the future of each request with its outcome or error."""
    for request in batch:
        if request.future.done():  # its caller was cancelled; the write stays committed
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.outcome)


@dataclass(slots=True, kw_only=True)
class OperationRequest(Waiting):
    operation: Callable[[Any], Any]
    row: tuple[str, bytes] | None = None


class OperationWriter(GroupCommitThread[OperationRequest], Generic[ConnectionT]):
    """Runs operations in order on its own thread and connection, one transaction for all waiting callers.

    Args:
        after_commit: gets the rows of a committed transaction before its callers' futures resolve.
        translate: converts the database's final error to the error that callers get.
    """

    def __init__(
        self,
        *,
        name: str,
        after_commit: Callable[[list[tuple[str, bytes]]], None] | None,
        translate: Callable[[Exception], NemoGymError],
    ) -> None:
        self._name = name
        self._after_commit = after_commit
        self._translate = translate
        self._connection: ConnectionT | None = None
        self._broken: NemoGymError | None = None
        """The error of every later call, if a failure has stopped the writer for good."""
        super().__init__(name=name)

    def call(
        self, operation: Callable[[ConnectionT], T], *, row: tuple[str, bytes] | None = None
    ) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. It may raise `NemoGymError`, which only its own caller gets, and
        only before it writes. ``after_commit`` gets ``row`` if the operation succeeds."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._broken is not None:
            future.set_exception(self._broken)
        elif self._closed:
            future.set_exception(RuntimeError(f"{self._name} is closed"))
        else:
            self._put(OperationRequest(future, operation=operation, row=row))
        return future

    def _operate(self, connection: ConnectionT, batch: list[OperationRequest]) -> None:
        """Run the operations of ``batch`` in the open transaction."""
        for request in batch:
            try:
                request.outcome = request.operation(connection)
            except NemoGymError as error:
                request.error = error

    def _report(self, batch: list[OperationRequest]) -> None:
        """Hand over the rows of the committed ``batch``."""
        rows = [request.row for request in batch if request.row is not None and request.error is None]
        if self._after_commit is not None and rows:
            self._after_commit(rows)

    def _typed(self, error: Exception) -> NemoGymError:
        return error if isinstance(error, NemoGymError) else self._translate(error)


class SqliteWriter(OperationWriter[sqlite3.Connection]):
    """An `OperationWriter` for SQLite.

    Args:
        connect: opens the connection, on the thread.
        stops_when_broken: if true, the first transaction that fails stops the writer for good: every later call raises
            the same error, so that no write is acknowledged after a lost one. If false, only its own callers fail.
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
        self._stops_when_broken = stops_when_broken
        super().__init__(name=name, after_commit=after_commit, translate=translate)

    def call_here(self, operation: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Run ``operation`` on this thread if no request is waiting, otherwise in its turn. It must not write anything
        that a commit has to sync, and the connection must work on any thread."""
        if not self._idle or self._connection is None:
            return self.call(operation)
        future: asyncio.Future[T] = self._loop.create_future()
        batch = [OperationRequest(future, operation=operation)]
        self._settle(batch)
        resolve(batch)
        return future

    def _settle(self, batch: list[OperationRequest]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            self._connection = self._connection or self._connect()
            self._commit(self._connection, batch)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
            broken = self._typed(error)
            if self._stops_when_broken:
                self._broken = broken
            for request in batch:
                request.error = request.error or broken

    def _commit(self, connection: sqlite3.Connection, batch: list[OperationRequest]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._operate(connection, batch)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._report(batch)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
