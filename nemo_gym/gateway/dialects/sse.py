"""Server-sent events, and text cut into pieces for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

PIECE_CHARS = 256
"""Small enough that a harness shows progress, large enough that 65,536 tokens are about a thousand events."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def data(value: Mapping[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + dumped(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """An event named by its ``type``."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:  # lone surrogates or deep nesting, which a relayed reply may hold
        return json.dumps(value, default=list).encode()


def pieces(text: str) -> Iterator[str]:
    """``text`` in pieces. A piece ends between code points, so each is Unicode of its own."""
    for start in range(0, len(text), PIECE_CHARS):
        yield text[start : start + PIECE_CHARS]


def unicode_of(text: str) -> str:
    """``text`` as UTF-8, and so JSON on the wire, can hold it: surrogate pairs joined, lone surrogates replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
