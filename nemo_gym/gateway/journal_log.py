"""The append-only log under the journal: records in checksummed frames, in segment files.

Failures of the journal are never ignored: without it, a gateway commits nothing.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import structlog

from nemo_gym._util.files import write_all
from nemo_gym.contract.errors import ModelError
from nemo_gym.gateway.policy_request import Buffer, coalesced, size_of


class JournalError(ModelError):
    """The journal cannot be written or read."""

    code = "journal"
    status = 503


class JournalFullError(JournalError):
    """The disk is full. A record that failed with this error is kept neither on disk nor in memory. The journal
    resumes by itself once there is room."""

    code = "journal_full"


class JournalBusyError(JournalError):
    """Another process has the journal open."""

    code = "journal_busy"


class JournalDamagedError(JournalError):
    """The journal's files are damaged beyond the torn end that a crash leaves."""

    code = "journal_damaged"


# The frame of a record, which makes a torn record recognizable: magic, length, checksum, payload.


MAGIC = b"NGJ\x01"
_HEAD = struct.Struct("<4sII")
MAX_PAYLOAD_BYTES = 2**30


def framed(payload: Sequence[Buffer]) -> list[Buffer]:
    """Return the frame of a payload, both in pieces; the payload's pieces are not copied."""
    checksum = 0
    for piece in payload:
        checksum = crc32(piece, checksum)
    return [_HEAD.pack(MAGIC, size_of(payload), checksum), *payload]


@dataclass(frozen=True, slots=True)
class Frames:
    """The records of a file."""

    payloads: list[memoryview]
    end: int
    """The offset at which the last whole record ends."""
    whole_after_end: bool
    """Whether a whole record follows the first broken one. A crash of the process cannot cause that; damage can."""


def read_frames(data: bytes) -> Frames:
    view = memoryview(data)
    payloads: list[memoryview] = []
    offset = 0
    while (payload := _payload_at(view, offset)) is not None:
        payloads.append(payload)
        offset += _HEAD.size + len(payload)
    return Frames(payloads, offset, _any_frame_after(data, view, offset))


def _payload_at(view: memoryview, offset: int) -> memoryview | None:
    if len(view) - offset < _HEAD.size:
        return None
    magic, length, checksum = _HEAD.unpack_from(view, offset)
    start = offset + _HEAD.size
    if magic != MAGIC or length > MAX_PAYLOAD_BYTES or len(view) - start < length:
        return None
    payload = view[start : start + length]
    return payload if crc32(payload) == checksum else None


def _any_frame_after(data: bytes, view: memoryview, end: int) -> bool:
    offset = data.find(MAGIC, end + 1)
    while offset >= 0:
        if _payload_at(view, offset) is not None:
            return True
        offset = data.find(MAGIC, offset + 1)
    return False


# An append-only log in segment files.
#
# A thread waits for the disk: it writes and syncs for many callers at once. Handing bytes to the kernel takes less
# time than handing them to a thread, so without syncs ``append`` writes each record itself.

Durability = Literal["power_loss", "process"]
"""What an acknowledged record survives: ``power_loss`` syncs each group to the disk, ``process`` only hands it to the
kernel, which is enough for any death of the process itself."""
SEGMENT_BYTES = 64 * 2**20
MAX_GROUP = 1024
_WRITE_BYTES = 256 << 10
"""Limit of one write. For a large write the kernel takes large pieces of memory that were unused for long; a virtual
machine's host may have to find them first, at several times the cost of the copy."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ROOM_BYTES = 64 << 10
"""The disk counts as full until it has this much room in addition to the record that did not fit."""
_COME_BACK_S = 5
"""``retry_after_s`` of errors while the disk is full."""
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Append:
    data: Sequence[Buffer]
    segment: int
    """The number of the record's segment; the writer opens the file when it gets to the record."""
    future: asyncio.Future[None]
    undo: Callable[[], object] | None
    epoch: int
    """Counts from 1; one more each time the disk was full."""


