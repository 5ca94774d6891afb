"""Follows one process of a box to its end: reads it as it goes, and stops it at its deadline or when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from nemo_gym._util.tasks import finish
from nemo_gym.agent.harness.base import Judgement
from nemo_gym.agent.harness.events import BoundedLog, EventReader, LineSplitter
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecProcess

log = structlog.get_logger(__name__)

STOP_TIMEOUT_S = 20.0
"""How long a killed process may take to be gone; it is also the grace that `act_in_world` needs to be given."""


@dataclass(frozen=True)
class Sinks:
    """Where the output goes."""

    reader: EventReader
    """Of standard output, by lines."""
    output: BoundedLog
    errors: BoundedLog


async def follow(
    process: ExecProcess, sinks: Sinks, timeout_s: float | None, watching: Coroutine[Any, Any, Judgement]
) -> tuple[ExecEnd, Judgement | None]:
    """The end of a process, and why it was stopped if it was before its deadline.

    Args:
        timeout_s: after which the provider ends it; a provider that does not is not waited for much longer.
        watching: the process is killed with its tree when this ends. It is cancelled when the process ends first.
    """
    lines, stopped = LineSplitter(sinks.reader), None
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
                        sinks.output.write(event.data)
                        lines.feed(event.data)
                    else:
                        sinks.errors.write(event.data)
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
    """Kill for sure, also while being cancelled; the box's end is the end of whatever withstands."""
    try:
        await finish(killing, timeout_s=STOP_TIMEOUT_S / 2)
    except TimeoutError:
        log.warning("harness_kill_timed_out")
    except SandboxError as error:
        log.warning("harness_kill_failed", error=str(error))
