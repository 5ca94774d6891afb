"""The helper program in a box: its orders, its frames, and archives in and out."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import posixpath
import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_gym._util.tasks import Backoff
from nemo_gym.contract.errors import SandboxArchiveError, SandboxArchiveTooLargeError, SandboxError, SandboxLostError
from nemo_gym.sandbox.base import absolute
from nemo_gym.sandbox.providers.opensandbox.connection import (
    Connection,
    OpenSandboxBox,
    never_started,
    sdk_errors,
    translate,
)
from nemo_gym.sandbox.tar_stream import ArchiveError, ArchiveTooLargeError, TarFilter

if TYPE_CHECKING:
    from opensandbox.models.execd import OutputMessage
    from opensandbox.sandbox import Sandbox


# -- Frames --------------------------------------------------------------------------------------------------------

STARTED, STDOUT, STDERR, PING, END = "s", "o", "e", "p", "x"
_KINDS = frozenset((STARTED, STDOUT, STDERR, PING, END))
_LONGEST = 1024 * 1024


@dataclass(frozen=True)
class Frame:
    kind: str
    data: bytes

    def ending(self) -> dict[str, Any]:
        """The content of an ``END`` frame. Raises `ValueError` when it is none."""
        found = json.loads(self.data)
        if not isinstance(found, dict) or not isinstance(found.get("outcome"), str):
            raise ValueError("an end without an outcome")  # noqa: TRY004  the text's fault, not its caller's
        return found


class FrameParser:
    """Puts frames together again. What is no frame is noise of the box's (a dynamic linker's warning, say): dropped,
    and a frame it damaged is missing, which only ever makes a command lost."""

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
"""Longer than the helper's heartbeat: then the server is asked whether the box still runs (earlier, where less silence
than this is allowed at all)."""
_QUEUED_FRAMES = 64
_TRIES = 4
_LONGEST_ARGUMENT = 60_000
"""Of a request in base64; the kernel allows 128 KiB for one argument."""
_ATTACH_S = 30.0
_ALIVE = frozenset(("pending", "running", "pausing", "paused", "resuming"))


async def sdk_of(connection: Connection, box: OpenSandboxBox, *, timeout_s: float = _ATTACH_S) -> Sandbox:
    """The SDK's object of a box, for the event loop that runs."""
    loop = asyncio.get_running_loop()
    if box.sdk is None or box.loop is not loop:
        box.sdk, box.loop = await connection.attach(box.sandbox_id, timeout_s=timeout_s), loop
    return box.sdk


async def put_file(connection: Connection, box: OpenSandboxBox, data: Any, name: str) -> str:
    """Write bytes, or what an open binary file holds, where the helper program reads it; its path in the box.

    ``name`` may be a whole path, of a directory that the helper told of.

    Raises:
        SandboxLostError: the box is gone, or cannot be reached.
    """
    path = name if name.startswith("/") else box.incoming(name)
    try:
        sdk = await sdk_of(connection, box)
        await sdk.files.write_file(path, data, mode=600)
    except sdk_errors() as error:
        await _raise_lost(connection, box, error)
        raise translate(error, f"writing a file into box {box.sandbox_id}") from error
    return path


async def _raise_lost(connection: Connection, box: OpenSandboxBox, error: BaseException) -> None:
    """Raise `SandboxLostError` unless the server says that the box runs as it should."""
    try:
        info = await connection.info(box.sandbox_id)
    except sdk_errors() as asked:
        raise SandboxLostError(f"opensandbox: nothing is known of box {box.sandbox_id}: {asked}") from error
    if info is None or info.status.state.lower() not in _ALIVE:
        state = "gone" if info is None else f"{info.status.state} ({info.status.message or info.status.reason})"
        raise SandboxLostError(f"opensandbox: the box {box.sandbox_id} is {state}") from error


class ToolRun:
    """What one run of the helper says. ``begin`` first, then ``next`` until its `END`, and ``close`` always."""

    def __init__(self, connection: Connection, box: OpenSandboxBox, *arguments: str) -> None:
        self._connection = connection
        self._box = box
        self._argv = [box.tool, *arguments]
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(_QUEUED_FRAMES)
        self._parser = FrameParser()
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0
        self._said_anything = False
        self._ended = False
        self._failure: BaseException | None = None
        self._quiet_s = min(_QUIET_S, connection.config.silence_s / 3)

    def begin(self) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run())

    async def next(self) -> Frame:
        """The next frame, heartbeats left out.

        Raises:
            SandboxLostError: the helper's end was not heard, and will not be: the box is gone, the stream ended
                without it (whatever the backend takes that for), or there was silence for too long.
        """
        loop = asyncio.get_running_loop()
        while True:
            if self._ended and self._frames.empty():
                raise self._lost()
            quiet_s = loop.time() - self._heard
            try:
                async with asyncio.timeout(max(self._quiet_s - quiet_s, 1.0)):
                    frame = await self._frames.get()
            except TimeoutError:
                await self._check_silence(loop.time() - self._heard)
                continue
            if frame is None:
                raise self._lost()
            if frame.kind != PING:
                return frame

    def _lost(self) -> SandboxLostError:
        why = f": {self._failure}" if self._failure else ""
        return SandboxLostError(f"opensandbox: what ran in box {self._box.sandbox_id} ended without its end{why}")

    async def _check_silence(self, quiet_s: float) -> None:
        """A box that is paused, and one whose daemon died without its connection ending, just say nothing."""
        if quiet_s < self._quiet_s:
            return
        if quiet_s >= self._connection.config.silence_s:
            raise SandboxLostError(
                f"opensandbox: box {self._box.sandbox_id} has been silent for {quiet_s:.0f} s; is it paused?"
            )
        try:
            async with asyncio.timeout(5):
                info = await self._connection.info(self._box.sandbox_id)
        except sdk_errors(TimeoutError):
            return
        if info is None or info.status.state.lower() not in _ALIVE:
            raise SandboxLostError(f"opensandbox: the box {self._box.sandbox_id} does not run any more")

    async def _run(self) -> None:
        try:
            backoff = Backoff(first_s=0.2, factor=3, tries=_TRIES)
            while True:
                try:
                    await self._once()
                    return
                except sdk_errors() as error:
                    self._failure = error
                    if self._said_anything or not never_started(error):
                        return
                    info = await self._connection.info(self._box.sandbox_id)
                    if info is None or info.status.state.lower() not in _ALIVE:
                        return
                    if not await backoff.again():
                        return
        except sdk_errors() as error:
            self._failure = error
        finally:
            # A reader that waits must hear of the end; one that is slow finds it when it has read the rest.
            self._ended = True
            with contextlib.suppress(asyncio.QueueFull):
                self._frames.put_nowait(None)

    async def _once(self) -> None:
        from opensandbox.models.execd import ExecutionHandlers

        async def listen(message: OutputMessage) -> None:
            self._heard = asyncio.get_running_loop().time()
            self._said_anything = True
            for frame in self._parser.feed(message.text):
                await self._frames.put(frame)

        sdk = await sdk_of(self._connection, self._box)
        # No timeout of the backend's: it would kill the helper, and look like a kill by anybody.
        await sdk.commands.run(self._argv, handlers=ExecutionHandlers(on_stdout=listen, skip_accumulation=True))

    async def close(self) -> None:
        """Stop listening. What runs in the box is not stopped by this (though a backend may)."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({self._task})

    async def settle(self, timeout_s: float = 1.0) -> None:
        """After the end frame: read the rest of the answer, so that its connection can be used again."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        await self.close()


