"""A writer for PostgreSQL: one thread, one connection, one transaction for all waiting callers.

If the connection is lost, the writer connects again and repeats the batch. If the response to a commit is lost, it is
unknown whether the commit succeeded, so every operation must be safe to run twice. The same callable is called both
times, so it may keep state between the calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from nemo_gym.contract.errors import ConfigError, NemoGymError
from nemo_gym.storage.group_commit import OperationRequest, OperationWriter

if TYPE_CHECKING:
    import psycopg

log = structlog.get_logger(__name__)

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
