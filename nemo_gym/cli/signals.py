"""Run a command's work until a signal stops it, or what it depends on fails."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Coroutine
from typing import Any

from nemo_gym._util.tasks import on_stop_signal


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
