"""A writer for PostgreSQL: one thread, one connection, one transaction for all who wait.

A database that goes away is connected to again, and what waited is done again: every operation must be one that may be
done twice, since nobody knows what became of a commit whose answer was lost. It is the same object that is called
twice, so it may remember what it did.
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
"""How long a database that cannot be used is waited for."""
PAUSE_S = 0.5
PREPARING = 0x6E67_6A62
"""Number of the advisory lock under which tables are made."""

T = TypeVar("T")


class PostgresConnection:
    """psycopg's, for statements that mark their values with ``?``."""

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
        prepare: makes what is missing in the database, under a lock, whenever it was connected to.
        after_commit: sees the rows of a transaction before its callers learn that it stands.
        translate: the error that callers get for what the database raised in the end.
        held: numbers of advisory locks that every connection takes and no other process may have. One that is taken
            is waited for as the database is.
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
        self._held = held
        self._connection: PostgresConnection | None = None
        super().__init__(name=name)

    def call(
        self, operation: Callable[[PostgresConnection], T], *, row: tuple[str, bytes] | None = None
    ) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. It raises `NemoGymError` for its caller alone, before it changes
        what others see; ``row`` goes to ``after_commit`` when it succeeded."""
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
                log.info("store_deadlock", operations=len(batch))  # another process went first
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
                for number in self._held:
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
