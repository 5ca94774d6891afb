"""A long body straight from the socket to where it stays: read piece by piece, it would be copied three times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

WORTH_IT_BYTES = 256 << 10


class Filling(asyncio.BufferedProtocol):
    """In place of a transport's protocol, until the body is full or the connection has ended."""

    def __init__(
        self,
        body: bytearray,
        have: int,
        transport: asyncio.Transport,
        heard: Callable[[], None],
        full: Callable[[], None],
    ) -> None:
        """``have`` bytes of ``body`` are there. ``heard`` is called with each piece, ``full`` once, with the earlier
        protocol back in its place."""
        self._view = memoryview(body)
        self._have = have
        self._transport = transport
        self._before = transport.get_protocol()
        self._heard = heard
        self._full = full
        self._take_turns(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._have :]

    def buffer_updated(self, nbytes: int) -> None:
        self._have += nbytes
        self._heard()
        if self._have == len(self._view):
            self._view.release()
            self._take_turns(self._before)
            self._full()

    def eof_received(self) -> None:
        cast("asyncio.Protocol", self._before).eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)

    def _take_turns(self, protocol: asyncio.BaseProtocol) -> None:
        # Reading begins anew: uvloop's transports decide then into what they read.
        self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        self._transport.resume_reading()
