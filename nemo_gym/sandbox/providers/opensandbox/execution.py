"""One command in a box, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal as signals
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

from nemo_gym.contract.errors import NemoGymError, SandboxError, SandboxLostError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecRequest
from nemo_gym.sandbox.providers.opensandbox.connection import OpenSandboxBox, sdk_errors
from nemo_gym.sandbox.providers.opensandbox.tool import (
    END,
    STARTED,
    STDERR,
    STDOUT,
    Frame,
    ToolRun,
    ending,
    request_argument,
    run_helper,
)

_OUTCOMES = {
    "exited": ExecOutcome.EXITED,
    "signaled": ExecOutcome.SIGNALED,
    "timed_out": ExecOutcome.TIMED_OUT,
    "out_of_memory": ExecOutcome.OUT_OF_MEMORY,
}
_SIGNAL_TIMEOUT_S = 30.0
_OUT_OF_MEMORY = re.compile(r"\boom", re.IGNORECASE)
"""In a status that says why the box is gone: Kubernetes' ``OOMKilled``, but not "no room left"."""


class OpenSandboxExec:
    """A running command (`ExecProcess`). ``truncated`` names the streams whose output was cut.

    The command runs below a helper program in the box; only the helper's end frame tells how it ended. The exit code
    that the backend reports for the helper (0 if a connection merely closed, -1 for any kill) is not the command's.
    """

    def __init__(
        self, box: OpenSandboxBox, request: ExecRequest, *, in_background: Callable[[Awaitable[None]], None]
    ) -> None:
        self.exec_id = uuid.uuid4().hex
        self.truncated: set[str] = set()
        self._box = box
        self._request = request
        self._in_background = in_background
        self._running: ToolRun | None = None
        self._first_frame: Frame | None = None
        self._lost = False
        self._killed = False
        self._ended = False
        self._consumed = False
        self._began = time.monotonic()

    async def start(self) -> None:
        """Start the command. If the box is gone, the exec's only event is an end with ``LOST``.

        Raises:
            SandboxError: the helper could not run the command, for example because the box has no such user.
        """
        try:
            await self._submit()
            if self._running is not None:
                self._first_frame = await self._running.next()
        except SandboxLostError:
            self._lost = True
        except BaseException:
            self._abandon()
            raise
        if self._first_frame is not None and self._first_frame.kind == END:
            result = ending(self._first_frame)
            if result["outcome"] == "error":
                await self._close()
                raise SandboxError(f"opensandbox: the command was not run: {result.get('error')}")

    async def _submit(self) -> None:
        request = self._request
        stdin = ""
        if request.stdin is not None:
            stdin = await self._box.put_file(request.stdin, f"{self.exec_id}.stdin")
        command = request.command
        helper_request: dict[str, Any] = {
            "argv": ["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            "cwd": request.cwd or "",
            "env": dict(request.env),
            "timeout_s": request.timeout_s,
            "user": request.user or "",
            "stdin": stdin,
            "merge_stderr": request.merge_stderr,
        }
        argument = await request_argument(self._box, helper_request)
        self._running = ToolRun(self._box, "run", self.exec_id, argument)
        self._running.begin()

    async def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]:
        """Yield the output in order, then exactly one `ExecEnd`. Can be iterated once."""
        if self._consumed:
            raise SandboxError("the events of an exec can be read once")
        self._consumed = True
        kept_bytes = {"stdout": 0, "stderr": 0}
        try:
            end: ExecEnd | None = None
            while end is None and not self._lost:
                try:
                    frame = await self._next()
                except SandboxLostError:
                    self._lost = True
                    break
                if frame.kind == END:
                    end = self._end_of(ending(frame))
                elif frame.kind in (STDOUT, STDERR):
                    stream: Literal["stdout", "stderr"] = "stdout" if frame.kind == STDOUT else "stderr"
                    data = frame.data[: max(self._request.max_output_bytes - kept_bytes[stream], 0)]
                    if len(data) < len(frame.data):
                        self.truncated.add(stream)
                    if data:
                        kept_bytes[stream] += len(data)
                        yield ExecOutput(stream, data)
            if end is None:
                end = await self._lost_end()
            else:
                self._ended = True
                if self._running is not None:
                    await self._running.settle()
            yield end
        finally:
            self._abandon()

    async def _next(self) -> Frame:
        first, self._first_frame = self._first_frame, None
        if first is not None and first.kind != STARTED:
            return first
        if self._running is None:
            raise SandboxLostError("the command was never submitted")
        return await self._running.next()

    def _end_of(self, result: dict[str, Any]) -> ExecEnd:
        outcome = _OUTCOMES.get(result["outcome"])
        duration_s = time.monotonic() - self._began
        if result["outcome"] == "refused" and self._killed:
            # A kill arrived before the command started, and prevented the start.
            return ExecEnd(ExecOutcome.SIGNALED, signal=int(signals.SIGKILL), duration_s=duration_s)
        if outcome is None:
            return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)
        return ExecEnd(
            outcome,
            return_code=int(result["code"]) if outcome is ExecOutcome.EXITED else None,
            signal=int(result["signal"]) if result.get("signal") else None,
            duration_s=duration_s,
        )

    async def _lost_end(self) -> ExecEnd:
        """Return ``LOST``, or ``OUT_OF_MEMORY`` if the server reports that: the kernel may also kill the helper."""
        duration_s = time.monotonic() - self._began
        with contextlib.suppress(*sdk_errors(TimeoutError)):
            async with asyncio.timeout(10):
                info = await self._box.info()
            if info is not None and _OUT_OF_MEMORY.search(f"{info.status.reason} {info.status.message}"):
                return ExecEnd(ExecOutcome.OUT_OF_MEMORY, signal=int(signals.SIGKILL), duration_s=duration_s)
        return ExecEnd(ExecOutcome.LOST, duration_s=duration_s)

    def _abandon(self) -> None:
        """Kill the command if it still runs, then close the connection, all in the background."""

        async def finish() -> None:
            try:
                # Best effort: a box that is gone has nothing left to kill.
                with contextlib.suppress(NemoGymError):
                    await self.kill()
            finally:
                await self._close()

        self._in_background(finish())

    async def _close(self) -> None:
        if self._running is not None:
            await self._running.close()

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        if self._ended or self._running is None:
            return
        if number == signals.SIGKILL:
            self._killed = True
        with contextlib.suppress(SandboxLostError):
            arguments = ("signal", self.exec_id, str(int(number)))
            result = await run_helper(self._box, *arguments, timeout_s=_SIGNAL_TIMEOUT_S)
            if result["outcome"] == "error":
                # Destroy the box: losing it is better than keeping one with a command that cannot be stopped.
                await self._box.connection.kill(self._box.sandbox_id)

    async def kill(self) -> None:
        """Kill the command's whole process tree, including daemons that left its session. Idempotent."""
        await self.signal(signals.SIGKILL)
