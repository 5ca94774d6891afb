"""Ending what an attempt holds, whatever happens to the attempt meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable

import structlog

from nemo_gym._util.tasks import finish

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 60.0


async def shielded(teardown: Awaitable[None], timeout_s: float, *, what: str) -> None:
    """Finish a teardown also when the act is cancelled meanwhile; bounded, because the lease ends the box anyway."""
    try:
        await finish(teardown, timeout_s=timeout_s)
    except TimeoutError:
        log.warning("teardown_timed_out", what=what, timeout_s=timeout_s)
    except Exception as error:  # noqa: BLE001 - a teardown that fails must not replace the act's own outcome
        log.warning("teardown_failed", what=what, error=str(error))
