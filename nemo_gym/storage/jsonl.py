"""Files of JSON lines that a crash may leave with a torn last line.

A line counts when its line end is written. `open_lines` cuts a torn one off before anything is appended, and readers
leave it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nemo_gym._util.files import write_all

_TAIL_BYTES = 64 * 1024


def open_lines(path: Path, mode: int = 0o666) -> int:
    """A file descriptor that appends behind the last whole line; the file is made where there is none."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        _drop_torn_line(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def append_lines(fd: int, lines: bytes) -> None:
    """Append whole lines or, where the disk does not take them, nothing. Raises the disk's `OSError`."""
    before = os.fstat(fd).st_size
    try:
        write_all(fd, lines)
    except OSError:
        os.ftruncate(fd, before)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """Each whole line with its end."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _drop_torn_line(fd: int) -> None:
    end = os.fstat(fd).st_size
    at = end
    while at > 0:
        start = max(0, at - _TAIL_BYTES)
        newline = os.pread(fd, at - start, start).rfind(b"\n")
        if newline >= 0:
            at = start + newline + 1
            break
        at = start
    if at < end:
        os.ftruncate(fd, at)
