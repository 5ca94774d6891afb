"""The writer of the registry: one thread, one connection, one transaction for all who wait.

A transaction is as durable as the most demanding of its operations wants. When it fails, its operations are tried
again one by one, so that nobody fails for another's sake; a database that is gone fails those who wait, and is
connected to again for the next.

What waits for no disk is committed at once, on the loop's own thread, where nobody waits and the database is a file:
two changes of threads take longer than such a commit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from nemo_gym.broker.registry.database import (
    Durability,
    RegistryError,
    begin,
    is_local,
    prepare,
    unreachable,
)
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.storage.group_commit import GroupCommitThread, Waiting, resolve

T = TypeVar("T")
Operation = Callable[[Connection], T]
log = structlog.get_logger(__name__)
MAX_AT_ONCE = 1000
"""Commits in a row on the loop's thread; the next one is the writer's, which sees to the database's log."""


@dataclass(slots=True, kw_only=True)
class _Request(Waiting):
    operation: Operation[Any]
    durability: Durability


class GroupCommitWriter(GroupCommitThread[_Request]):
    """Runs operations in order on its own thread. An operation raises `NemoGymError` before it writes, or not at
    all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._at_once = 0
        super().__init__(name="registry-writer")

    def call(self, operation: Operation[T], durability: Durability = Durability.MACHINE) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction, which is at least as durable as said. Raises `RegistryError`
        where the database cannot be used."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RegistryError("the broker is stopping", retryable=True, started="no"))
            return future
        request = _Request(future, operation=operation, durability=durability)
        if not self._settled_at_once(request):
            self._put(request)
        return future

    def _settled_at_once(self, request: _Request) -> bool:
        """Commit it here and now, if that can be done without waiting."""
        connection = self._connection if self._idle and request.durability is Durability.PROCESS else None
        if connection is None or not is_local(connection):
            return False
        self._at_once += 1
        if self._at_once % MAX_AT_ONCE == 0 or not self._commit([request]):
            request.error = None
            return False
        resolve([request])
        return True

    def _settle(self, batch: list[_Request]) -> None:
        if not self._commit(batch) and len(batch) > 1:
            for request in batch:
                request.error = None
                self._commit([request])

    def _commit(self, batch: list[_Request]) -> bool:
        """Commit what the operations write. ``False`` when surely nothing of it stands and there is something to try
        again: a failure of the commit itself is final, as nobody knows what became of it."""
        committing = False
        try:
            connection = self._connected()
            transaction = begin(connection, max(request.durability for request in batch), at_once=self._on_loop())
            try:
                for request in batch:
                    try:
                        request.outcome = request.operation(connection)
                    except NemoGymError as error:  # refused before it wrote anything: its caller's affair alone
                        request.error = error
                committing = True
                transaction.commit()
            finally:
                transaction.close()
            return True
        except Exception as error:  # noqa: BLE001 - the thread's boundary: every waiter gets the error, typed
            log.warning("registry_write_failed", error=repr(error)[:500], operations=len(batch))
            failure = unreachable(error) if isinstance(error, SQLAlchemyError) else error
            for request in batch:
                request.error = request.error or failure
            if isinstance(error, SQLAlchemyError):
                self._disconnect()
            return committing

    def _on_loop(self) -> bool:
        return threading.get_ident() != self._thread.ident

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = self._engine.connect()
            try:
                with connection.begin():
                    prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except SQLAlchemyError as error:
                log.info("registry_close_failed", error=repr(error)[:200])
