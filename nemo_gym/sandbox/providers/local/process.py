"""A command in a local box, as its client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput
from nemo_gym.sandbox.providers.local.protocol import Message

if TYPE_CHECKING:
    from nemo_gym.sandbox.providers.local.client import SupervisorClient


# -- Pipes ---------------------------------------------------------------------------------------------------------

_CHUNK_BYTES = 256 * 1024


async def write_stream(descriptor: int, chunks: AsyncIterator[bytes]) -> None:
    """Write a stream into a pipe and close it. When nobody reads any more, the reader has said why."""
    loop = asyncio.get_running_loop()
    try:
        async for chunk in chunks:
            view = memoryview(chunk)
            while view:
                try:
                    view = view[os.write(descriptor, view) :]
                except BlockingIOError:
                    await _ready(loop.add_writer, loop.remove_writer, descriptor)
                except BrokenPipeError:
                    return
    finally:
        os.close(descriptor)


async def read_stream(descriptor: int) -> AsyncGenerator[bytes, None]:
    os.set_blocking(descriptor, False)
    loop = asyncio.get_running_loop()
    try:
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                await _ready(loop.add_reader, loop.remove_reader, descriptor)
                continue
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)


async def _ready(add: Any, remove: Any, descriptor: int) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


# -- Process -------------------------------------------------------------------------------------------------------

_READ_BYTES = 256 * 1024
_QUEUED_BYTES = 4 * 1024 * 1024
_PIPE_BYTES = 256 * 1024


class LocalProcess:
    """A running command (`nemo_gym.sandbox.base.ExecProcess`). The pipes reach from the command straight to here."""

    def __init__(self, client: SupervisorClient, box_id: str, exec_id: str, *, max_output_bytes: int) -> None:
        self.exec_id = exec_id
        self.truncated: set[str] = set()
        """Streams of which more than ``max_output_bytes`` were written."""
        self._client = client
        self._box_id = box_id
        self._left = {"stdout": max_output_bytes, "stderr": max_output_bytes}
        self._streams: dict[Literal["stdout", "stderr"], int] = {}
        self._queue: deque[ExecOutput] = deque()
        self._queued_bytes = 0
        self._paused: set[Literal["stdout", "stderr"]] = set()
        self._end: ExecEnd | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def add_stream(self, name: Literal["stdout", "stderr"], descriptor: int) -> None:
        """Read a stream from a pipe, which is this object's from then on."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # there is a limit on the pipe memory of a user
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._streams[name] = descriptor
        self._loop.add_reader(descriptor, self._readable, name)

    def ended(self, message: Message | None) -> None:
        """Take the supervisor's word on how it ended; ``None`` when the supervisor is gone."""
        if self._end is not None:
            return
        for name in list(self._streams):
            self._read_what_is_there(name)
        if message is None:
            self._end = ExecEnd(ExecOutcome.LOST)
        else:
            self._end = ExecEnd(
                ExecOutcome(message["outcome"]),
                return_code=message.get("return_code"),
                signal=message.get("signal"),
                duration_s=float(message.get("duration_s", 0.0)),
            )
        for name in list(self._streams):
            self._hand_to_drain(name)
        self._wake.set()

    async def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]:
        """Output in the order it came, then the end. Whoever stops listening early kills the command."""
        try:
            while True:
                while self._queue:
                    output = self._queue.popleft()
                    self._queued_bytes -= len(output.data)
                    self._resume()
                    yield output
                if self._end is not None:
                    yield self._end
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            if self._end is None:
                self.abandon()

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        if self._end is None:
            await self._client.request(
                {"op": "signal", "box": self._box_id, "exec": self.exec_id, "signal": int(number)}
            )

    async def kill(self) -> None:
        """Kill the whole process tree; idempotent."""
        await self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Kill it without waiting, and listen no more."""
        if self._end is None:
            self._client.notify(
                {"op": "signal", "box": self._box_id, "exec": self.exec_id, "signal": int(signal.SIGKILL)}
            )
        self._client.forget_end(self.exec_id)
        for name in list(self._streams):
            self._close_stream(name)
        self._end = self._end or ExecEnd(ExecOutcome.LOST)

    def _readable(self, name: Literal["stdout", "stderr"]) -> None:
        self._read_once(name)
        if self._queued_bytes > _QUEUED_BYTES and name in self._streams:
            self._loop.remove_reader(self._streams[name])
            self._paused.add(name)

    def _resume(self) -> None:
        if self._paused and self._queued_bytes < _QUEUED_BYTES // 2:
            for name in self._paused & self._streams.keys():
                self._loop.add_reader(self._streams[name], self._readable, name)
            self._paused.clear()

    def _read_once(self, name: Literal["stdout", "stderr"]) -> bool:
        """Take what one read gives; whether there may be more."""
        try:
            data = os.read(self._streams[name], _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_stream(name)
            return False
        kept = data[: self._left[name]]
        self._left[name] -= len(kept)
        if len(kept) < len(data):
            self.truncated.add(name)
        if kept:
            self._queue.append(ExecOutput(name, kept))
            self._queued_bytes += len(kept)
            self._wake.set()
        return True

    def _read_what_is_there(self, name: Literal["stdout", "stderr"]) -> None:
        """All that the command wrote is in the pipe when it has ended. A pipe that something left behind fills as fast
        as we read gives up to what a pipe holds, twice over."""
        for _ in range(2 * _PIPE_BYTES // 4096):
            if name not in self._streams or not self._read_once(name):
                return

    def _hand_to_drain(self, name: Literal["stdout", "stderr"]) -> None:
        """The command is over, but something it left in the background still has the pipe: keep reading to nowhere,
        so that it neither blocks nor is killed by writing."""
        descriptor = self._streams.pop(name)
        self._loop.remove_reader(descriptor)
        loop = self._loop

        def drain() -> None:
            try:
                if os.read(descriptor, _READ_BYTES):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            loop.remove_reader(descriptor)
            os.close(descriptor)

        loop.add_reader(descriptor, drain)

    def _close_stream(self, name: Literal["stdout", "stderr"]) -> None:
        descriptor = self._streams.pop(name)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
