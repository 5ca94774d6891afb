"""The output of execs on the wire, as binary frames or as server-sent events.

A frame is one byte for its kind, four for the length of its payload (unsigned, big endian), and the payload:

    0 ping    no payload; shows that the connection is alive
    1 stdout  at least one byte, exactly as the command wrote it
    2 stderr  as for stdout
    3 exit    the JSON of `ExecEndModel`; sent exactly once, as the last frame

The *offset* of a position in the stream is the number of output bytes before it. It counts stdout and stderr together
in their order of arrival, and does not count ping and exit frames. ``?offset=`` resumes at any position, even in the
middle of a frame. In a server-sent event, ``data`` is base64 because events are text (the exit event carries plain
JSON), ``event`` is the name of the frame's kind, and ``id`` is the offset after the frame.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from pydantic import ValidationError

from nemo_gym._util.suggest import validation_problems
from nemo_gym.contract.errors import SandboxError
from nemo_gym.sandbox.base import ExecOutput
from nemo_gym.sandbox.wire.models import ExecEndModel

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Longest payload of one frame. Longer output is split; a reader rejects a longer frame on reading its header."""
PING_INTERVAL_S = 10.0
"""A stream carries a frame at least this often. A reader that receives nothing for three times as long reconnects."""

_HEADER = struct.Struct(">BI")


class FrameKind(IntEnum):
    PING = 0
    STDOUT = 1
    STDERR = 2
    EXIT = 3


_STREAMS: dict[FrameKind, Literal["stdout", "stderr"]] = {FrameKind.STDOUT: "stdout", FrameKind.STDERR: "stderr"}
_KINDS = {name: kind for kind, name in _STREAMS.items()}


class FrameError(SandboxError):
    """An output stream that is not in this module's format, because it is damaged or comes from another program."""

    code = "frame"


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameKind
    payload: bytes = b""

    @property
    def output(self) -> ExecOutput | None:
        """The command's output in this frame; ``None`` for ping and exit frames."""
        stream = _STREAMS.get(self.kind)
        return None if stream is None else ExecOutput(stream, self.payload)

    @property
    def end(self) -> ExecEndModel | None:
        """The command's end; ``None`` unless this is the exit frame. Raises `FrameError` if the payload is invalid."""
        if self.kind is not FrameKind.EXIT:
            return None
        try:
            return ExecEndModel.model_validate_json(self.payload)
        except ValidationError as error:
            raise FrameError(f"the exit frame of an exec is invalid: {validation_problems(error)}") from error


def encode(kind: FrameKind, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame holds up to {MAX_PAYLOAD_BYTES} bytes, got {len(payload)}; see encode_output")
    return _HEADER.pack(kind, len(payload)) + payload


def encode_output(stream: Literal["stdout", "stderr"], data: bytes) -> Iterator[bytes]:
    """Split output of any length into encoded frames; empty output gives no frame."""
    for start in range(0, len(data), MAX_PAYLOAD_BYTES):
        yield encode(_KINDS[stream], data[start : start + MAX_PAYLOAD_BYTES])


def encode_end(end: ExecEndModel) -> bytes:
    return encode(FrameKind.EXIT, end.model_dump_json().encode())


PING = encode(FrameKind.PING)


class FrameParser:
    """Parses frames from bytes that arrive in chunks of any size.

    Output is passed on as it arrives, so a long frame may be yielded in several pieces. After a broken connection, the
    bytes that did arrive need not be sent again.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._kind = FrameKind.PING
        self._payload_left = 0
        """Payload bytes of the current frame that have not arrived yet."""
        self._exit = bytearray()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the exit frame has arrived."""
        return self._ended

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames, and pieces of frames, in ``data``. Exhaust the iterator before the next call.

        Raises:
            FrameError: a frame has an unknown kind or an invalid length, or data follows the exit frame.
        """
        position = 0
        while position < len(data):
            if self._ended:
                raise FrameError("unexpected data after the exit frame of an exec's output")
            if self._payload_left == 0:
                missing = _HEADER.size - len(self._head)
                self._head += data[position : position + missing]
                position += missing
                if len(self._head) < _HEADER.size:
                    return
                self._begin(*_HEADER.unpack(self._head))
                self._head.clear()
                if self._payload_left == 0 and self._kind is not FrameKind.EXIT:
                    yield Frame(self._kind)
                continue
            piece = data[position : position + self._payload_left]
            position += len(piece)
            self._payload_left -= len(piece)
            if self._kind is not FrameKind.EXIT:
                yield Frame(self._kind, piece)
                continue
            self._exit += piece
            if self._payload_left == 0:
                self._ended = True
                yield Frame(FrameKind.EXIT, bytes(self._exit))

    def _begin(self, kind: int, length: int) -> None:
        if kind > FrameKind.EXIT or length > MAX_PAYLOAD_BYTES or (kind == FrameKind.PING) != (length == 0):
            raise FrameError(f"invalid frame header: kind {kind}, length {length}")
        self._kind, self._payload_left = FrameKind(kind), length


def encode_event(frame: Frame, offset: int) -> bytes:
    """Encode a frame as a server-sent event; ``offset`` is the offset after the frame."""
    data = frame.payload.decode() if frame.kind is FrameKind.EXIT else base64.b64encode(frame.payload).decode()
    return f"id: {offset}\nevent: {frame.kind.name.lower()}\ndata: {data}\n\n".encode()
