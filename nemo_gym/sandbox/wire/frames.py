"""Output of execs on the wire: frames of bytes, and the same as server-sent events.

A frame is one byte for its kind, four for the length of its payload (unsigned, big endian), and the payload:

    0 ping    nothing; says that the connection lives
    1 stdout  bytes as the command wrote them, one at least
    2 stderr
    3 exit    the JSON of `ExecEndModel`; the last frame, exactly one

The *offset* of a place in the stream is the number of output bytes before it, of stdout and stderr together in the
order they came; pings and the end have no length. ``?offset=`` resumes anywhere, also in the middle of a frame. As
server-sent events, ``data`` is base64 (events are text), ``event`` the kind's name, and ``id`` the offset after it.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from pydantic import ValidationError

from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecOutput
from nemo_gym.sandbox.wire.models import ExecEndModel

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Of one frame; more output is more frames. A reader refuses longer ones before it waits for their bytes."""
PING_INTERVAL_S = 10.0
"""A stream says something at least this often; a reader that hears nothing for three times as long connects anew."""

_HEADER = struct.Struct(">BI")


class FrameKind(IntEnum):
    PING = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3


_STREAMS: dict[FrameKind, Literal["stdout", "stderr"]] = {FrameKind.STDOUT: "stdout", FrameKind.STDERR: "stderr"}
_KINDS = {name: kind for kind, name in _STREAMS.items()}


class FrameError(SandboxError):
    """A stream of output that is not what this module writes: damaged, or from something else."""

    code = "frame"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    payload: bytes = b""

    @property
    def output(self) -> ExecOutput | None:
        """What it holds of the command's output."""
        stream = _STREAMS.get(self.kind)
        return None if stream is None else ExecOutput(stream, self.payload)

    @property
    def end(self) -> ExecEndModel | None:
        """What it says of the command's end. Raises `FrameError` when that cannot be read."""
        if self.kind is not FrameKind.EXIT:
            return None
        try:
            return ExecEndModel.model_validate_json(self.payload)
        except ValidationError as error:
            raise FrameError(f"the end of an exec cannot be read: {error}") from error


def encode(kind: FrameKind, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame holds up to {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}; see encode_output")
    return _HEADER.pack(kind, len(payload)) + payload


def encode_output(stream: Literal["stdout", "stderr"], data: bytes) -> Iterator[bytes]:
    """Frames of any amount of output; none for nothing."""
    for start in range(0, len(data), MAX_PAYLOAD_BYTES):
        yield encode(_KINDS[stream], data[start : start + MAX_PAYLOAD_BYTES])


def encode_end(end: ExecEndModel) -> bytes:
    return encode(FrameKind.EXIT, end.model_dump_json().encode())


PING = encode(FrameKind.PING)


class FrameParser:
    """Frames out of bytes that come in any pieces.

    Output is handed on as it comes, a long frame in several pieces: what has arrived before a connection breaks need
    not come again.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._kind = FrameKind.PING
        self._left = 0
        """Bytes of the frame's payload that are still to come."""
        self._exit = bytearray()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the exit frame has come."""
        return self._ended

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames and pieces of frames that are in ``data``; all of them must be taken before the next call.

        Raises:
            FrameError: an unknown kind, an absurd length, or anything after the exit frame.
        """
        position = 0
        while position < len(data):
            if self._ended:
                raise FrameError("there is something after the end of an exec's output")
            if self._left == 0:
                wanted = _HEADER.size - len(self._head)
                self._head += data[position : position + wanted]
                position += wanted
                if len(self._head) < _HEADER.size:
                    return
                self._begin(*_HEADER.unpack(self._head))
                self._head.clear()
                if self._left == 0 and self._kind is not FrameKind.EXIT:
                    yield Frame(self._kind)
                continue
            piece = data[position : position + self._left]
            position += len(piece)
            self._left -= len(piece)
            if self._kind is not FrameKind.EXIT:
                yield Frame(self._kind, piece)
                continue
            self._exit += piece
            if self._left == 0:
                self._ended = True
                yield Frame(FrameKind.EXIT, bytes(self._exit))

    def _begin(self, kind: int, length: int) -> None:
        if kind > FrameKind.EXIT or length > MAX_PAYLOAD_BYTES or (kind == FrameKind.PING) != (length == 0):
            raise FrameError(f"bytes that are no frame: kind {kind}, {length} bytes")
        self._kind, self._left = FrameKind(kind), length


def encode_event(frame: Frame, offset: int) -> bytes:
    """A frame as a server-sent event; ``offset`` is the place after it."""
    data = frame.payload.decode() if frame.kind is FrameKind.EXIT else base64.b64encode(frame.payload).decode()
    return f"id: {offset}\nevent: {frame.kind.name.lower()}\ndata: {data}\n\n".encode()


class EventParser:
    """Frames and offsets out of server-sent events that come in any pieces."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[tuple[Frame, int]]:
        """Raises `FrameError` for events that `encode_event` does not write."""
        *blocks, self._buffer = (self._buffer + data).split(b"\n\n")
        for block in blocks:
            fields = dict(line.partition(b": ")[::2] for line in block.splitlines())
            try:
                kind = FrameKind[fields[b"event"].decode().upper()]
                said = fields[b"data"]
                payload = said if kind is FrameKind.EXIT else base64.b64decode(said, validate=True)
                offset = int(fields[b"id"])
            except (KeyError, ValueError, binascii.Error) as error:
                raise FrameError(f"an event that is no frame: {block[:200]!r}") from error
            yield Frame(kind, payload), offset
