"""One box of the broker: the order that created it, its state in memory, its commands, and their output on disk."""

from __future__ import annotations

import asyncio
import bisect
import os
import signal
import struct
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import structlog

from nemo_gym._util.files import write_all
from nemo_gym._util.tasks import Backoff
from nemo_gym.broker.registry import BoxRecord, BoxState, ExecRecord, LeaseRecord
from nemo_gym.broker.stores import ExecStore
from nemo_gym.contract.credentials import Caller, Role
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.contract.session import LeaseScope
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecProcess, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.wire.models import (
    CreateSandbox,
    ExecEndModel,
    ExecSubmission,
    ExecView,
    LeaseView,
    SandboxView,
    TerminationReason,
)

# -- Output of commands --------------------------------------------------------------------------------------------

Stream = Literal["stdout", "stderr"]
_ENTRY = struct.Struct(">BQ")
_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_STREAMS: dict[int, Stream] = {number: stream for stream, number in _NUMBERS.items()}
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class OutputSpool:
    """Output of one exec on disk: the bytes in arrival order, and an index of the stream to which they belong.

    Appended to by one writer; read from any offset by any number of readers. An index entry is written before its
    bytes, so that the files of a killed broker are readable. An offset counts the bytes of both streams in arrival
    order (`nemo_gym.sandbox.wire.frames`).
    """

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


# -- Orders --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateOrder:
    """A checked request to create a box: its caller, idempotency key and body."""

    creator: str
    creator_role: Role
    owner: str
    key: str
    digest: bytes
    ttl_s: float
    body: CreateSandbox


# -- Commands ------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)
_WRITE_RETRY_S = 1.0
_END_PATIENCE_S = 30.0
"""How long to wait after a box is gone for the backend to report how its commands ended."""

ExecPhase = Literal["awaiting_stdin", "running", "ended"]


