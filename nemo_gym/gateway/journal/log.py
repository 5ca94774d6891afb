"""An append-only log in segment files.

Waiting for a disk is a thread's work: it writes and syncs for many callers at once. Handing bytes to the kernel takes
less time than handing them to a thread, so without syncs each record is written where it is appended.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from nemo_gym.gateway.journal.errors import JournalBusyError, JournalDamagedError, JournalError
from nemo_gym.gateway.journal.frames import framed, read_frames
from nemo_gym.gateway.relayed import Buffer, coalesced, size_of

Durability = Literal["power_loss", "process"]
"""What an acknowledged record survives: ``power_loss`` syncs each group to the disk, ``process`` only hands it to the
kernel, which is enough for any death of the process itself."""
SEGMENT_BYTES = 64 * 2**20
MAX_GROUP = 1024
_WRITE_BYTES = 64 << 10
"""At once. The kernel keeps a large write in large pieces of memory, and those are pieces that nobody has used for
long: a virtual machine's host may have to find them first, at several times the cost of the copy."""
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Append:
    data: Sequence[Buffer]
    segment: int
    """The segment the caller was told; the writer opens it when it comes to it."""
    future: asyncio.Future[None]


class JournalLog:
    """Open with `open`. ``append`` returns a future that resolves when the record is durable. The first write that
    fails ends the log: every later append fails too, so that nothing is acknowledged on top of a hole."""

    def __init__(self, directory: Path, *, durability: Durability, segment_bytes: int) -> None:
        self._directory = directory
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._loop = asyncio.get_running_loop()
        self._lock_file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._queue: queue.SimpleQueue[_Append | None] = queue.SimpleQueue()
        self._broken: JournalError | None = None
        self._closed = False
        self._file = -1
        self._file_segment = 0
        self._size = 0
        self.segment = 1
        """The number of the segment that the next record goes to."""
        self.groups = 0
        """Writes so far, each for one or many records."""
        self._thread = threading.Thread(target=self._work, name="gateway-journal", daemon=True)

    @classmethod
    def open(
        cls,
        directory: Path,
        on_record: Callable[[int, memoryview], None],
        *,
        on_end: Callable[[], None] | None = None,
        durability: Durability = "power_loss",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> JournalLog:
        """Take the directory, hand every record and its segment's number to ``on_record`` in the order of appends,
        cut off a torn end, and be ready to append. ``on_end``, after the last record, may still refuse by raising.
        Raises `JournalBusyError` and `JournalDamagedError`."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self = cls(directory, durability=durability, segment_bytes=segment_bytes)
        try:
            self._take()
            self._replay(on_record)
            if on_end is not None:
                on_end()
        except BaseException:
            os.close(self._lock_file)
            raise
        if durability == "power_loss":
            self._thread.start()
        return self

    def append(self, payload: bytes | Sequence[Buffer]) -> asyncio.Future[None]:
        """Add a record, whole or in pieces. Records are durable in the order of their appends."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._broken is not None:
            future.set_exception(self._broken)
        elif self._closed:
            future.set_exception(JournalError("the journal is closed"))
        else:
            data = framed((payload,) if isinstance(payload, bytes) else payload)
            size = size_of(data)
            if self._size and self._size + size > self._segment_bytes:
                self.segment += 1
                self._size = 0
            self._size += size
            item = _Append(data, self.segment, future)
            if self._durability == "power_loss":
                self._queue.put(item)
            else:
                _resolve([item], self._try_write([item]))
        return future

    @property
    def place(self) -> tuple[Path, int]:
        """The file of the latest record, and where the record ends in it once it is durable."""
        return self._path(self.segment), self._size

    @property
    def broken(self) -> JournalError | None:
        """Why nothing can be appended any more; for readiness."""
        return self._broken

    def segments(self) -> list[int]:
        """Numbers of the segment files, oldest first."""
        return sorted(int(path.stem) for path in self._directory.glob("*.log"))

    def drop_segment(self, number: int) -> None:
        """Remove an old segment. Only ever the oldest: a record may only go after all that came before it."""
        if number < self.segment and number == self.segments()[0]:
            self._path(number).unlink()

    async def aclose(self) -> None:
        """Write what was appended, then let go of the directory."""
        if not self._closed:
            self._closed = True
            if self._thread.is_alive():
                self._queue.put(None)
                await asyncio.to_thread(self._thread.join)
            if self._file >= 0:
                os.close(self._file)
            os.close(self._lock_file)

    # -- opening -------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise JournalBusyError(
                f"another process has the journal {self._directory} open; give each gateway a directory of its own"
            ) from None

    def _replay(self, on_record: Callable[[int, memoryview], None]) -> None:
        segments = self.segments()
        for number in segments:
            path = self._path(number)
            data = path.read_bytes()
            frames = read_frames(data)
            torn = len(data) - frames.end
            if torn and (frames.whole_after_end or number != segments[-1]):
                raise JournalDamagedError(
                    f"{path} is damaged at byte {frames.end}: committed turns may be missing. Move the directory away"
                    " to start without them; their sessions' attempts are then retried",
                    path=str(path),
                    offset=frames.end,
                )
            for payload in frames.payloads:
                on_record(number, payload)
            if torn:
                log.warning("cut off the torn end of the journal", path=str(path), bytes=torn)
                with path.open("r+b") as file:
                    file.truncate(frames.end)
                    os.fsync(file.fileno())
            self.segment, self._size = number, frames.end

    # -- writing ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        last = False
        while not last:
            group: list[_Append] = []
            item = self._queue.get()
            while True:
                if item is None:
                    last = True
                    break
                group.append(item)
                if len(group) >= MAX_GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if group:
                self._write_group(group)

    def _write_group(self, group: list[_Append]) -> None:
        error = self._try_write(group)
        try:
            self._loop.call_soon_threadsafe(_resolve, group, error)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def _try_write(self, group: list[_Append]) -> JournalError | None:
        error = self._broken
        if error is None:
            try:
                start = 0
                for index in range(1, len(group) + 1):
                    if index == len(group) or group[index].segment != group[start].segment:
                        self._write(group[start].segment, [part for item in group[start:index] for part in item.data])
                        start = index
            except OSError as caught:
                # After a failed sync nobody knows what the disk has; only a new process that reads it again does.
                error = self._broken = JournalError(
                    f"the journal {self._directory} cannot be written: {caught}", retryable=True
                )
        self.groups += 1
        return error

    def _write(self, segment: int, data: Sequence[Buffer]) -> None:
        if segment != self._file_segment:
            if self._file >= 0:
                os.close(self._file)
            self._file = os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file_segment = segment
            if self._durability == "power_loss":
                directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        for piece in coalesced(data):
            view = memoryview(piece)
            while view:
                view = view[os.write(self._file, view[:_WRITE_BYTES]) :]
        if self._durability == "power_loss":
            os.fdatasync(self._file)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08d}.log"


def _resolve(group: list[_Append], error: JournalError | None) -> None:
    for item in group:
        if item.future.done():
            continue
        if error is None:
            item.future.set_result(None)
        else:
            item.future.set_exception(error)
