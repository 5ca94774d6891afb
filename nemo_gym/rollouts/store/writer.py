"""The writer of the job store: one thread, one SQLite connection, one transaction for all who wait."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from nemo_gym.errors import NemoGymError
from nemo_gym.group_commit import GroupCommitThread, Waiting

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Request(Waiting):
    operation: Callable[[sqlite3.Connection], Any]
    row: tuple[str, bytes] | None


class GroupCommitWriter(GroupCommitThread[_Request]):
    """Runs operations in order on its own thread. The first write that fails stops it for good: every later call
    raises the same error, so that nothing is acknowledged on top of a hole. ``after_commit`` sees the rows of a
    transaction before its callers learn that it stands."""

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        *,
        after_commit: Callable[[list[tuple[str, bytes]]], None] | None = None,
        translate: Callable[[Exception], NemoGymError],
    ) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._after_commit = after_commit
        self._translate = translate
        self._broken: NemoGymError | None = None
        super().__init__(name="job-store-writer")

    def call(
        self, operation: Callable[[sqlite3.Connection], T], *, row: tuple[str, bytes] | None = None
    ) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. It must raise before it writes, or not at all. ``row`` goes to
        ``after_commit`` when the operation succeeded."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._broken is not None:
            future.set_exception(self._broken)
        elif self._closed:
            future.set_exception(RuntimeError("the job store is closed"))
        else:
            self._put(_Request(future, operation=operation, row=row))
        return future

    def _settle(self, batch: list[_Request]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            self._connection = self._connection or self._connect()
            self._commit(self._connection, batch)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
            self._broken = error if isinstance(error, NemoGymError) else self._translate(error)
            for request in batch:
                request.error = request.error or self._broken

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