class ExecRun:
    """An exec of a box. `pump` is its only writer; readers wait for `changed`."""

    def __init__(
        self,
        record: ExecRecord,
        spool: OutputSpool,
        store: ExecStore,
        space: SpoolSpace,
        *,
        submission: ExecSubmission | None = None,
        lease_id: str | None = None,
        end: ExecEndModel | None = None,
    ) -> None:
        self.record = record
        self.sandbox_id, self.exec_id = record.sandbox_id, record.exec_id
        self.submission = submission
        self.spool, self._store, self._space = spool, store, space
        self.end = end
        self.process: ExecProcess | None = None
        self.phase: ExecPhase = "running" if end is None else "ended"
        self.started: asyncio.Future[None] | None = None
        """Resolves once the command runs, or with the error that prevented it from starting."""
        self.pumping: asyncio.Task[None] | None = None
        self.lease_id = lease_id
        """The lease with which the command was submitted."""
        self.stdin_digest: bytes | None = None
        """Digest of the standard input that the command received."""
        self._waiters: list[asyncio.Future[bool]] = []

    @property
    def size(self) -> int:
        """Bytes of output so far."""
        return self.spool.size

    def view(self) -> ExecView:
        return ExecView(
            exec_id=self.exec_id,
            state=self.phase,
            output_bytes=self.size,
            submitted_at=self.record.submitted_at,
            end=self.end,
        )

    async def changed(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for more output or the end; return whether either came."""
        # Not with asyncio.Event and asyncio.timeout: they would create several times as many objects per command.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _resolve, waiter, False)
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def ended(self, timeout_s: float, unless: asyncio.Event | None = None) -> bool:
        """Wait at most ``timeout_s`` seconds, or until ``unless`` is set, for the end; return whether it came."""
        deadline = time.monotonic() + timeout_s
        while self.end is None and (left_s := deadline - time.monotonic()) > 0:
            if unless is not None and unless.is_set():
                break
            await self.changed(left_s)
        return self.end is not None

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _resolve(waiter, True)

    # -- writing -------------------------------------------------------------------------------------------------

    def pump(self, process: ExecProcess) -> None:
        """Start a task that reads the command's output until its end."""
        self.process, self.phase = process, "running"
        self.pumping = asyncio.create_task(self._pump(process), name=f"pump {self.exec_id[:40]}")

    async def _pump(self, process: ExecProcess) -> None:
        end = ExecEnd(ExecOutcome.LOST)
        is_lost = False
        try:
            async for event in process.events():
                if not isinstance(event, ExecOutput):
                    end = event
                elif not is_lost and not self._keep(event):
                    # The broker lost output. Report the command as lost, so that nobody judges a successful command
                    # by half of its output.
                    is_lost = True
                    await process.signal(signal.SIGKILL)
        except NemoGymError as error:
            log.info("exec_lost", sandbox_id=self.sandbox_id, exec_id=self.exec_id, error=str(error)[:500])
        except Exception:
            # A provider's own code may raise anything; the command's end is then unknown.
            log.exception("exec_lost", sandbox_id=self.sandbox_id, exec_id=self.exec_id)
        cut: set[Stream] = set(getattr(process, "truncated", set()))
        await self.finish(ExecEnd(ExecOutcome.LOST) if is_lost else end, truncated=tuple(sorted(cut)))

    def _keep(self, event: ExecOutput) -> bool:
        try:
            self.spool.append(event.stream, event.data)
        except OSError as error:
            log.warning("spool_write_failed", sandbox_id=self.sandbox_id, exec_id=self.exec_id, error=str(error))
            return False
        self._space.grew(len(event.data))
        self.notify()
        return True

    async def finish(self, end: ExecEnd, *, truncated: tuple[Stream, ...] = ()) -> None:
        """Record the end. Readers see it only once it is durable."""
        if self.end is not None:
            return
        if end.outcome is not ExecOutcome.EXITED:
            # A provider may report the exit code of a shell whose child was killed; it is not the command's.
            end = replace(end, return_code=None)
        end_model = ExecEndModel.of(end, output_bytes=self.size, truncated=truncated)
        record = replace(self.record, end=end_model.model_dump_json().encode())
        backoff = Backoff(first_s=_WRITE_RETRY_S, factor=1)
        while True:
            try:
                await self._store.end(record)
                break
            except NemoGymError as error:
                log.warning("exec_end_not_written", exec_id=self.exec_id, error=str(error))
                await backoff.again()
        self.spool.close()
        self.end, self.phase, self.process = end_model, "ended", None
        self._space.ended(self.sandbox_id, self.exec_id, self.size)
        self.notify()

    async def box_ended(self) -> None:
        """Wait for the end, now that the box is gone. If the backend does not report one, record it as lost."""
        if self.pumping is not None:
            await asyncio.wait({self.pumping}, timeout=_END_PATIENCE_S)
            self.pumping.cancel()
        await self.finish(ExecEnd(ExecOutcome.LOST))


def _resolve(waiter: asyncio.Future[bool], has_changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(has_changed)


# -- Box -----------------------------------------------------------------------------------------------------------

_STATUS = {
    BoxState.CREATING: SandboxStatus.STARTING,
    BoxState.RUNNING: SandboxStatus.RUNNING,
    BoxState.CLOSING: SandboxStatus.STOPPED,
    BoxState.GONE: SandboxStatus.STOPPED,
}


@dataclass(slots=True, eq=False)
class Box:
    """A box that is not gone. The registry holds everything about it that must survive this process."""

    sandbox_id: str
    creator: str
    """Name of the caller that requested it."""
    creator_role: Role
    owner: str
    """Name whose quota it counts against."""
    idempotency_key: str | None
    body_digest: bytes
    state: BoxState
    created_at: float
    ttl_s: float
    deadline: float
    """When its lease ends, on the monotonic clock, because the wall clock may jump."""
    labels: Mapping[str, str]
    epoch: int
    image: str | None
    leases: dict[str, LeaseRecord]
    reason: str | None = None
    overrun: str | None = None
    """What it exceeded so that its backend ended it."""
    handle: SandboxHandle | None = None
    creating: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    adopting: bool = False
    """Loaded from the registry after a restart, and not yet looked up in the backend."""
    interrupted: bool = False
    """Its create was interrupted and started again. A backend without idempotent create may then have two boxes."""
    execs: dict[str, ExecRun] = field(default_factory=dict)
    doors: dict[str, bytes] = field(default_factory=dict)
    """Name → digest of each open door."""
    doors_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease_deadlines: dict[str, float] = field(default_factory=dict)
    """Lease id → when the lease ends, on the monotonic clock; only leases that have their own ``expires_at``."""

    @classmethod
    def of(cls, record: BoxRecord, leases: list[LeaseRecord]) -> Box:
        """Build a box from its registry record. The remaining lease counts from now; it is capped at the full lease,
        in case the wall clock has jumped back."""
        left_s = min(record.expires_at - time.time(), record.ttl_s)
        box = cls(
            sandbox_id=record.sandbox_id,
            creator=record.creator,
            # A release without roles wrote a record without one; its creator's role is unknown, so assume the weakest.
            creator_role=record.creator_role or Role.AGENT,
            owner=record.owner,
            idempotency_key=record.idempotency_key,
            body_digest=record.body_digest,
            state=record.state,
            created_at=record.created_at,
            ttl_s=record.ttl_s,
            deadline=time.monotonic() + left_s,
            labels=record.labels,
            epoch=record.epoch,
            image=record.image,
            leases={lease.lease_id: lease for lease in leases},
            reason=record.reason,
        )
        for lease in leases:
            box.lease_left_s(lease)
        return box

    @property
    def made_by(self) -> Caller:
        return Caller(self.creator_role, self.creator)

    @property
    def ready(self) -> bool:
        return self.state is BoxState.RUNNING and self.handle is not None

    @property
    def left_s(self) -> float:
        """Seconds until its lease ends."""
        return self.deadline - time.monotonic()

    @property
    def expires_at(self) -> float:
        return time.time() + self.left_s

    @property
    def owner_lease(self) -> LeaseRecord:
        return next(lease for lease in self.leases.values() if lease.scope is LeaseScope.OWNER)

    def lease_left_s(self, lease: LeaseRecord) -> float:
        """Seconds until a lease of this box ends: at its own end or the box's, whichever comes first. Its own end is
        converted to the monotonic clock when this process first sees the lease."""
        if lease.expires_at is None:
            return self.left_s
        now = time.monotonic()
        own_left_s = self.lease_deadlines.setdefault(lease.lease_id, now + lease.expires_at - time.time()) - now
        return min(own_left_s, self.left_s)

    def lease_has_ended(self, lease: LeaseRecord) -> bool:
        """Return whether the lease ended while the box lives on. The end of the box itself does not count."""
        return lease.expires_at is not None and self.lease_left_s(lease) <= 0 < self.left_s

    def view(self, provider: str) -> SandboxView:
        return SandboxView(
            sandbox_id=self.sandbox_id,
            state=_STATUS[self.state],
            ready=self.ready,
            termination_reason=cast("TerminationReason | None", self.reason),
            overrun=self.overrun,
            labels=dict(self.labels),
            provider=provider,
            image=self.image,
            epoch=self.epoch,
            created_at=self.created_at,
            expires_at=self.expires_at,
        )

    def lease_view(self, lease: LeaseRecord, token: str | None = None) -> LeaseView:
        left_s = max(0.0, self.lease_left_s(lease))
        return LeaseView(
            lease_id=lease.lease_id,
            sandbox_id=self.sandbox_id,
            scope=lease.scope,
            epoch=lease.epoch,
            expires_at=time.time() + left_s,
            ttl_s=left_s,
            token=token,
        )


def gone_view(record: BoxRecord, provider: str) -> SandboxView:
    """Return the view of a box that is gone, from its record."""
    return SandboxView(
        sandbox_id=record.sandbox_id,
        state=SandboxStatus.ERROR if record.reason == "create_failed" else SandboxStatus.STOPPED,
        ready=False,
        termination_reason=cast("TerminationReason | None", record.reason),
        overrun=record.detail if record.reason == "overrun" else None,
        labels=dict(record.labels),
        provider=provider,
        image=record.image,
        epoch=record.epoch,
        created_at=record.created_at,
        expires_at=record.expires_at,
    )
