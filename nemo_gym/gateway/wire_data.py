"""Data that passes through as it came: JSON as bytes that nobody here has to read, ids and logprobs as arrays."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal
from uuid import uuid4

import orjson

# JSON that passes through as bytes: what nobody here has to read is neither parsed nor written again.

Buffer = bytes | memoryview
_WORTH_A_WRITE_BYTES = 64 * 1024
_PLACE = f"relayed-{uuid4().hex}"  # of this process, and never told to anybody: no text holds it
_QUOTED_PLACE = f'"{_PLACE}"'.encode()
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_NOTHING = (b"", b"null", b"[]", b"{}")


class JsonText:
    """A value as JSON, somewhere within plain data. False for nothing: no text, ``null``, and an empty list or
    object."""

    __slots__ = ("_data", "_read")  # no dataclass: orjson would write its fields

    def __init__(self, data: Buffer) -> None:
        self._data: Buffer | None = data
        self._read: Callable[[], Buffer] | None = None

    @property
    def data(self) -> Buffer:
        """The text; raises what reading it again does."""
        if self._data is not None:
            return self._data
        assert self._read is not None
        return self._read()

    def let_go(self, read: Callable[[], Buffer]) -> None:
        """Keep a text that says something no longer in memory: ``read`` has it."""
        self._read, self._data = read, None

    def __bool__(self) -> bool:
        return self._data is None or len(self._data) > 4 or bytes(self._data) not in _NOTHING

    def value(self) -> Any:
        """Raises `ValueError` where it is no JSON."""
        return orjson.loads(self.data)


def written(content: Any) -> list[Buffer]:
    """``content`` as JSON in pieces, which joined are the whole; the texts of every `JsonText` in it are pieces of
    their own, uncopied."""
    texts: list[Buffer] = []

    def place(value: Any) -> str:
        if not isinstance(value, JsonText):
            raise TypeError(f"{type(value).__name__} is no JSON data")
        texts.append(value.data)
        return _PLACE

    whole = orjson.dumps(content, default=place, option=_OPTIONS)
    if not texts:
        return [whole]
    found: list[Buffer] = []
    for part, text in zip(whole.split(_QUOTED_PLACE), (*texts, b""), strict=True):
        found += (part, text)
    return found


def size_of(pieces: Iterable[Buffer]) -> int:
    """In bytes."""
    return sum(map(len, pieces))


def coalesced(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in as few writes as are worth it: small neighbours joined, large pieces as they are."""
    held: list[Buffer] = []
    for piece in pieces:
        if len(piece) < _WORTH_A_WRITE_BYTES:
            held.append(piece)
            continue
        if held:
            yield b"".join(held)
            held = []
        yield piece
    if held:
        yield b"".join(held)


# Token ids and logprobs as arrays.

LARGE = 1024
"""Numbers from which on numpy is worth its call."""


def packed(typecode: Literal["i", "f"], values: Sequence[Any]) -> array[Any]:
    """An array of int32 or float32. Raises `TypeError` and `OverflowError` for what does not fit."""
    if len(values) < LARGE or isinstance(values, array):
        return array(typecode, values)
    made: array[Any] = array(typecode)
    try:
        # In one call, where an array converts each by itself.
        made.frombytes(struct.pack(f"{len(values)}{typecode}", *values))
    except struct.error as error:
        raise TypeError(str(error)) from error
    return made