async def run_helper(
    connection: Connection, box: OpenSandboxBox, *arguments: str, timeout_s: float | None = None
) -> dict[str, Any]:
    """Run the helper for something that has no output, to its end.

    Raises:
        SandboxLostError: see `ToolRun.next`; also after ``timeout_s`` seconds.
    """
    running = ToolRun(connection, box, *arguments)
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
    try:
        return frame.ending()
    except ValueError as error:
        raise SandboxError(f"opensandbox: the helper in the box said nonsense: {error}") from error


async def request_argument(connection: Connection, box: OpenSandboxBox, request: Mapping[str, Any]) -> str:
    """A request as the helper takes it: in its arguments, or where it is too long for them in a file."""
    data = json.dumps(request).encode("utf-8", "surrogateescape")
    encoded = base64.b64encode(data).decode()
    if len(encoded) <= _LONGEST_ARGUMENT:
        return encoded
    return "@" + await put_file(connection, box, data, f"{uuid.uuid4().hex}.json")


# -- Archives ------------------------------------------------------------------------------------------------------
# Trees in and out of a box as tar streams.
#
# Packing and unpacking are the helper program's, so no program of the box is needed. What goes in is judged here
# first, whole: a member that would leave its target is refused before anything of the archive is in the box.

_IN_MEMORY_BYTES = 32 * 1024 * 1024


async def put(connection: Connection, box: OpenSandboxBox, path: str, tar: AsyncIterator[bytes]) -> None:
    """See `SandboxProvider.put_archive`."""
    path = absolute(path)
    through = TarFilter()
    # The backend takes files of a known length only; what does not fit in memory waits in a file of this machine.
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        try:
            async for chunk in tar:
                await asyncio.to_thread(spool.write, through.feed(chunk))
            spool.write(through.finish())
        except ArchiveError as error:
            raise SandboxArchiveError(f"the archive for '{path}' is refused: {error}") from error
        spool.seek(0)
        inside = await put_file(connection, box, spool, f"{uuid.uuid4().hex}.tar")
    argument = await request_argument(connection, box, {"path": path, "tar": inside})
    found = await run_helper(connection, box, "unpack", argument)
    if found["outcome"] == "error":
        raise SandboxArchiveError(f"the archive for '{path}' is refused: {found.get('error')}", path=path)


async def get(
    connection: Connection, box: OpenSandboxBox, path: str, *, exclude: Sequence[str], max_bytes: int | None
) -> AsyncGenerator[bytes, None]:
    """See `SandboxProvider.get_archive`."""
    path = absolute(path)
    strip = 0 if posixpath.basename(path) == "" else 1
    try:
        # What the box sends is filtered like what any backend packs: headers are encoded anew, the cap is kept here.
        through = TarFilter(exclude=exclude, max_bytes=max_bytes, strict=False, strip=strip)
    except ArchiveError as error:
        raise SandboxArchiveError(str(error)) from error
    argument = await request_argument(connection, box, {"path": path, "exclude": list(exclude)})
    running = ToolRun(connection, box, "pack", argument)
    running.begin()
    try:
        while (frame := await running.next()).kind != END:
            if frame.kind == STDOUT and (out := through.feed(frame.data)):
                yield out
        found = ending(frame)
        if found["outcome"] == "error":
            if found.get("kind") == "missing":
                raise SandboxArchiveError(f"there is nothing at '{path}' in the box", path=path)
            raise SandboxArchiveError(f"'{path}' cannot be packed: {found.get('error')}", path=path)
        yield through.finish()
        await running.settle()
    except ArchiveTooLargeError as error:
        raise SandboxArchiveTooLargeError(f"'{path}' cannot be packed: {error}", max_bytes=max_bytes) from error
    except ArchiveError as error:
        raise SandboxArchiveError(f"'{path}' cannot be packed: {error}") from error
    finally:
        await running.close()
