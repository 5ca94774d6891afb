"""A bad wire between a CLI and the gateway: answers that break off at a byte, and answers that come too late."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection breaks after so many bytes of the answer."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """After so many bytes nothing of the answer comes for so long; then the rest, if somebody still listens."""

    seconds: float
    after_bytes: int = 0


class BadWire:
    """``async with BadWire(port, {3: Cut(100)}) as wire`` relays ``wire.url`` to the gateway, byte for byte, but for
    the answers whose number (from 1, over all connections) is named."""

    def __init__(self, port: int, faults: Mapping[int, Cut | Stall]) -> None:
        self._target = port
        self._faults = dict(faults)
        self.answers = 0
        """Answers begun so far."""
        self.done: list[Cut | Stall] = []
        """Faults that happened."""
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for relay in [*self._relays]:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            upstream, to_upstream = await asyncio.open_connection("127.0.0.1", self._target)
            asking = asyncio.create_task(_copy(reader, to_upstream))
            answering = asyncio.create_task(self._answer(upstream, writer))
            try:
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for half in (asking, answering):
                    half.cancel()
                # Reset, not closed: both sides see what they would see of the other's crash.
                _reset(writer)
                _reset(to_upstream)
                await asyncio.gather(asking, answering, return_exceptions=True)
        except ConnectionError:
            _reset(writer)
        finally:
            self._relays.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault: Cut | Stall | None = None
        given = 0
        while data := await reader.read(65536):
            # An answer begins with a read of its own: the gateway writes it only when its request has come.
            if data.startswith(b"HTTP/1.1 "):
                self.answers += 1
                fault, given = self._faults.get(self.answers), 0
            at = fault.after_bytes - given if fault is not None else len(data)
            given += len(data)
            await _write(writer, data[:at])
            if fault is not None and len(data) >= at:
                self.done.append(fault)
                if isinstance(fault, Cut):
                    return
                await asyncio.sleep(fault.seconds)
                fault = None
                await _write(writer, data[at:])


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and not writer.transport.is_closing():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(data)
        await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
