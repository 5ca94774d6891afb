"""Tasks: work that is finished although its caller is cancelled, or left to an owner; what a group of them raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


async def finish(work: Awaitable[T], *, timeout_s: float | None = None) -> T:
    """Await ``work`` to its end, however often the caller is cancelled meanwhile; the cancellation follows then.

    Raises:
        TimeoutError: it did not end within ``timeout_s``, and was cancelled for that.
        asyncio.CancelledError: the caller was cancelled. An error of ``work`` itself is its context.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        left_s = None if deadline is None else deadline - loop.time()
        if left_s is not None and left_s <= 0:
            task.cancel()
            break
        try:
            await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if task.done() and not task.cancelled():
            cancelled.__context__ = task.exception()
        raise cancelled
    if not task.done():
        raise TimeoutError
    return task.result()


def first_of(errors: ExceptionGroup[Exception], kind: type[E]) -> E:
    """The first exception of a task group whose exceptions are all of ``kind``, to be raised in its place. Raises
    ``errors`` where others are among them.

    For ``except ExceptionGroup``: Debian 12's Python 3.11.2 wraps what ``except*`` raises into one more group.
    """
    found, others = errors.split(kind)
    if found is None or others is not None:
        raise errors
    first: Any = found
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first  # type: ignore[no-any-return]


class BackgroundTasks:
    """Tasks that nobody awaits; their owner does before it ends. One owner may live in several event loops.

    Args:
        on_error: sees the exception of a task that fails; without it asyncio logs one that nobody retrieved.
    """

    def __init__(self, on_error: Callable[[asyncio.Task[Any], BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run ``work`` in a task of the running loop."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(task, error)

    async def join(self, *, timeout_s: float | None = None) -> None:
        """Wait until this loop's tasks have ended, those included that start meanwhile, or until ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while mine := self._of(loop):
            left_s = None if deadline is None else deadline - loop.time()
            if left_s is not None and left_s <= 0:
                return
            await asyncio.wait(mine, timeout=left_s)

    async def cancel(self) -> None:
        """Cancel this loop's tasks, and wait until they have ended."""
        while mine := self._of(asyncio.get_running_loop()):
            for task in mine:
                task.cancel()
            await asyncio.wait(mine)

    def __len__(self) -> int:
        return len(self._tasks)

    def _of(self, loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
        return {task for task in self._tasks if task.get_loop() is loop}
