"""Make text of models, boxes and datasets safe for a terminal: it cannot move the cursor, recolour or reverse text
(`shown`); and let work go on whose output can no longer be written (`outlasted`)."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, Literal

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def shown(text: object) -> str:
    """Return ``text`` with every invisible or control character written out, such as ``^[`` or ``<U+200B>``."""
    return _HIDDEN.sub(_escaped, str(text))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"^{chr(code + 64)}" if code < 0x20 else f"<U+{code:04X}>"


class Outlasting:
    """A stream that drops what cannot be written: its reader or terminal may be gone, or its disk full."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def outlasted(name: Literal["stdout", "stderr"]) -> Iterator[None]:
    """Make ``sys.stdout`` or ``sys.stderr`` an `Outlasting` stream. What it still holds at the end and cannot write is
    discarded, because it would change the exit code of the process."""
    stream = getattr(sys, name)
    if stream is None:  # the process was started without it, and print() then prints nothing
        yield
        return
    setattr(sys, name, Outlasting(stream))
    try:
        yield
    finally:
        setattr(sys, name, stream)
        try:
            stream.flush()
        except OSError:
            discard(stream)


def discard(stream: IO[str]) -> None:
    """Discard what the stream holds, and all that is still written to it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
