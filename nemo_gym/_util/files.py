"""Base directories for paths and caches, atomic file writes, JSON lines that survive a crash, and output streams that
may fail while the work goes on (`outlasted`).

A server's working directory is its plugin's folder, as plugins written for NeMo Gym expect. A relative path in its
configuration, however, is relative to the directory in which the user typed the command (`from_command`).

A crash may leave a file of JSON lines with an incomplete last line. A line is valid once its line end is written:
`open_lines` truncates an incomplete one before anything is appended, and readers skip it. Readers of files that other
programs may have written, without the last line end, use `finished_lines`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

_log = logging.getLogger(__name__)

INSTALL_ROOT = Path(__file__).resolve().parents[2]
COMMAND_DIRECTORY_VARIABLE = "NEMO_GYM_COMMAND_DIR"
"""Environment variable with the directory in which `ng_run` was started, for servers, whose own differs."""


def from_command(path: str | Path) -> Path:
    """Make a path absolute: ``~`` is the user's home, and a relative path starts where the command was typed. Links
    are not resolved."""
    start = os.environ.get(COMMAND_DIRECTORY_VARIABLE) or os.getcwd()  # noqa: PTH109 - links stay
    return Path(os.path.abspath(os.path.join(start, os.path.expanduser(path))))  # noqa: PTH100, PTH111, PTH118


def cache_root() -> Path:
    """Return ``$NEMO_GYM_CACHE_DIR``, else ``nemo-gym`` below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if configured := os.environ.get("NEMO_GYM_CACHE_DIR"):
        return Path(configured).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (Path(base).expanduser() / "nemo-gym").resolve()


def write_all(descriptor: int, data: bytes | bytearray | memoryview, *, at_once: int | None = None) -> None:
    """Write all of ``data``; ``os.write`` may take only a part.

    Args:
        at_once: maximum number of bytes passed to one ``os.write``.

    Raises:
        OSError: some of ``data`` may have been written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:at_once]) :]


def write_private(path: Path, text: str, *, sync: bool = False) -> None:
    """Create or atomically replace a file that only its owner may read.

    Args:
        sync: whether to sync the file to disk before returning.

    Raises:
        OSError: the old file is unchanged.
    """
    replace_file(path, text.encode(), 0o600, sync=sync)


def write_whole(path: Path, data: bytes) -> None:
    """Create or atomically replace a file. A link's target is replaced, with the mode that it has; what is not a
    regular file, such as a pipe, is written to in place.

    Raises:
        OSError: the old file is unchanged.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    replace_file(path, data, stat.S_IMODE(path.stat().st_mode) if path.exists() else None)


def replace_file(path: Path, data: bytes, mode: int | None, *, sync: bool = False) -> None:
    """Create or atomically replace a file.

    Args:
        mode: the file's permissions; ``None`` leaves them to the process's mask.
        sync: whether to sync the file to disk before returning.

    Raises:
        OSError: the old file is unchanged.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(data)
            if sync:
                file.flush()
                os.fsync(descriptor)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


_TAIL_BYTES = 64 * 1024


def open_lines(path: Path, mode: int = 0o666) -> int:
    """Open a file for appending after its last complete line; return the descriptor. Creates a missing file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        _drop_torn_line(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def append_lines(fd: int, lines: bytes) -> None:
    """Append complete lines, or nothing if the write fails. Raises the `OSError` of the write."""
    before = os.fstat(fd).st_size
    try:
        write_all(fd, lines)
    except OSError:
        os.ftruncate(fd, before)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """Yield each complete line, including its line end."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def finished_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield each line of a file of JSON lines. A last line that its writer has not finished, without a line end and no
    JSON, is left out with a warning."""
    for line in file:
        if line.endswith(b"\n") or not line.strip() or _is_json(line):
            yield line
        else:
            _log.warning("%s: the last line has no end (%d bytes) and is left out", file.name, len(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except RecursionError:  # the reader tells what is wrong with it
        return True
    except ValueError:
        return False
    return True


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
