"""What a client and its supervisor exchange: JSON objects with file descriptors, and pipes. Standard library only.

A SOCK_SEQPACKET socket keeps message boundaries and delivers descriptors with the message they belong to. A message
too large for one packet travels in a memory file whose descriptor comes last.
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from nemo_gym._util.files import write_all

PROTOCOL_VERSION = 1
_INLINE_BYTES = 32 * 1024
_MAX_FDS = 64
_CHUNK_BYTES = 256 * 1024
_IN_PACKET, _IN_FILE = b"P", b"F"

BASE_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""Environment of a box's commands, unless the image or the spec sets other values."""

Message = dict[str, Any]


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; ignore those that are already closed."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def memory_file(data: bytes, name: str) -> int:
    """Create an anonymous file in memory that contains ``data``; return its descriptor, positioned at the start."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        write_all(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


async def readable(descriptor: int) -> None:
    """Wait until a descriptor has data or is at its end."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_reader, loop.remove_reader, descriptor)


async def _ready(add: Any, remove: Any, descriptor: int) -> None:
    ready = asyncio.get_running_loop().create_future()
    add(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(descriptor)


async def read_stream(descriptor: int) -> AsyncGenerator[bytes, None]:
    """Yield what comes through a pipe, and close it."""
    os.set_blocking(descriptor, False)
    try:
        while True:
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                await readable(descriptor)
                continue
            if not chunk:
                return
            yield chunk
    finally:
        os.close(descriptor)


async def write_stream(descriptor: int, chunks: AsyncIterator[bytes]) -> None:
    """Write a stream into a pipe and close it. A reader that is gone is no error here: it has reported the cause."""
    os.set_blocking(descriptor, False)
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


class Connection:
    """One end of the connection on an asyncio loop. It takes ownership of descriptors passed to `send`."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[Message, list[int]], object],
        on_close: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_message = on_message
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._outgoing: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue one message. On a closed connection, drop the message and close its descriptors."""
        owned = list(descriptors)
        if self.closed:
            close_all(owned)
            return
        body = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
        if len(body) <= _INLINE_BYTES:
            packet = _IN_PACKET + body
        else:
            packet = _IN_FILE
            owned.append(memory_file(body, "message"))
        self._outgoing.append((packet, owned))
        if len(self._outgoing) == 1:
            self._writable()

    def close(self) -> None:
        """Close the connection; idempotent. ``on_close`` is called once, whichever side closed it."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        while self._outgoing:
            close_all(self._outgoing.popleft()[1])
        self._on_close()

    def _writable(self) -> None:
        while self._outgoing:
            packet, descriptors = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._socket.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return
            except OSError:
                self.close()
                return
            self._outgoing.popleft()
            close_all(descriptors)
        self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                2 * _INLINE_BYTES, socket.CMSG_LEN(_MAX_FDS * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet, ancillary = b"", []
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        received = list(descriptors)
        if not packet:
            close_all(received)
            self.close()
            return
        body = packet[1:]
        if packet[:1] == _IN_FILE:
            with open(received.pop(), "rb") as file:  # noqa: PTH123 - a descriptor, not a path
                body = file.read()
        self._on_message(json.loads(body.decode("utf-8", "surrogatepass")), received)
