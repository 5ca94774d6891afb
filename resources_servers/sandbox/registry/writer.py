"""One thread that owns the connection and commits what many callers ask for in one transaction.

A commit costs a sync to disk (or a round trip) whatever is in it, so callers that wait at the same time share one. A
caller's future resolves after its transaction is durable, never before. When a transaction fails, its operations are
tried again one by one, so that nobody fails for another's sake; a database that is gone fails those who wait, and is
connected to again for the next.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from nemo_gym.errors import NemoGymError
from resources_servers.sandbox.registry.database import RegistryError, prepare, unreachable

T = TypeVar("T")
Operation = Callable[[Connection], T]
MAX_BATCH = 512
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Request:
    operation: Operation[Any]
    future: asyncio.Future[Any]
    outcome: Any = None
    error: Exception | None = None


class GroupCommitWriter:
    """Runs operations in order on its own thread. An operation raises `NemoGymError` before it writes, or not at
    all."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="registry-writer", daemon=True)
        self._thread.start()

    def call(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Run ``operation`` in the next transaction. Raises `RegistryError` where the database cannot be used."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RegistryError("the broker is stopping", retryable=True, started="no"))
        else:
            self._requests.put(_Request(operation, future))
        return future

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._requests.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if not self._commit(batch) and len(batch) > 1:
                for request in batch:
                    request.error = None
                    self._commit([request])
            self._loop.call_soon_threadsafe(_resolve, batch)
        self._disconnect()

    def _next(self) -> list[_Request] | None:
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

    def _commit(self, batch: list[_Request]) -> bool:
        """Commit what the operations write. ``False`` when surely nothing of it stands and there is something to try
        again: a failure of the commit itself is final, as nobody knows what became of it."""
        committing = False
        try:
            connection = self._connected()
            transaction = connection.begin()
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


def _resolve(batch: list[_Request]) -> None:
    for request in batch:
        if request.future.done():  # its caller was cancelled; the write stands
            continue
        if request.error is not None:
            request.future.set_exception(request.error)
        else:
            request.future.set_result(request.outcome)
