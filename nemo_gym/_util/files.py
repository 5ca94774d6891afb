"""Where paths start from, where packages are kept, writing files whole, and JSON lines that survive a crash.

A server works in its plugin's folder, as plugins written for NeMo Gym expect; a path in its configuration was written
by somebody who stood elsewhere.

A crash may leave a file of JSON lines with a torn last line. A line counts when its line end is written: `open_lines`
cuts a torn one off before anything is appended, and readers leave it out.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

INSTALL_ROOT = Path(__file__).resolve().parents[2]
COMMAND_DIRECTORY_VARIABLE = "NEMO_GYM_COMMAND_DIR"
"""Tells servers that `ng_run` starts where it was started; others have a working directory of their own."""


def from_command(path: str | Path) -> Path:
    """An absolute path: ``~`` is the user's home, and a relative path starts where the command was typed. Links are
    kept."""
    start = os.environ.get(COMMAND_DIRECTORY_VARIABLE) or os.getcwd()  # noqa: PTH109 - links stay
    return Path(os.path.abspath(os.path.join(start, os.path.expanduser(path))))  # noqa: PTH100, PTH111, PTH118


def cache_root() -> Path:
    """``$NEMO_GYM_CACHE_DIR``, else ``nemo-gym`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("NEMO_GYM_CACHE_DIR"):
        return Path(own).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base).expanduser() / "nemo-gym").resolve()


def write_all(descriptor: int, data: bytes | bytearray | memoryview, *, at_once: int | None = None) -> None:
    """Write all of ``data``; ``os.write`` may take only a part.

    Args:
        at_once: most bytes that one call is given.

    Raises:
        OSError: a part may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:at_once]) :]


def write_private(path: Path, text: str, *, sync: bool = False) -> None:
    """Make or replace a file that only its owner may read; a reader meets the old text or the new one, whole.

    Args:
        sync: whether it is on the disk when this returns.

    Raises:
        OSError: the old file stands.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
