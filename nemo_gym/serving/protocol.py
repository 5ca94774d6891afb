"""The web server's HTTP protocol: replies in one write, and word of how each connection ended."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nemo_gym.gateway.delivery import DELIVERIES
from nemo_gym.serving.joined_writes import JoinedWrites


class WatchedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, telling `DELIVERIES` how connections end: ``uvicorn.Config(app, http=...)``."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)  # type: ignore[assignment]
        DELIVERIES.began(self.client, partial(_unwritten, transport))

    def eof_received(self) -> None:
        # What is written from here on goes nowhere, and nobody is told.
        DELIVERIES.ended(self.client, reset=_untaken(self.transport) > 0)
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        DELIVERIES.ended(self.client, reset=exc is not None or _untaken(self.transport) > 0)
        super().connection_lost(exc)


def _unwritten(transport: asyncio.Transport) -> int:
    """Bytes that may not be the kernel's yet. Below TLS lies a buffer that nobody can ask for its size: there, nothing
    has left before the other end's kernel has taken what it was sent."""
    size = transport.get_write_buffer_size()
    return size if transport.get_extra_info("sslcontext") is None else size + _untaken(transport)


def _untaken(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that were written and that the other end's kernel has not acknowledged. A client that leaves before they
    come ends its connection in order: the reset comes behind its end, and nobody reads that far."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    try:
        waiting = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4) if sock is not None else b"\0" * 4
    except (OSError, ValueError):  # no socket of the kernel's any more
        return 0
    return int.from_bytes(waiting, sys.byteorder)
