"""What the helper program says: frames of a kind and base64, in text that a transport may have broken anywhere."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STARTED, STDOUT, STDERR, PING, END = "s", "o", "e", "p", "x"
_KINDS = frozenset((STARTED, STDOUT, STDERR, PING, END))
_LONGEST = 1024 * 1024


@dataclass(frozen=True)
class Frame:
    kind: str
    data: bytes

    def ending(self) -> dict[str, Any]:
        """The content of an ``END`` frame. Raises `ValueError` when it is none."""
        found = json.loads(self.data)
        if not isinstance(found, dict) or not isinstance(found.get("outcome"), str):
            raise ValueError("an end without an outcome")  # noqa: TRY004  the text's fault, not its caller's
        return found


class FrameParser:
    """Puts frames together again. What is no frame is noise of the box's (a dynamic linker's warning, say): dropped,
    and a frame it damaged is missing, which only ever makes a command lost."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[Frame]:
        pieces = (self._rest + "".join(text.split())).split(";")
        self._rest = pieces.pop()[-_LONGEST:]
        for piece in pieces:
            if piece and piece[0] in _KINDS:
                try:
                    yield Frame(piece[0], base64.b64decode(piece[1:], validate=True))
                except binascii.Error:
                    continue
