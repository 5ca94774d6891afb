"""Ending what an attempt holds, whatever happens to the attempt meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import structlog

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 60.0


async def shielded(teardown: Awaitable[None], timeout_s: float, *, what: str) -> None:
    """Finish a teardown also when the act is cancelled meanwhile; bounded, because the lease ends the box anyway."""
    task = asyncio.ensure_future(teardown)
    try:
        await asyncio.shield(asyncio.wait({task}, timeout=timeout_s))
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=timeout_s)
        raise
    if not task.done():
        task.cancel()
        log.warning("teardown_timed_out", what=what, timeout_s=timeout_s)
    elif (error := task.exception()) is not None:
        log.warning("teardown_failed", what=what, error=str(error))
