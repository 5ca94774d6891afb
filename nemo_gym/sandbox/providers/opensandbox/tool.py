"""Commands in a box: the helper program there, its requests and output frames, and the transfer of archives."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import posixpath
import re
import signal as signals
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemo_gym._util.tasks import Backoff
from nemo_gym.contract.errors import (
    NemoGymError,
    SandboxArchiveError,
    SandboxArchiveTooLargeError,
    SandboxError,
    SandboxLostError,
)
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecRequest, absolute
from nemo_gym.sandbox.providers.opensandbox.connection import OpenSandboxBox, is_alive, never_started, sdk_errors
from nemo_gym.sandbox.tar_stream import ArchiveError, ArchiveTooLargeError, TarFilter

if TYPE_CHECKING:
    from opensandbox.models.execd import OutputMessage


# -- Frames --------------------------------------------------------------------------------------------------------

STARTED, STDOUT, STDERR, PING, END = "s", "o", "e", "p", "x"
_KINDS = frozenset((STARTED, STDOUT, STDERR, PING, END))
_LONGEST = 1024 * 1024


@dataclass(frozen=True)
class Frame:
    kind: str
    data: bytes


class FrameParser:
    """Reassembles frames. Text that is not a frame is noise from the box (a dynamic linker's warning, say) and is
    dropped. A frame damaged by noise is dropped too; the worst effect is that a command counts as lost."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[Frame]:
        pieces = (self._rest + "".join(text.split())).split(";")
        self._rest = pieces.pop()[-_LONGEST:]
        for piece in pieces:
            if piece and piece[0] in _KINDS:
                try:
                    yield Frame(piece[0], base64.b64decode(piece[1:], validate=True))
                except binascii.Error:
                    continue


# -- Orders --------------------------------------------------------------------------------------------------------

_QUIET_S = 15.0
"""After this much silence, longer than the helper's heartbeat, the server is asked whether the box still runs. A short
`silence_s` lowers it to a third of that option."""
_QUEUED_FRAMES = 64
_TRIES = 4
_LONGEST_ARGUMENT = 60_000
"""Longest base64 request that is passed as an argument. The kernel allows 128 KiB for one argument."""


class ToolRun:
    """The frames of one run of the helper. Call ``begin``, then ``next`` until the `END` frame; always ``close``."""

    def __init__(self, box: OpenSandboxBox, *arguments: str) -> None:
        self._box = box
        self._argv = [box.tool, *arguments]
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._parser = FrameParser()
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0
        self._received_anything = False
        self._ended = False
        self._failure: BaseException | None = None
        self._silence_s = box.connection.config.silence_s
        self._quiet_s = min(_QUIET_S, self._silence_s / 3)

    def begin(self) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run())

    async def next(self) -> Frame:
        """Return the next frame other than a heartbeat.

        Raises:
            SandboxLostError: the helper's end frame will not arrive: the box is gone, the stream ended without the
                frame (whatever the backend reports), or there was no message for too long.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._ended and self._frames.empty():
                raise self._lost_error()
            quiet_s = loop.time() - self._heard
            try:
                async with asyncio.timeout(max(self._quiet_s - quiet_s, 1.0)):
                    frame = await self._frames.get()
            except TimeoutError:
                await self._check_silence(loop.time() - self._heard)
                continue
            if frame is None:
                raise self._lost_error()
            if frame.kind != PING:
                return frame

    def _lost_error(self) -> SandboxLostError:
        why = f": {self._failure}" if self._failure else ""
        return SandboxLostError(
            f"opensandbox: the helper in box {self._box.sandbox_id} ended without an end frame{why}"
        )

    async def _check_silence(self, quiet_s: float) -> None:
        """Raise `SandboxLostError` after too long a silence, or if the box does not run. A paused box, or one whose
        daemon died without closing the connection, is merely silent."""
        if quiet_s < self._quiet_s:
            return
        if quiet_s >= self._silence_s:
            raise SandboxLostError(
                f"opensandbox: box {self._box.sandbox_id} has been silent for {quiet_s:.0f} s; is it paused?"
            )
        try:
            async with asyncio.timeout(5):
                info = await self._box.info()
        except sdk_errors(TimeoutError):
            return
        if not is_alive(info):
            raise SandboxLostError(f"opensandbox: the box {self._box.sandbox_id} does not run any more")

    async def _run(self) -> None:
        try:
            backoff = Backoff(first_s=0.2, factor=3, tries=_TRIES)
            while True:
                try:
                    await self._run_once()
                    return
                except sdk_errors() as error:
                    self._failure = error
                    if self._received_anything or not never_started(error):
                        return
                    if not is_alive(await self._box.info()) or not await backoff.again():
                        return
        except sdk_errors() as error:
            self._failure = error
        finally:
            # Wake a waiting reader. If the queue is full, the reader sees `_ended` once it has read the queued frames.
            self._ended = True
            with contextlib.suppress(asyncio.QueueFull):
                self._frames.put_nowait(None)

    async def _run_once(self) -> None:
        from opensandbox.models.execd import ExecutionHandlers

        async def listen(message: OutputMessage) -> None:
            self._heard = asyncio.get_running_loop().time()
            self._received_anything = True
            for frame in self._parser.feed(message.text):
                await self._frames.put(frame)

        sdk = await self._box.sdk()
        # Set no timeout in the backend: it would kill the helper, which looks like any other kill.
        await sdk.commands.run(self._argv, handlers=ExecutionHandlers(on_stdout=listen, skip_accumulation=True))

    async def close(self) -> None:
        """Stop listening. This does not stop the helper in the box, though a backend may."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._task})

    async def settle(self, timeout_s: float = 1.0) -> None:
        """After the end frame, read the rest of the response, so that its connection can be reused."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        await self.close()


async def run_helper(box: OpenSandboxBox, *arguments: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Run the helper for a task without output, and return the content of its end frame.

    Raises:
        SandboxLostError: see `ToolRun.next`; also raised after ``timeout_s`` seconds.
    """
    running = ToolRun(box, *arguments)
    running.begin()
    try:
        async with asyncio.timeout(timeout_s):
            while (frame := await running.next()).kind != END:
                pass
        await running.settle()
    except TimeoutError as error:
        raise SandboxLostError(f"opensandbox: box {box.sandbox_id} did not answer within {timeout_s:g} s") from error
    finally:
        await running.close()
    return ending(frame)


