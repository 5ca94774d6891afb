"""HTTP/1.1 for a load generator that must cost less than what it measures: one kept-alive connection, one request at
a time, bytes in and bytes out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

CALL_TIMEOUT_S = 120.0


class WireError(Exception):
    """No complete response arrived, or its status is not 200."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One response."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the parsed body. Raises `WireError` unless the status is 200."""
        if self.status != 200:
            raise WireError(f"HTTP {self.status}: {self.body[:500]!r}")
        return orjson.loads(self.body)


class Connection:
    """A connection to one server. It is made on first use, and again if the server has closed it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._host = parts.netloc
        self._protocol: _Protocol | None = None

    async def post(self, path: str, body: bytes, headers: str = "") -> Reply:
        """``headers``: whole lines."""
        return await self._send("POST", path, body, headers)

    async def get(self, path: str, headers: str = "") -> Reply:
        return await self._send("GET", path, b"", headers)

    async def _send(self, method: str, path: str, body: bytes, headers: str) -> Reply:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        if self._protocol is None or self._protocol.closed:
            _, self._protocol = await asyncio.get_running_loop().create_connection(_Protocol, *self._address)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await self._protocol.exchange(head.encode() + body)

    def close(self) -> None:
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.close()


class _Protocol(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._reply: asyncio.Future[Reply] | None = None
        self._start()

    def _start(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._head: bytes | None = None
        self._status = 0
        self._length: int | None = None
        self._begin = 0

    async def exchange(self, data: bytes) -> Reply:
        assert self.transport is not None
        self._start()
        self._reply = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._head is None:
            joined = b"".join(self._parts)
            self._parts = [joined]
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(joined[:end], end + 4)
        if self._length is not None:
            if self._size >= self._begin + self._length:
                whole = b"".join(self._parts)
                self._done(whole[self._begin : self._begin + self._length])
        elif b"".join(self._parts[-2:]).endswith(b"0\r\n\r\n"):
            self._done(_unchunked(b"".join(self._parts)[self._begin :]))

    def _read_head(self, head: bytes, begin: int) -> None:
        lines = head.split(b"\r\n")
        self._head, self._begin = head, begin
        self._status = int(lines[0].split(b" ", 2)[1])
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._length = int(value)

    def _done(self, body: bytes) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(Reply(self._status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(WireError(f"the connection ended before the answer did ({exc})"))


def _unchunked(data: bytes) -> bytes:
    found: list[bytes] = []
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(found)
        found.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
