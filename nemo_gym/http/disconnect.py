"""Work that is worth doing only while its caller is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from starlette.types import Receive

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status, seen by nobody, of a reply whose caller is gone."""


class Received(Protocol):
    """A request, ASGI's or a framework's."""

    @property
    def receive(self) -> Receive: ...


class CallerGoneError(Exception):
    """The connection is closed; nobody waits for an answer."""


async def disconnected(request: Received) -> None:
    """Returns when the caller has left. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def end(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait until it has ended, also while the waiter is being cancelled itself."""
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved: an error while ending is the log's, which the work itself wrote
    if cancelled is not None:
        raise cancelled


async def while_connected(request: Received, work: Callable[[], Awaitable[T]]) -> T:
    """The result of ``work``, which is cancelled when the caller leaves; then raises `CallerGoneError`."""
    task: asyncio.Task[T] = asyncio.ensure_future(_run(work))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            await end(task)


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
