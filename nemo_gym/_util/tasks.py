"""Tasks: work that finishes although its caller is cancelled (`finish`), work that cannot end the program
(`without_exit`), tasks in the background (`BackgroundTasks`), an event loop on a thread of its own (`LoopThread`),
retries of failed operations (`Backoff`): growing pauses, ``Retry-After`` headers, and when to give up; deadlines that
stand still (`paused`); and work that a signal or a failure ends (`on_stop_signal`, `until_signal`, `until_failure`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


async def finish(work: Awaitable[T], *, timeout_s: float | None = None) -> T:
    """Await ``work`` to its end, even if the caller is cancelled meanwhile; raise the cancellation afterwards.

    Raises:
        TimeoutError: ``work`` did not end within ``timeout_s`` and was cancelled.
        asyncio.CancelledError: the caller was cancelled. Its context is the error of ``work``, if any.
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


async def without_exit(work: Callable[[], Awaitable[T]]) -> T:
    """Await ``work()``; a `SystemExit` out of it becomes a `RuntimeError`. A task that raised it would end its event
    loop, and with it the work of all others."""
    try:
        return await work()
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called in a server") from error


@contextlib.contextmanager
def paused(deadline: asyncio.Timeout | None) -> Iterator[None]:
    """Let a deadline stand still during the ``with`` block, which may run in another task. Nothing happens without a
    deadline, or if its own block was left."""
    if deadline is None or (ends_at := deadline.when()) is None:
        yield
        return
    loop = asyncio.get_running_loop()
    began = loop.time()
    with contextlib.suppress(RuntimeError):  # its block was left
        deadline.reschedule(None)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            deadline.reschedule(ends_at + loop.time() - began)


