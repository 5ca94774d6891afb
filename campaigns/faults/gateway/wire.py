"""Requests over bare sockets, which are closed exactly as the caller chooses."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a stream; the JSON of an event never contains these bytes."""
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Leave(StrEnum):
    """How a caller leaves."""

    CLOSE = "close"
    """Close as programs do: the kernel resets the connection if anything is unread, and ends it otherwise."""
    RESET = "reset"
    """Reset the connection at once, whatever was read."""
    HALF = "half"
    """Shut down the sending side, then close: the server sees the end before any reset."""


@dataclass
class Call:
    """One request on a connection of its own."""

    sock: socket.socket
    read: bytes = b""

    @classmethod
    async def send(
        cls, port: int, path: str, body: Any, headers: dict[str, str], *, buffer_bytes: int | None = None
    ) -> Call:
        """``body``: bytes are sent unchanged, other values as JSON. ``buffer_bytes``: the socket's receive buffer."""
        sock = socket.socket()
        sock.setblocking(False)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", port))
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        head = {"Host": "gateway", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        await loop.sock_sendall(sock, "\r\n".join(lines).encode() + data)
        return cls(sock)

    async def read_bytes(self, count: int) -> bytes:
        """Read exactly ``count`` more bytes, or fewer at the end of the response."""
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < count and not _is_whole(self.read + data):
            if not (piece := await loop.sock_recv(self.sock, count - len(data))):
                break
            data += piece
        self.read += data
        return data

    @property
    def is_whole(self) -> bool:
        """Whether the response was read to its last byte."""
        return _is_whole(self.read)

    async def whole(self) -> tuple[int, bytes]:
        """Read the response to its end; return its status and body."""
        while b"\r\n\r\n" not in self.read:
            if not await self.read_bytes(1):
                raise ConnectionError(f"the connection ended in the headers: {self.read!r}")
        head, _, body = self.read.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        status = int(head.split(b" ", 2)[1])
        if (length := headers.get(b"content-length")) is not None:
            body += await self.read_bytes(int(length) - len(body))
            return status, body
        while not body.endswith(b"0\r\n\r\n"):
            piece = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
            if not piece:
                raise ConnectionError("the connection ended in the body")
            self.read += piece
            body += piece
        return status, _unchunked(body)

    def leave(self, how: Leave) -> None:
        if how is Leave.RESET:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how is Leave.HALF:
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    if (length := _LENGTH.search(head)) is not None:
        return len(body) >= int(length[1])
    return answer.endswith(LAST_CHUNK)


def _unchunked(body: bytes) -> bytes:
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        data += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return data
