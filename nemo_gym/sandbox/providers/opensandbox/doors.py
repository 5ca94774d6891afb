"""Loopback doors of boxes that this host cannot enter. A relay in the box forwards their connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import structlog

from nemo_gym._util.tasks import Backoff
from nemo_gym.contract.errors import SandboxError, SandboxLostError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.door_statistics import DoorStatistics
from nemo_gym.sandbox.doors import DoorServer, door_server
from nemo_gym.sandbox.egress import EgressProxy
from nemo_gym.sandbox.providers.opensandbox.connection import OpenSandboxBox, has_ended, sdk_errors
from nemo_gym.sandbox.providers.opensandbox.tool import END, STARTED, STDOUT, ToolRun, ending

# -- Relay ---------------------------------------------------------------------------------------------------------
# The outside end of a relay: messages to and from the helper program that listens on a port in a box.
#
# Data from the box's clients arrives as output of the helper. Data for them is written into the box as numbered files;
# each file contains all messages that accumulated while the previous file was being written. A file may be sent again,
# because the helper processes each number once. See ``boxtool/nemo_gym_boxtool/source/relay.go``.

OPEN, DATA, FINISH, RESET, CREDIT, QUIT, _DONE = b"c", b"d", b"f", b"r", b"w", b"q", b"z"
WINDOW_BYTES = 1024 * 1024
"""Maximum bytes in transit in one direction of a connection."""
ANY = "-"
"""Stands for the id of any earlier relay that holds the port."""
_IN_FRAME, _IN_FILE, _COUNT = struct.Struct(">cI"), struct.Struct(">cII"), struct.Struct(">I")
_SENDS = 5
_QUIT_S = 5.0


class PortTakenError(SandboxError):
    """Another program listens on the port in the box."""


@dataclass(frozen=True)
class Message:
    kind: bytes
    number: int
    """Number of the connection."""
    data: bytes = b""


class Relay:
    """One run of the helper as a relay. Call `start`, then `next` until it raises, and always `aclose`.

    Args:
        port: the port on the box's 127.0.0.1 where the relay listens.
    """

    def __init__(self, box: OpenSandboxBox, port: int) -> None:
        self.id = uuid.uuid4().hex[:16]
        self._box = box
        self._port = port
        self._running: ToolRun | None = None
        self._inbox = ""
        self._outgoing = bytearray()
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def start(self, previous: str) -> None:
        """Listen. Takes over the port from an earlier relay with the id ``previous`` (`ANY`: from any relay).

        Raises:
            PortTakenError: the port is in use, and not by such a relay.
            SandboxLostError: the box does not respond.
        """
        self._running = ToolRun(self._box, "relay", str(self._port), self.id, previous)
        self._running.begin()
        frame = await self._running.next()
        if frame.kind == END:
            result = ending(frame)
            error_type = PortTakenError if result.get("kind") == "port" else SandboxLostError
            raise error_type(f"opensandbox: port {self._port} of the box: {result.get('error')}")
        if frame.kind != STARTED:
            raise SandboxLostError(
                f"opensandbox: the relay on port {self._port} of the box did not start with a valid frame"
            )
        self._inbox = frame.data.decode("utf-8", "surrogateescape")
        self._sender = asyncio.create_task(self._send())

    async def next(self) -> Message:
        """Return the next message. Raises `SandboxLostError` if there will be no more."""
        assert self._running is not None, "start() comes first"
        while True:
            frame = await self._running.next()
            if frame.kind == END:
                raise SandboxLostError(f"opensandbox: the relay on port {self._port} of the box has ended")
            if frame.kind == STDOUT and len(frame.data) >= _IN_FRAME.size:
                kind, number = _IN_FRAME.unpack_from(frame.data)
                return Message(kind, number, frame.data[_IN_FRAME.size :])

    def send(self, kind: bytes, number: int, data: bytes = b"") -> None:
        """Queue a message. Messages are sent in order."""
        self._outgoing += _IN_FILE.pack(kind, number, len(data)) + data
        self._wake.set()

    async def _send(self) -> None:
        file = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._outgoing:
                continue
            file += 1
            data = bytes(self._outgoing) + _IN_FILE.pack(_DONE, 0, 0)
            self._outgoing.clear()
            try:
                await self._put(f"{self._inbox}/{file}", data)
            except SandboxError:
                # Without this file the relay is useless. Close it, so that `next` raises.
                if self._running is not None:
                    await self._running.close()
                return

    async def _put(self, name: str, data: bytes) -> None:
        backoff = Backoff(first_s=0.1, factor=3, tries=_SENDS)
        while True:
            try:
                await self._box.put_file(data, name)
                return
            except SandboxLostError:
                raise
            except SandboxError:
                if not await backoff.again():
                    raise

    async def aclose(self, *, quits: bool) -> None:
        """Stop. With ``quits``, tell the helper to quit and wait for its end, so that its port is free. Otherwise the
        helper notices later that it has no reader."""
        if quits and self._sender is not None and not self._sender.done():
            self.send(QUIT, 0)
            # If the box does not respond, its relay keeps the port, but nobody serves its connections.
            with contextlib.suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_QUIT_S):
                    while True:
                        await self.next()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})
        if self._running is not None:
            await self._running.close()


# -- Doors ---------------------------------------------------------------------------------------------------------
# A door of a box whose network namespace cannot be entered: a relay in the box, and the door's server in this process.
#
# The server is the same as for other providers, on a socket that only this process can reach. The relay's connections
# from processes of the box are forwarded to the server byte for byte.

log = structlog.get_logger(__name__)

_CHUNK = 64 * 1024
_LONGEST_PAUSE_S = 5.0


class RelayedDoor:
    """One door of one box, open from `start` to `aclose`, or until its box is gone.

    If the connection to the relay breaks, another relay is started on the same port, and the box's open connections
    break. So no request is ever sent to the target twice.
    """

    def __init__(self, box: OpenSandboxBox, door: Door) -> None:
        self.box, self.door = box, door
        self.loop = asyncio.get_running_loop()
        self._socket_fd = -1
        self._relay: Relay | None = None
        self._server: DoorServer | EgressProxy | None = None
        self._streams: dict[int, _Stream] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def statistics(self) -> DoorStatistics:
        return self._server.statistics if self._server is not None else DoorStatistics()

    async def start(self) -> None:
        """Open the door. If that fails, nothing is left of it.

        Raises:
            ConfigError: the door's target or patterns are invalid.
            PortTakenError: another program in the box listens on the port.
            SandboxLostError: the box does not respond.
        """
        try:
            self._server = door_server(self.door, self._listener())
            await self._server.start()
            self._relay = await self._begin(ANY)
        except BaseException:
            await self.aclose(quits=False)
            raise
        self._task = asyncio.create_task(self._serve())

    def _listener(self) -> socket.socket:
        """A socket that is reached through a descriptor of this process: a path would stay if it is killed."""
        listener = socket.socket(socket.AF_UNIX)
        with tempfile.TemporaryDirectory(prefix="nemo-gym-door-") as directory:
            listener.bind(f"{directory}/door")
            self._socket_fd = os.open(f"{directory}/door", os.O_PATH | os.O_CLOEXEC)
        return listener

    async def _begin(self, previous: str) -> Relay:
        relay = Relay(self.box, self.door.port)
        try:
            await relay.start(previous)
        except BaseException:
            await relay.aclose(quits=False)
            raise
        return relay

    async def _serve(self) -> None:
        """Forward connections until the box is gone, and start a new relay whenever one breaks."""
        while self._relay is not None:
            relay = self._relay
            try:
                while True:
                    self._handle(relay, await relay.next())
            except SandboxLostError as error:
                log.debug("opensandbox_relay_lost", box=self.box.sandbox_id, door=self.door.name, error=str(error))
            await self._drop_streams()
            await relay.aclose(quits=False)
            self._relay = await self._restart_relay(relay.id)
        await self._end()

    def _handle(self, relay: Relay, message: Message) -> None:
        """Handle a message from the untrusted box: ignore unknown connections, break one that exceeds its window."""
        if message.kind == OPEN:
            if message.number not in self._streams:
                self._streams[message.number] = _Stream(
                    self, relay, message.number, Path(f"/proc/self/fd/{self._socket_fd}")
                )
            return
        stream = self._streams.get(message.number)
        if stream is not None:
            stream.take(message)

    def forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)

    async def _restart_relay(self, previous: str) -> Relay | None:
        """Start a relay that replaces the one with the id ``previous``. Return ``None`` if the box is gone, or if the
        port is no longer ours (another process has opened the door)."""
        backoff = Backoff(first_s=0.1, longest_s=_LONGEST_PAUSE_S)
        while True:
            try:
                if has_ended(await self.box.info()):
                    return None
                return await self._begin(previous)
            except PortTakenError as error:
                log.warning("opensandbox_door_taken", box=self.box.sandbox_id, door=self.door.name, error=str(error))
                return None
            except sdk_errors(SandboxError) as error:
                log.warning("opensandbox_door", box=self.box.sandbox_id, door=self.door.name, error=str(error))
            await backoff.again()

    async def _drop_streams(self) -> None:
        streams, self._streams = [*self._streams.values()], {}
        await asyncio.gather(*(stream.aclose() for stream in streams))

    async def aclose(self, *, quits: bool) -> None:
        """Close the door and all connections through it; idempotent. With ``quits``, also free the box's port."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.aclose(quits=quits)
        await self._drop_streams()
        await self._end()

    async def _end(self) -> None:
        if self._server is not None:
            await self._server.aclose()
        if self._socket_fd >= 0:
            os.close(self._socket_fd)
            self._socket_fd = -1


