"""Stop commands cleanly on a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Await ``work``. The first SIGINT or SIGTERM cancels it; the second one kills this process."""
    task = asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if stopped:
            # Die from the signal at once, without waiting for anything.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        stopped = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await task
