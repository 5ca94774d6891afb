"""Output of one exec on disk: the bytes as they came, and an index that says which stream they are of.

The index gets its entry before the bytes that it speaks of, so that whatever a killed broker leaves can be read. An
offset counts the bytes of both streams in the order they came (`nemo_gym.sandbox.wire.frames`).
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
        """What an earlier process left; empty when that is nothing."""
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
        """Raises `OSError` when the disk is full; then nothing of ``data`` counts."""
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
        """Up to ``max_bytes`` from ``offset`` on, in pieces of one stream each. Raises `FileNotFoundError` when they
        were dropped."""
        wanted = min(max_bytes, self.size - offset)
        if wanted <= 0:
            return []
        data = self._pread(offset, wanted)
        if len(data) < wanted:
            raise FileNotFoundError(self._data_path)
        pieces: list[tuple[Stream, bytes]] = []
        position = bisect.bisect_right(self._starts, offset) - 1
        start = offset
        while start < offset + wanted:
            following = self._starts[position + 1] if position + 1 < len(self._starts) else self.size
            stop = min(following, offset + wanted)
            if stop > start:
                pieces.append((_STREAMS[self._streams[position]], data[start - offset : stop - offset]))
            start, position = max(start, stop), position + 1
        return pieces

    def _pread(self, offset: int, wanted: int) -> bytes:
        if self._data >= 0:
            return os.pread(self._data, wanted, offset)
        with self._data_path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), wanted, offset)

    def close(self) -> None:
        """No more will be appended."""
        for descriptor in (self._data, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._index = -1

    def drop(self) -> None:
        """Give its disk space back; reading raises from then on."""
        self.close()
        for path in (self._data_path, self._index_path):
            path.unlink(missing_ok=True)


class SpoolSpace:
    """The disk space of all output, bounded: what ended first is dropped first."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.used = 0
        self._ended: dict[tuple[str, str], int] = {}

    def directory(self, sandbox_id: str) -> Path:
        return self.root / sandbox_id

    def load(self) -> None:
        """Count what an earlier process left, oldest first."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = [(path.stat(), path) for path in self.root.glob("*/*.out")]
        for info, path in sorted(found, key=lambda item: item[0].st_mtime):
            self.used += info.st_size
            self._ended[(path.parent.name, path.stem)] = info.st_size

    def grew(self, size: int) -> None:
        self.used += size
        if self.used > self.max_bytes:
            self._make_room()

    def ended(self, sandbox_id: str, exec_id: str, size: int) -> None:
        """Its output may be dropped from now on."""
        if size:
            self._ended[(sandbox_id, exec_id)] = size

    def boxes(self) -> set[str]:
        """Ids of boxes of which there is output."""
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
