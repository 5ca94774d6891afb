"""Writers that commit records to SQLite and PostgreSQL, in groups.

One thread owns a database connection and commits the operations of many callers in one transaction. Every
commit costs a sync to disk (or a round trip), however small it is, so callers that wait at the same time share one. A
caller's future resolves after its transaction is durable, never before. A subclass of `GroupCommitThread` for each
database implements the transaction and the handling of its failure.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog

from nemo_gym.contract.errors import ConfigError, NemoGymError

if TYPE_CHECKING:
    import psycopg

log = structlog.get_logger(__name__)

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


# -- PostgreSQL ----------------------------------------------------------------------------------------------------

PATIENCE_S = 60.0
"""How long the writer waits for a database that is unreachable."""
PAUSE_S = 0.5
PREPARING = 0x6E67_6A62
"""Number of the advisory lock under which tables are created."""


class PostgresConnection:
    """A psycopg connection that accepts statements with ``?`` placeholders."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.raw = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        return self.raw.execute(_translated(statement), values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        with self.raw.cursor() as cursor:
            cursor.executemany(_translated(statement), values)


@functools.lru_cache(maxsize=256)
def _translated(statement: str) -> Any:
    return statement.replace("%", "%%").replace("?", "%s").encode()


class PostgresWriter(OperationWriter[PostgresConnection]):
    """An `OperationWriter` for PostgreSQL.

    If the connection is lost, the writer connects again and repeats the batch. If the response to a commit is lost, it
    is unknown whether the commit succeeded, so every operation must be safe to run twice. The same callable is called
    both times, so it may keep state between the calls.

    Args:
        prepare: creates missing tables, under a lock, after each connect.
        patience_s: seconds to wait for an unreachable database before the batch fails.
        held: numbers of advisory locks that the connection holds exclusively. While another process holds one of them,
            the database counts as unreachable.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        prepare: Callable[[PostgresConnection], None],
        translate: Callable[[Exception], NemoGymError],
        after_commit: Callable[[list[tuple[str, bytes]]], None] | None = None,
        patience_s: float = PATIENCE_S,
        held: Sequence[int] = (),
    ) -> None:
        try:
            import psycopg
        except ImportError:
            raise ConfigError(
                "a store in PostgreSQL needs psycopg: pip install 'nemo-gym-suite[postgres]'", key="store"
            ) from None
        self._psycopg = psycopg
        self._url = url
        self._prepare = prepare
        self._patience_s = patience_s
        self._advisory_locks = held
        super().__init__(name=name, after_commit=after_commit, translate=translate)

    def _settle(self, batch: list[OperationRequest]) -> None:
        give_up = time.monotonic() + self._patience_s
        while True:
            for request in batch:
                request.error = None
            try:
                self._commit(batch)
                return
            except self._psycopg.errors.DeadlockDetected:
                log.info("store_deadlock", operations=len(batch))  # PostgreSQL let another process win; try again
            except (self._psycopg.OperationalError, self._psycopg.InterfaceError) as error:
                log.warning("store_unreachable", error=type(error).__name__, operations=len(batch))
                self._disconnect()
                if time.monotonic() >= give_up or self._closed:
                    self._fail(batch, error)
                    return
                time.sleep(PAUSE_S)
            except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
                self._fail(batch, error)
                return

    def _fail(self, batch: list[OperationRequest], error: Exception) -> None:
        failure = self._typed(error)
        for request in batch:
            request.error = failure

    def _commit(self, batch: list[OperationRequest]) -> None:
        connection = self._connected()
        with connection.raw.transaction():
            self._operate(connection, batch)
        self._report(batch)

    def _connected(self) -> PostgresConnection:
        if self._connection is None:
            raw = self._psycopg.connect(
                self._url, autocommit=True, connect_timeout=10, keepalives_idle=15, keepalives_interval=5
            )
            connection = PostgresConnection(raw)
            try:
                for number in self._advisory_locks:
                    if not connection.execute("SELECT pg_try_advisory_lock(?::bigint)", (number,)).fetchone()[0]:  # type: ignore[index]
                        raise self._psycopg.OperationalError("another process holds this pipeline's lock")
                with raw.transaction():
                    connection.execute("SELECT pg_advisory_xact_lock(?::bigint)", (PREPARING,))
                    self._prepare(connection)
            except BaseException:
                raw.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.raw.close()
