"""Output of one exec on disk: the bytes in arrival order, and an index of the stream to which they belong.

An index entry is written before its bytes, so that the files of a killed broker are readable. An offset counts the
bytes of both streams in arrival order (`nemo_gym.sandbox.wire.frames`).
"""

from __future__ import annotations

import bisect
import os
import struct
from array import array
from pathlib import Path
from typing import Literal

from nemo_gym._util.files import write_all

Stream = Literal["stdout", "stderr"]
_ENTRY = struct.Struct(">BQ")
_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_STREAMS: dict[int, Stream] = {number: stream for stream, number in _NUMBERS.items()}
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class OutputSpool:
    """Appended to by one writer; read from any offset by any number of readers."""

    def __init__(self, directory: Path, name: str) -> None:
        self._data_path, self._index_path = directory / f"{name}.out", directory / f"{name}.idx"
        self._data = self._index = -1
        self._starts: array[int] = array("Q")
        self._streams = bytearray()
        self.size = 0

    @classmethod
    def load(cls, directory: Path, name: str) -> OutputSpool:
        """Load the output that an earlier process wrote; empty if there is none."""
        spool = cls(directory, name)
        try:
            spool.size = spool._data_path.stat().st_size
            index = spool._index_path.read_bytes()
        except FileNotFoundError:
            spool.size = 0
            return spool
        for number, start in _ENTRY.iter_unpack(index[: len(index) // _ENTRY.size * _ENTRY.size]):
            if number in _STREAMS and start <= spool.size:
                spool._streams.append(number)
                spool._starts.append(start)
        return spool

    def append(self, stream: Stream, data: bytes) -> None:
        """Append ``data``. Raises `OSError` if the disk is full; then none of ``data`` is kept."""
        if self._data < 0:
            self._data_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._data = os.open(self._data_path, _FLAGS, 0o600)
            self._index = os.open(self._index_path, _FLAGS, 0o600)
        number = _NUMBERS[stream]
        if not self._streams or self._streams[-1] != number:
            os.write(self._index, _ENTRY.pack(number, self.size))
            self._streams.append(number)
            self._starts.append(self.size)
        try:
            write_all(self._data, data)
        except OSError:
            os.ftruncate(self._data, self.size)
            raise
        self.size += len(data)

    def read(self, offset: int, max_bytes: int) -> list[tuple[Stream, bytes]]:
        """Return up to ``max_bytes`` from ``offset`` on, in pieces of one stream each. Raises `FileNotFoundError` if
        the output was dropped."""
        length = min(max_bytes, self.size - offset)
        if length <= 0:
            return []
        data = self._pread(offset, length)
        if len(data) < length:
            raise FileNotFoundError(self._data_path)
        pieces: list[tuple[Stream, bytes]] = []
        position = bisect.bisect_right(self._starts, offset) - 1
        start = offset
        while start < offset + length:
            following = self._starts[position + 1] if position + 1 < len(self._starts) else self.size
            stop = min(following, offset + length)
            if stop > start:
                pieces.append((_STREAMS[self._streams[position]], data[start - offset : stop - offset]))
            start, position = max(start, stop), position + 1
        return pieces

    def _pread(self, offset: int, length: int) -> bytes:
        if self._data >= 0:
            return os.pread(self._data, length, offset)
        with self._data_path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)

    def close(self) -> None:
        """Close the files once nothing more will be appended; reading still works."""
        for descriptor in (self._data, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._index = -1

    def drop(self) -> None:
        """Delete the files to free disk space; later reads raise `FileNotFoundError`."""
        self.close()
        for path in (self._data_path, self._index_path):
            path.unlink(missing_ok=True)


class SpoolSpace:
    """The disk space of all output, with a limit. Beyond it, the output of the execs that ended first is dropped."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.used = 0
        self._ended: dict[tuple[str, str], int] = {}

    def directory(self, sandbox_id: str) -> Path:
        return self.root / sandbox_id

    def load(self) -> None:
        """Count the output that an earlier process wrote, oldest first."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = [(path.stat(), path) for path in self.root.glob("*/*.out")]
        for info, path in sorted(files, key=lambda item: item[0].st_mtime):
            self.used += info.st_size
            self._ended[(path.parent.name, path.stem)] = info.st_size

    def grew(self, size: int) -> None:
        self.used += size
        if self.used > self.max_bytes:
            self._make_room()

    def ended(self, sandbox_id: str, exec_id: str, size: int) -> None:
        """Record that an exec has ended, so that its output may be dropped."""
        if size:
            self._ended[(sandbox_id, exec_id)] = size

    def boxes(self) -> set[str]:
        """Return the ids of the boxes that have output on disk."""
        return {path.name for path in self.root.iterdir()}

    def forget(self, sandbox_id: str) -> None:
        """Drop all output of a box."""
        directory = self.directory(sandbox_id)
        if not directory.is_dir():
            return
        for path in directory.iterdir():
            path.unlink(missing_ok=True)
        directory.rmdir()
        for name in [name for name in self._ended if name[0] == sandbox_id]:
            self.used -= self._ended.pop(name)

    def _make_room(self) -> None:
        while self.used > self.max_bytes and self._ended:
            (sandbox_id, exec_id), size = next(iter(self._ended.items()))
            del self._ended[(sandbox_id, exec_id)]
            OutputSpool(self.directory(sandbox_id), exec_id).drop()
            self.used -= size
