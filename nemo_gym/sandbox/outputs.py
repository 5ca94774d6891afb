"""A command's streamed output as one result, for providers whose commands stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable
from typing import Protocol

from nemo_gym.contract.errors import SandboxLostError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, SandboxExecResult

ERROR_TYPES = {
    ExecOutcome.EXITED: None,
    ExecOutcome.SIGNALED: "signal",
    ExecOutcome.TIMED_OUT: "timeout",
    ExecOutcome.OUT_OF_MEMORY: "oom",
    ExecOutcome.LOST: "lost",
}
"""NeMo Gym's spelling of each outcome."""


class CappedProcess(Protocol):
    """What is needed of an `nemo_gym.sandbox.base.ExecProcess` here."""

    truncated: set[str]
    """Once it has ended: the streams of which more was written than kept."""

    def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]: ...


async def run_to_end(starting: Awaitable[CappedProcess]) -> SandboxExecResult:
    """Everything a command did. A box that is gone before gives ``LOST``, as one that goes meanwhile."""
    output = {"stdout": bytearray(), "stderr": bytearray()}
    end = ExecEnd(ExecOutcome.LOST)
    truncated: set[str] = set()
    try:
        process = await starting
    except SandboxLostError:
        pass
    else:
        async with contextlib.aclosing(process.events()) as events:
            async for event in events:
                if isinstance(event, ExecOutput):
                    output[event.stream] += event.data
                else:
                    end = event
        truncated = process.truncated
    return SandboxExecResult(
        stdout=output["stdout"].decode("utf-8", "surrogateescape"),
        stderr=output["stderr"].decode("utf-8", "surrogateescape"),
        return_code=end.return_code,
        error_type=ERROR_TYPES[end.outcome],
        outcome=end.outcome,
        signal=end.signal,
        duration_s=end.duration_s,
        stdout_truncated="stdout" in truncated,
        stderr_truncated="stderr" in truncated,
    )