def ending(frame: Frame) -> dict[str, Any]:
    """Decode the content of an ``END`` frame. Raises `SandboxError` if the content is invalid."""
    try:
        content = json.loads(frame.data)
    except ValueError as error:
        raise SandboxError(f"opensandbox: the helper in the box sent an invalid end frame: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("outcome"), str):
        raise SandboxError("opensandbox: the helper in the box sent an invalid end frame: it has no outcome")
    return content


async def request_argument(box: OpenSandboxBox, request: Mapping[str, Any]) -> str:
    """Encode a request as an argument for the helper. A request that is too long is written to a file in the box."""
    data = json.dumps(request).encode("utf-8", "surrogateescape")
    encoded = base64.b64encode(data).decode()
    if len(encoded) <= _LONGEST_ARGUMENT:
        return encoded
    return "@" + await box.put_file(data, f"{uuid.uuid4().hex}.json")


# -- Archives ------------------------------------------------------------------------------------------------------
# Transfer of files as tar streams.
#
# The helper packs and unpacks, so no program of the box is needed. An archive for the box is first checked here as a
# whole: if a member would leave the target, the archive is refused before any of it is in the box.

_IN_MEMORY_BYTES = 32 * 1024 * 1024


async def put(box: OpenSandboxBox, path: str, tar: AsyncIterator[bytes]) -> None:
    """See `SandboxProvider.put_archive`."""
    path = absolute(path)
    tar_filter = TarFilter()
    # The backend accepts only files of known length, so spool the archive in memory or a local file.
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        try:
            async for chunk in tar:
                await asyncio.to_thread(spool.write, tar_filter.feed(chunk))
            spool.write(tar_filter.finish())
        except ArchiveError as error:
            raise SandboxArchiveError(f"the archive for '{path}' is refused: {error}") from error
        spool.seek(0)
        spooled_path = await box.put_file(spool, f"{uuid.uuid4().hex}.tar")
    argument = await request_argument(box, {"path": path, "tar": spooled_path})
    result = await run_helper(box, "unpack", argument)
    if result["outcome"] == "error":
        raise SandboxArchiveError(f"the archive for '{path}' is refused: {result.get('error')}", path=path)


async def get(
    box: OpenSandboxBox, path: str, *, exclude: Sequence[str], max_bytes: int | None
) -> AsyncGenerator[bytes, None]:
    """See `SandboxProvider.get_archive`."""
    path = absolute(path)
    strip = 0 if posixpath.basename(path) == "" else 1
    try:
        # Filter the box's archive like any backend's: encode its headers anew, and enforce ``max_bytes`` here.
        tar_filter = TarFilter(exclude=exclude, max_bytes=max_bytes, strict=False, strip=strip)
    except ArchiveError as error:
        raise SandboxArchiveError(str(error)) from error
    argument = await request_argument(box, {"path": path, "exclude": list(exclude)})
    running = ToolRun(box, "pack", argument)
    running.begin()
    try:
        while (frame := await running.next()).kind != END:
            if frame.kind == STDOUT and (out := tar_filter.feed(frame.data)):
                yield out
        result = ending(frame)
        if result["outcome"] == "error":
            if result.get("kind") == "missing":
                raise SandboxArchiveError(f"there is nothing at '{path}' in the box", path=path)
            if result.get("kind") == "host":
                message = f"opensandbox: the box's machine failed while '{path}' was packed: {result.get('error')}"
                raise SandboxError(message, path=path, retryable=True)
            raise SandboxArchiveError(f"'{path}' cannot be packed: {result.get('error')}", path=path)
        yield tar_filter.finish()
        await running.settle()
    except ArchiveTooLargeError as error:
        raise SandboxArchiveTooLargeError(f"'{path}' cannot be packed: {error}", max_bytes=max_bytes) from error
    except ArchiveError as error:
        raise SandboxArchiveError(f"'{path}' cannot be packed: {error}") from error
    finally:
        await running.close()


# -- Commands ------------------------------------------------------------------------------------------------------

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