class JournalLog:
    """Open with `open`. ``append`` returns a future that resolves when the record is durable.

    No record is acknowledged after a lost one. If the disk is full, the record and all that were appended after it
    fail, their written parts are cut off, and the next append tries again. Any other failed write ends the log: every
    later append fails too."""

    def __init__(self, directory: Path, *, durability: Durability, segment_bytes: int) -> None:
        self._directory = directory
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._loop = asyncio.get_running_loop()
        self._lock_file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._queue: queue.SimpleQueue[_Append | None] = queue.SimpleQueue()
        self._broken: JournalError | None = None
        self._full: JournalFullError | None = None
        self._needed_bytes = 0
        """The size of the records that did not fit."""
        self._pending: deque[_Append] = deque()
        """The records that are not durable yet, in order."""
        self._epoch = 1
        self._failed_epoch = 0
        """Used by the writer: records appended in or before this epoch must not be written any more."""
        self._written = (1, 0)
        """Used by the writer: the segment of the latest durable record, and the offset of the record's end."""
        self._closed = False
        self._file = -1
        self._file_segment = 0
        self._size = 0
        self.segment = 1
        """The number of the segment of the latest record."""
        self.groups = 0
        """The number of writes so far, each for one or many records."""
        self._thread = threading.Thread(target=self._work, name="gateway-journal", daemon=True)

    @classmethod
    def open(
        cls,
        directory: Path,
        on_record: Callable[[int, memoryview, tuple[Path, int]], None],
        *,
        on_end: Callable[[], None] | None = None,
        durability: Durability = "power_loss",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> JournalLog:
        """Lock the directory, call ``on_record`` with the segment's number, the payload and the `place` of every
        record in the order of appends, cut off a torn end, and return a log to append to. ``on_end`` is called after
        the last record and may still raise. Raises `JournalBusyError` and `JournalDamagedError`."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self = cls(directory, durability=durability, segment_bytes=segment_bytes)
        try:
            self._lock_directory()
            self._replay(on_record)
            self._written = (self.segment, self._size)
            if on_end is not None:
                on_end()
        except BaseException:
            os.close(self._lock_file)
            raise
        if durability == "power_loss":
            self._thread.start()
        return self

    def append(
        self, payload: bytes | Sequence[Buffer], *, undo: Callable[[], object] | None = None
    ) -> asyncio.Future[None]:
        """Add a record, whole or in pieces. Records become durable in the order of their appends. If writing this one
        fails, ``undo`` is called before any future fails. Records that fail together are undone from the latest to
        the earliest, before another record can be appended."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._broken is not None or self._closed:
            if undo is not None:
                undo()
            future.set_exception(self._broken or JournalError("the journal is closed"))
        else:
            data = framed((payload,) if isinstance(payload, bytes) else payload)
            size = size_of(data)
            if self._size and self._size + size > self._segment_bytes:
                self.segment += 1
                self._size = 0
            self._size += size
            item = _Append(data, self.segment, future, undo, self._epoch)
            self._pending.append(item)
            if self._durability == "power_loss":
                self._queue.put(item)
            else:
                self._settle([item], self._try_write([item]))
        return future

    @property
    def place(self) -> tuple[Path, int]:
        """The file of the latest record, and the offset at which the record ends in it once it is durable."""
        return self._path(self.segment), self._size

    @property
    def refusal(self) -> JournalError | None:
        """Why an append would fail now, if it would; for readiness, and for callers that can avoid useless work."""
        if self._full is None or self._broken is not None:
            return self._broken
        disk = os.statvfs(self._directory)
        return self._full if disk.f_bavail * disk.f_frsize < self._needed_bytes + _ROOM_BYTES else None

    def segments(self) -> list[int]:
        """Numbers of the segment files, oldest first."""
        return sorted(int(path.stem) for path in self._directory.glob("*.log"))

    def drop_segment(self, number: int) -> None:
        """Remove a segment, but only the oldest: a record may only be removed after all records before it."""
        if number < self.segment and number == self.segments()[0]:
            self._path(number).unlink()

    async def aclose(self) -> None:
        """Write all appended records, then unlock the directory."""
        if not self._closed:
            self._closed = True
            if self._thread.is_alive():
                self._queue.put(None)
                await asyncio.to_thread(self._thread.join)
            if self._file >= 0:
                os.close(self._file)
            os.close(self._lock_file)

    # -- opening -------------------------------------------------------------------------------------------------

    def _lock_directory(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise JournalBusyError(
                f"another process has the journal {self._directory} open; give each gateway a directory of its own"
            ) from None

    def _replay(self, on_record: Callable[[int, memoryview, tuple[Path, int]], None]) -> None:
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
            end = 0
            for payload in frames.payloads:
                end += _HEAD.size + len(payload)
                on_record(number, payload, (path, end))
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
        group = [item for item in group if item.epoch > self._failed_epoch]  # the others have failed already
        if not group:
            return
        error = self._try_write(group)
        try:
            self._loop.call_soon_threadsafe(self._settle, group, error)
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
                segment, size = self._written
                for item in group:
                    size = size_of(item.data) + (size if item.segment == segment else 0)
                    segment = item.segment
                self._written = (segment, size)
            except JournalError as unsure:
                error = self._broken = unsure
            except OSError as caught:
                error = self._failed(group, caught)
        self.groups += 1
        return error

    def _failed(self, group: list[_Append], caught: OSError) -> JournalError:
        """Handle a failed write, and return the error for its records."""
        if caught.errno in _DISK_FULL:
            try:
                self._cut_off()
            except OSError as error:
                caught = error
            else:
                self._failed_epoch = group[-1].epoch
                return JournalFullError(
                    f"the disk of the journal {self._directory} is full; free some space; the gateway then"
                    " continues by itself",
                    retryable=True,
                    retry_after_s=_COME_BACK_S,
                )
        self._broken = JournalError(f"the journal {self._directory} cannot be written: {caught}", retryable=True)
        return self._broken

    def _cut_off(self) -> None:
        """Remove everything after the latest durable record."""
        segment, size = self._written
        if self._file >= 0:
            os.close(self._file)
            self._file, self._file_segment = -1, 0
        for number in self.segments():
            if number > segment:
                self._path(number).unlink()
        if size:
            os.truncate(self._path(segment), size)
        else:
            self._path(segment).unlink(missing_ok=True)

    def _settle(self, group: list[_Append], error: JournalError | None) -> None:
        """Resolve the callers' futures. Runs in the event loop."""
        if error is None:
            self._full = None
            for item in group:
                self._pending.popleft()
                if not item.future.done():
                    item.future.set_result(None)
            return
        if isinstance(error, JournalFullError):
            if self._full is None:
                log.error("the journal's disk is full", directory=str(self._directory))
            self._full, self._needed_bytes = error, size_of(part for item in group for part in item.data)
            self._epoch += 1
            self.segment, self._size = self._written
        # All pending records fail: those after a failed record must not become durable without it.
        failed, self._pending = self._pending, deque()
        for item in reversed(failed):
            if item.undo is not None:
                item.undo()
        for item in failed:
            if not item.future.done():
                item.future.set_exception(error)

    def _write(self, segment: int, data: Sequence[Buffer]) -> None:
        if segment != self._file_segment:
            if self._file >= 0:
                os.close(self._file)
                self._file, self._file_segment = -1, 0
            self._file = os.open(self._path(segment), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file_segment = segment
            if self._durability == "power_loss":
                directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)
        for piece in coalesced(data):
            write_all(self._file, piece, at_once=_WRITE_BYTES)
        if self._durability == "power_loss":
            try:
                os.fdatasync(self._file)
            except OSError as error:
                # The disk's state is unknown now; only a new process that reads the files again can find out.
                raise JournalError(
                    f"the journal {self._directory} cannot be written: {error}", retryable=True
                ) from error

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08d}.log"