class _Stream:
    """One connection from the box to the door's server."""

    def __init__(self, owner: RelayedDoor, relay: Relay, number: int, path: Path) -> None:
        self.number = number
        self._owner = owner
        self._relay = relay
        self._path = path
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = WINDOW_BYTES
        self._more_room = asyncio.Event()
        self._unread = 0
        self._task = asyncio.create_task(self._carry())

    def take(self, message: Message) -> None:
        if message.kind == DATA:
            self._unread += len(message.data)
            if self._unread > WINDOW_BYTES:
                self._task.cancel()
            else:
                self._arrived.put_nowait(message.data)
        elif message.kind == FINISH:
            self._arrived.put_nowait(b"")
        elif message.kind == CREDIT:
            # Cap the window at its initial size whatever the box sends, because unsent data waits in memory.
            credit = int(_COUNT.unpack(message.data)[0]) if len(message.data) == _COUNT.size else 0
            self._room = min(self._room + credit, WINDOW_BYTES)
            self._more_room.set()
        elif message.kind == RESET:
            self._task.cancel()

    async def _carry(self) -> None:
        writer: asyncio.StreamWriter | None = None
        ended = False
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._to_server(writer))
                both.create_task(self._from_server(reader))
            ended = True
        except* OSError as errors:
            # The door was closed, or its server hung up; the connection in the box breaks.
            log.debug("opensandbox_door_connection", error=str(errors.exceptions[0]))
        finally:
            self._owner.forget(self)
            if writer is not None:
                writer.transport.abort()
            if not ended:
                self._relay.send(RESET, self.number)

    async def _to_server(self, writer: asyncio.StreamWriter) -> None:
        written = 0
        while data := await self._arrived.get():
            writer.write(data)
            await writer.drain()
            self._unread -= len(data)
            written += len(data)
            if written >= WINDOW_BYTES // 2:
                self._relay.send(CREDIT, self.number, _COUNT.pack(written))
                written = 0
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _from_server(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._room <= 0:
                self._more_room.clear()
                await self._more_room.wait()
            data = await reader.read(min(_CHUNK, self._room))
            if not data:
                self._relay.send(FINISH, self.number)
                return
            self._room -= len(data)
            self._relay.send(DATA, self.number, data)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
