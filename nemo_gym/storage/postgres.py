"""A writer for PostgreSQL: one thread, one connection, one transaction for all waiting callers.

If the connection is lost, the writer connects again and repeats the batch. If the response to a commit is lost, it is
unknown whether the commit succeeded, so every operation must be safe to run twice. The same callable is called both
times, so it may keep state between the calls.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.storage.group_commit import GroupCommitThread, Waiting

if TYPE_CHECKING:
    import psycopg

log = structlog.get_logger(__name__)

PATIENCE_S = 60.0
"""How long the writer waits for a database that is unreachable."""
PAUSE_S = 0.5
PREPARING = 0x6E67_6A62
"""Number of the advisory lock under which tables are created."""

T = TypeVar("T")


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


@dataclass(slots=True, kw_only=True)
class _Request(Waiting):
    operation: Callable[[PostgresConnection], Any]
    row: tuple[str, bytes] | None


class PostgresWriter(GroupCommitThread[_Request]):
    """Runs operations in order on its own thread and connection.

    Args:
        prepare: creates missing tables, under a lock, after each connect.
        after_commit: gets the rows of a committed transaction before its callers' futures resolve.
        translate: converts the database's final error to the error that callers get.
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
        self._name = name
        self._prepare = prepare
        self._translate = translate
        self._after_commit = after_commit
        self._patience_s = patience_s
        self._advisory_locks = held
        self._connection: PostgresConnection | None = None
        super().__init__(name=name)

    def call(
        self, operation: Callable[[PostgresConnection], T], *, row: tuple[str, bytes] | None = None
    ) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. It may raise `NemoGymError`, which only its own caller gets, and
        only before it changes shared data. ``after_commit`` gets ``row`` if the operation succeeds."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RuntimeError(f"{self._name} is closed"))
        else:
            self._put(_Request(future, operation=operation, row=row))
        return future

    def _settle(self, batch: list[_Request]) -> None:
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

    def _fail(self, batch: list[_Request], error: Exception) -> None:
        failure = error if isinstance(error, NemoGymError) else self._translate(error)
        for request in batch:
            request.error = failure

    def _commit(self, batch: list[_Request]) -> None:
        connection = self._connected()
        with connection.raw.transaction():
            for request in batch:
                try:
                    request.outcome = request.operation(connection)
                except NemoGymError as error:
                    request.error = error
        if self._after_commit is not None:
            rows = [request.row for request in batch if request.row is not None and request.error is None]
            if rows:
                self._after_commit(rows)

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
