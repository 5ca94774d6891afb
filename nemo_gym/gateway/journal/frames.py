"""Records in a file, so that a torn one is recognised: magic, length, checksum, payload."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_gym.gateway.relayed import Buffer, size_of

try:
    from isal.isal_zlib import crc32  # the same checksum in a fifth of zlib's time
except ImportError:  # it is made for some platforms only
    from zlib import crc32

MAGIC = b"NGJ\x01"
_HEAD = struct.Struct("<4sII")
MAX_PAYLOAD_BYTES = 2**30


def frame(payload: bytes) -> bytes:
    return b"".join(framed((payload,)))


def framed(payload: Sequence[Buffer]) -> list[Buffer]:
    """A frame in pieces, of a payload in pieces, which are not copied."""
    checksum = 0
    for piece in payload:
        checksum = crc32(piece, checksum)
    return [_HEAD.pack(MAGIC, size_of(payload), checksum), *payload]


@dataclass(frozen=True, slots=True)
class Frames:
    """What a file holds."""

    payloads: list[memoryview]
    end: int
    """Where the last whole record ends."""
    whole_after_end: bool
    """Whether a whole record follows the first broken one. A crash of the process cannot do that; damage can."""


def read_frames(data: bytes) -> Frames:
    view = memoryview(data)
    payloads: list[memoryview] = []
    offset = 0
    while (payload := _payload_at(view, offset)) is not None:
        payloads.append(payload)
        offset += _HEAD.size + len(payload)
    return Frames(payloads, offset, _any_frame_after(data, view, offset))


def _payload_at(view: memoryview, offset: int) -> memoryview | None:
    if len(view) - offset < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(view, offset)
    start = offset + _HEAD.size
    if magic != MAGIC or length > MAX_PAYLOAD_BYTES or len(view) - start < length:
        return None
    payload = view[start : start + length]
    return payload if crc32(payload) == checksum else None


def _any_frame_after(data: bytes, view: memoryview, end: int) -> bool:
    found = data.find(MAGIC, end + 1)
    while found >= 0:
        if _payload_at(view, found) is not None:
            return True
        found = data.find(MAGIC, found + 1)
    return False
