"""A connection on which the head of a reply leaves together with the body behind it.

The web server writes the two one after the other, and each write wakes the reader at the other end, which can do
nothing with a head alone: for small replies that costs more than making them.
"""

from __future__ import annotations

import asyncio
from typing import Any

_HEAD, _HEAD_END = b"HTTP/1.", b"\r\n\r\n"
_JOINED_BYTES = 64 * 1024
"""Copying more costs more than a second write."""


class JoinedWrites:
    """An ``asyncio.Transport`` around another. A reply's head waits for the next write, at most until the event loop's
    next turn: a stream whose first piece is still to come begins at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes | memoryview) -> None:
        if self._held and len(data) <= _JOINED_BYTES:
            held, self._held = self._held, b""
            self._transport.write(b"".join((held, data)))
        elif self._held or isinstance(data, memoryview):
            self._flush()
            self._transport.write(data)
        elif data.startswith(_HEAD) and data.endswith(_HEAD_END):
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._held = b""
        self._transport.abort()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
