"""Token ids and logprobs as arrays."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, Literal

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
