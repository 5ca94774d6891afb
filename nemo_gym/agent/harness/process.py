"""Follows one process in a box to its end: reads its output, and stops it at its deadline or on request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.agent.harness.base import Judgement
from nemo_gym.agent.harness.events import BoundedLog, EventReader, LineSplitter
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecProcess

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 20.0
"""How long a killed process may take to end; also the value to pass to `act_in_world` as ``grace_s``."""


async def follow(
    process: ExecProcess,
    reader: EventReader,
    *,
    output: BoundedLog,
    errors: BoundedLog,
    timeout_s: float | None,
    watching: Coroutine[Any, Any, Judgement],
) -> tuple[ExecEnd, Judgement | None]:
    """Read a process until it ends. Returns its end, and why ``watching`` stopped it, if it did.

    Args:
        reader: gets standard output line by line; ``output`` and ``errors`` get both streams.
        timeout_s: the time after which the provider ends the process; if it does not, this function soon does.
        watching: the process and its descendants are killed when this ends. It is cancelled if the process ends first.
    """
    lines, stopped = LineSplitter(reader), None
    end: ExecEnd | None = None

    async def stop() -> None:
        nonlocal stopped
        stopped = await watching
        bound.reschedule(asyncio.get_running_loop().time() + STOP_TIMEOUT_S / 2)
        await _kill(process.kill())

    bound = asyncio.timeout(None if timeout_s is None else timeout_s + STOP_TIMEOUT_S / 2)
    try:
        async with bound:
            watch = asyncio.create_task(stop())
            try:
                async for event in process.events():
                    if isinstance(event, ExecEnd):
                        end = event
                    elif event.stream == "stdout":
                        output.write(event.data)
                        lines.feed(event.data)
                    else:
                        errors.write(event.data)
            finally:
                watch.cancel()
    except TimeoutError:
        end = ExecEnd(ExecOutcome.TIMED_OUT)
    finally:
        lines.finish()
        if end is None or end.outcome is ExecOutcome.TIMED_OUT:
            await _kill(process.kill())
    await asyncio.wait({watch})
    if not watch.cancelled() and (error := watch.exception()) is not None:
        raise error
    return end or ExecEnd(ExecOutcome.LOST), stopped


async def _kill(killing: Coroutine[Any, Any, None]) -> None:
    """Wait for the kill, even while being cancelled. If it fails, the process ends with its box at the latest."""
    try:
        await finish(killing, timeout_s=STOP_TIMEOUT_S / 2)
    except TimeoutError:
        log.warning("harness_kill_timed_out")
    except SandboxError as error:
        log.warning("harness_kill_failed", error=str(error))