def on_stop_signal(handler: Callable[[], object]) -> None:
    """Have the running loop call ``handler`` at SIGINT, SIGTERM and SIGHUP. A SIGHUP that this process was started to
    ignore, as ``nohup`` does, stays ignored, so that the work goes on when its terminal closes."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, handler)


def first_of(errors: ExceptionGroup[Exception], kind: type[E]) -> E:
    """Return the first exception of a task group whose exceptions are all of ``kind``, for the caller to raise. Raises
    ``errors`` itself if it contains any other exception.

    Use it with ``except ExceptionGroup``: Debian 12's Python 3.11.2 wraps what ``except*`` raises in another group.
    """
    matching, remaining = errors.split(kind)
    if matching is None or remaining is not None:
        raise errors
    first: Any = matching
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first  # type: ignore[no-any-return]


class BackgroundTasks:
    """Tasks that run in the background until their owner joins or cancels them. The owner may use several event loops.

    Args:
        on_error: gets each task that fails and its exception; without it, asyncio logs exceptions never retrieved.
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
        """Wait until this loop's tasks have ended, including those that start meanwhile, or until ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while tasks := self._tasks_of(loop):
            left_s = None if deadline is None else deadline - loop.time()
            if left_s is not None and left_s <= 0:
                return
            await asyncio.wait(tasks, timeout=left_s)

    async def cancel(self) -> None:
        """Cancel this loop's tasks, and wait until they have ended."""
        while tasks := self._tasks_of(asyncio.get_running_loop()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def _tasks_of(self, loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
        return {task for task in self._tasks if task.get_loop() is loop}


RETRY_AFTER_AT_MOST_S = 60.0
"""Limit on the wait that a peer requests, because a peer cannot know when it will have recovered."""
NETWORK_JITTER = 0.25
"""Jitter for network calls, so that hundreds of rollouts that fail together do not retry in the same millisecond."""


class Backoff:
    """The pauses between the tries of one operation. The caller decides which errors to retry::

        backoff = Backoff(first_s=0.5, longest_s=30, tries=5)
        while True:
            try:
                return await ask()
            except ConnectionError:
                if not await backoff.again():
                    raise

    Args:
        first_s: the first pause.
        longest_s: the longest pause, unless ``at_least_s`` requests a longer one.
        factor: ratio of each pause to the previous one.
        tries: total number of tries, including the first; unlimited by default.
        patience_s: seconds from now after which no further try begins; unlimited by default.
        jitter: each pause is extended by a random fraction of itself, up to this fraction.
    """

    def __init__(
        self,
        *,
        first_s: float,
        longest_s: float = math.inf,
        factor: float = 2.0,
        tries: int | None = None,
        patience_s: float = math.inf,
        jitter: float = 0.0,
    ) -> None:
        self._pause_s, self._longest_s, self._factor, self._jitter = min(first_s, longest_s), longest_s, factor, jitter
        self._tries_left = math.inf if tries is None else tries - 1
        self._deadline = time.monotonic() + patience_s

    @property
    def left_s(self) -> float:
        """Seconds until patience ends."""
        return self._deadline - time.monotonic()

    def next_pause_s(self, *, at_least_s: float = 0.0, instead_s: float | None = None) -> float | None:
        """Return the pause before the next try, or ``None`` if there is no further try. Each call uses up one try.

        Args:
            at_least_s: wait that the peer requested; the pause is never shorter, even beyond ``longest_s``.
            instead_s: wait that the peer requested; it replaces this pause, but ``longest_s`` still applies.
        """
        pause_s = self._pause_s if instead_s is None else instead_s
        pause_s = max(min(pause_s * (1 + random.random() * self._jitter), self._longest_s), at_least_s)
        if self._tries_left <= 0 or pause_s >= self.left_s:
            return None
        self._tries_left -= 1
        self._pause_s = min(self._pause_s * self._factor, self._longest_s)
        return pause_s

    async def again(self, *, at_least_s: float = 0.0, instead_s: float | None = None) -> bool:
        """Wait before the next try and return ``True``; return ``False`` at once if there is no further try."""
        pause_s = self.next_pause_s(at_least_s=at_least_s, instead_s=instead_s)
        if pause_s is None:
            return False
        await asyncio.sleep(pause_s)
        return True

    def again_blocking(self) -> bool:
        """Do the same as `again`, but block the thread."""
        pause_s = self.next_pause_s()
        if pause_s is None:
            return False
        time.sleep(pause_s)
        return True


def pause_after(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return a pause that doubles with each of ``failures``, for callers that count the failures themselves."""
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s)


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header in either of its forms, at most `RETRY_AFTER_AT_MOST_S`; ``None``
    if the header is missing or malformed."""
    if not header:
        return None
    try:
        return waiting_s(float(header))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(header)
        return waiting_s((at - datetime.datetime.now(at.tzinfo)).total_seconds())
    except (ValueError, OverflowError):
        return None


def waiting_s(seconds: float | None) -> float | None:
    """Limit the wait that a peer requests to 0 … `RETRY_AFTER_AT_MOST_S`; ``None`` if it requests none."""
    if seconds is None or math.isnan(seconds):
        return None
    return min(max(0.0, seconds), RETRY_AFTER_AT_MOST_S)


async def until_signal(work: Coroutine[Any, Any, int], *, stopped: int) -> int:
    """Await ``work``. The first signal to stop cancels it, and ``stopped`` is returned; the second one kills this
    process."""
    task = asyncio.ensure_future(work)
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        if is_stopping:
            # Die from the signal at once, without waiting for anything.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        is_stopping = True
        task.cancel()

    on_stop_signal(stop)
    try:
        return await task
    except asyncio.CancelledError:
        return stopped


async def until_failure(work: Awaitable[int], failure: asyncio.Future[Any]) -> int:
    """Await ``work``; as soon as ``failure`` holds an exception, cancel the work and raise that exception."""
    doing = asyncio.ensure_future(work)
    try:
        await asyncio.wait({doing, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise failure.result()
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})


class LoopThread:
    """An event loop that runs from its creation until `close`. Its methods may be called from several threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on the loop's own thread, where `run` would block for ever."""
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """Run ``work`` to its end. An exception that interrupts the caller, such as KeyboardInterrupt, cancels it.

        Raises:
            TimeoutError: ``work`` took longer than ``timeout_s`` and was cancelled.
        """
        future = self.start(work)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the remaining tasks, and end the thread; idempotent."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            remaining = asyncio.all_tasks(self.loop)
            for task in remaining:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
