"""Integers that orjson would change: beyond 64 bits it reads them as floats, without an error, and writes none."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

LEAST, MOST = -(2**63), 2**64 - 1
"""The integers that orjson reads and writes exactly."""
_MANY_DIGITS = re.compile(rb"\d{19}")


def loads_exactly(data: bytes) -> Any:
    """Return and raise as ``orjson.loads`` does, but integers beyond 64 bits stay integers. orjson refuses to write
    them, so whoever passes the value on refuses it instead of changing it."""
    value = orjson.loads(data)
    if not _MANY_DIGITS.search(data):
        return value
    try:
        return json.loads(data)
    except RecursionError:
        return value  # nested too deeply to be written, too


def dumps_exactly(value: Any) -> bytes:
    """Return and raise as ``orjson.dumps`` does, but write integers beyond 64 bits. For readers that read them
    exactly."""
    try:
        return orjson.dumps(value)
    except TypeError as error:
        if str(error) != "Integer exceeds 64-bit range":
            raise
        return json.dumps(value, separators=(",", ":")).encode()


def has_long_numbers(text: str) -> bool:
    """Whether ``text`` may hold integers that orjson would change."""
    return _MANY_DIGITS.search(text.encode()) is not None


def require_exact_integers(line: bytes) -> None:
    """Raise `ValueError` naming the field of an integer beyond 64 bits. ``line`` is one JSON value that orjson reads;
    only lines with long numbers are looked at more closely."""
    if not _MANY_DIGITS.search(line):
        return
    try:
        values: list[tuple[str, Any]] = [("", json.loads(line, parse_int=_Digits))]
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    while values:
        path, value = values.pop()
        if isinstance(value, dict):
            values += [(f"{path}.{key}" if path else key, each) for key, each in value.items()]
        elif isinstance(value, list):
            values += [(f"{path}[{index}]", each) for index, each in enumerate(value)]
        elif isinstance(value, _Digits) and not value.is_exact:
            what = f"'{path}'" if path else "the value"
            raise ValueError(f"{what} is an integer of over 64 bits, which would be rounded; write it as text")


class _Digits(str):
    """An integer as it is written: Python refuses to build very long ones."""

    __slots__ = ()

    @property
    def is_exact(self) -> bool:
        return len(self) <= len(str(LEAST)) and LEAST <= int(self) <= MOST
