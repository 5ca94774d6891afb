"""Bounds on what a JSON body holds.

Bytes alone are no bound: an empty list takes three of them in a body and sixty in memory. So a body's values are
counted before anything is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nemo_gym.contract.errors import NemoGymError


class TooManyValuesError(NemoGymError):
    """A JSON body of more values than the server takes."""

    code = "body_too_many_values"
    status = 413


class TooManyMessagesError(NemoGymError):
    """A conversation of more messages than the server takes."""

    code = "too_many_messages"
    status = 413


_VALUE_BYTES = 2
"""The shortest value with what separates it from the next."""
_HELD_AT_ONCE_BYTES = 256 << 10
"""Looked at in one call, which holds the interpreter for a millisecond or two."""
_IN_A_THREAD_BYTES = 2 << 20
_COUNTING = ThreadPoolExecutor(1, "body values")
"""One body at a time: the event loop waits behind each thread that wants the interpreter."""
_STRUCTURE = b",[{"
_OTHERS = bytes(one for one in range(256) if one not in _STRUCTURE)
_NO_QUOTES = bytes(one for one in range(256) if one not in _STRUCTURE + b'"')


async def check_values(body: bytes, at_most: int) -> None:
    """Raise `TooManyValuesError` for JSON of more than ``at_most`` values. It need not be JSON."""
    if len(body) <= at_most * _VALUE_BYTES:
        return
    too_many = (
        has_more_values(body, at_most)
        if len(body) <= _IN_A_THREAD_BYTES
        else await asyncio.get_running_loop().run_in_executor(_COUNTING, has_more_values, body, at_most)
    )
    if too_many:
        raise TooManyValuesError(
            f"the body has more than {at_most} JSON values; raise the server's 'max_body_values' if it may have",
            limit=at_most,
        )


def has_more_values(body: bytes, at_most: int) -> bool:
    """Whether JSON has more than ``at_most`` values, which is more commas and opening brackets outside of strings."""
    pieces = range(0, len(body), _HELD_AT_ONCE_BYTES)
    anywhere = 0
    for at in pieces:
        anywhere += len(body[at : at + _HELD_AT_ONCE_BYTES].translate(None, _OTHERS))
        if anywhere > at_most:
            break
    else:
        return False  # for fewer of them are anywhere
    counter = ValueCounter()
    for at in pieces:
        counter.feed(body[at : at + _HELD_AT_ONCE_BYTES])
        # A key and a value that are strings belong to one of those signs.
        if counter.found > at_most or counter.quotes > 4 * at_most + 4:
            return True
    return False


class ValueCounter:
    """Counts the values of JSON that comes in pieces. A list or an object counts as ``of_containers`` values: it takes
    that much more to parse, and to hold, than a number."""

    def __init__(self, of_containers: int = 1) -> None:
        self.found = self.quotes = 0
        self._more = of_containers - 1
        self._inside, self._backslash = False, b""

    def feed(self, piece: bytes) -> None:
        piece = (self._backslash + piece).replace(b"\\\\", b"")
        self._backslash = b"\\" if piece.endswith(b"\\") else b""  # whatever it is before comes with the next piece
        piece = piece.removesuffix(b"\\").replace(b'\\"', b"").translate(None, _NO_QUOTES)
        self.quotes += piece.count(b'"')
        parts = piece.split(b'"')
        for part in parts[self._inside :: 2]:
            self.found += len(part)
            if self._more and part:
                self.found += self._more * (part.count(b"[") + part.count(b"{"))
        self._inside ^= len(parts) % 2 == 0


def check_messages(body: Mapping[str, Any], at_most: int) -> None:
    """Raise `TooManyMessagesError` for a body with a history (``messages``, ``input``) of more than ``at_most``."""
    for key in ("messages", "input"):
        history = body.get(key)
        if isinstance(history, list) and len(history) > at_most:
            raise TooManyMessagesError(
                f"'{key}' has {len(history)} elements, and may have {at_most}; raise the server's 'max_messages' if"
                " it may have more",
                param=key,
                limit=at_most,
            )
