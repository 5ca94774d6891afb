"""The outside end of a relay: messages to and from the helper program that listens on a port in a box.

What the box's clients send comes as output of the helper; what is for them goes into the box as numbered files, each
with all messages that came together while the one before was on its way. A file may be sent again: the helper takes
each number once. See ``boxtool/relay.go``.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import uuid
from dataclasses import dataclass

from nemo_gym._util.backoff import Backoff
from nemo_gym.contract.errors import SandboxError, SandboxLostError
from nemo_gym.sandbox.providers.opensandbox.box import OpenSandboxBox
from nemo_gym.sandbox.providers.opensandbox.connection import Connection
from nemo_gym.sandbox.providers.opensandbox.frames import END, STARTED, STDOUT
from nemo_gym.sandbox.providers.opensandbox.tool import ToolRun, ending, put_file

OPEN, DATA, FINISH, RESET, CREDIT, QUIT, _DONE = b"c", b"d", b"f", b"r", b"w", b"q", b"z"
WINDOW_BYTES = 1024 * 1024
"""That may be on their way in one direction of a connection."""
ANY = "-"
"""Instead of the id of an earlier relay: any that holds the port."""
_IN_FRAME, _IN_FILE, _COUNT = struct.Struct(">cI"), struct.Struct(">cII"), struct.Struct(">I")
_SENDS = 5
_QUIT_S = 5.0


class PortTakenError(SandboxError):
    """Something else listens on the port, in the box."""


@dataclass(frozen=True)
class Message:
    kind: bytes
    number: int
    """Of the connection."""
    data: bytes = b""

    @property
    def credit(self) -> int:
        return int(_COUNT.unpack(self.data)[0]) if len(self.data) == _COUNT.size else 0


class Relay:
    """One run of the helper as a relay. `start` first, then `next` until it raises, and `aclose` always.

    Args:
        port: where it listens, on the box's 127.0.0.1.
    """

    def __init__(self, connection: Connection, box: OpenSandboxBox, port: int) -> None:
        self.id = uuid.uuid4().hex[:16]
        self._connection = connection
        self._box = box
        self._port = port
        self._running: ToolRun | None = None
        self._inbox = ""
        self._waiting = bytearray()
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def start(self, previous: str) -> None:
        """Listen. Takes the port from an earlier relay with the id ``previous``, for `ANY` from any.

        Raises:
            PortTakenError: by something that is not such a relay.
            SandboxLostError: the box does not answer.
        """
        self._running = ToolRun(self._connection, self._box, "relay", str(self._port), self.id, previous)
        self._running.begin()
        frame = await self._running.next()
        if frame.kind == END:
            found = ending(frame)
            raised = PortTakenError if found.get("kind") == "port" else SandboxLostError
            raise raised(f"opensandbox: port {self._port} of the box: {found.get('error')}")
        if frame.kind != STARTED:
            raise SandboxLostError(f"opensandbox: what listens on port {self._port} of the box began with nonsense")
        self._inbox = frame.data.decode("utf-8", "surrogateescape")
        self._sender = asyncio.create_task(self._send())

    async def next(self) -> Message:
        """The next message. Raises `SandboxLostError` when there will be no more."""
        assert self._running is not None, "start() comes first"
        while True:
            frame = await self._running.next()
            if frame.kind == END:
                raise SandboxLostError(f"opensandbox: what listened on port {self._port} of the box has ended")
            if frame.kind == STDOUT and len(frame.data) >= _IN_FRAME.size:
                kind, number = _IN_FRAME.unpack_from(frame.data)
                return Message(kind, number, frame.data[_IN_FRAME.size :])

    def send(self, kind: bytes, number: int, data: bytes = b"") -> None:
        """Send soon, after everything before it."""
        self._waiting += _IN_FILE.pack(kind, number, len(data)) + data
        self._wake.set()

    def send_credit(self, number: int, count: int) -> None:
        self.send(CREDIT, number, _COUNT.pack(count))

    async def _send(self) -> None:
        file = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._waiting:
                continue
            file += 1
            data = bytes(self._waiting) + _IN_FILE.pack(_DONE, 0, 0)
            self._waiting.clear()
            try:
                await self._put(f"{self._inbox}/{file}", data)
            except SandboxError:
                # Of no use without it; whoever waits for the next message hears of the end.
                if self._running is not None:
                    await self._running.close()
                return

    async def _put(self, name: str, data: bytes) -> None:
        backoff = Backoff(first_s=0.1, factor=3, tries=_SENDS)
        while True:
            try:
                await put_file(self._connection, self._box, data, name)
                return
            except SandboxLostError:
                raise
            except SandboxError:
                if not await backoff.again():
                    raise

    async def aclose(self, *, quits: bool) -> None:
        """Stop. With ``quits`` the helper is told and heard to the end, so that its port is free; else it is left to
        find out that nobody listens to it."""
        if quits and self._sender is not None and not self._sender.done():
            self.send(QUIT, 0)
            # A box that does not answer keeps its port; it has nobody to talk to there.
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_QUIT_S):
                    while True:
                        await self.next()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})
        if self._running is not None:
            await self._running.close()
