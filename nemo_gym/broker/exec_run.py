"""One exec: what was asked for, its output so far, and its one end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Literal

import structlog

from nemo_gym._util.backoff import Backoff
from nemo_gym.broker.registry.execs import ExecStore
from nemo_gym.broker.registry.records import ExecRecord
from nemo_gym.broker.spool import OutputSpool, SpoolSpace, Stream
from nemo_gym.contract.errors import NemoGymError
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecProcess
from nemo_gym.sandbox.wire.execs import ExecEndModel, ExecSubmission, ExecView

log = structlog.get_logger(__name__)
_WRITE_RETRY_S = 1.0
_END_PATIENCE_S = 30.0
"""How long a closed box's command may take to be reported as lost by the backend."""

ExecPhase = Literal["awaiting_stdin", "running", "ended"]


class ExecRun:
    """An exec of a box. `pump` is its only writer; readers wait for `changed`."""

    def __init__(
        self,
        sandbox_id: str,
        exec_id: str,
        digest: bytes,
        spool: OutputSpool,
        store: ExecStore,
        space: SpoolSpace,
        *,
        submitted_at: float,
        submission: ExecSubmission | None = None,
        end: ExecEndModel | None = None,
    ) -> None:
        self.sandbox_id, self.exec_id, self.digest = sandbox_id, exec_id, digest
        self.submission = submission
        self.spool, self._store, self._space = spool, store, space
        self.end = end
        self.process: ExecProcess | None = None
        self.phase: ExecPhase = "running" if end is None else "ended"
        self.started: asyncio.Future[None] | None = None
        """Resolves once the command runs, or with the error because of which it never will."""
        self.submitted_at = submitted_at
        self.pumping: asyncio.Task[None] | None = None
        self.lease_id: str | None = None
        """By which it was submitted."""
        self.stdin_digest: bytes | None = None
        """Of the standard input that it was given."""
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
            submitted_at=self.submitted_at,
            end=self.end,
        )

    async def changed(self, timeout_s: float) -> bool:
        """Wait for more output or the end; whether there was any within ``timeout_s`` seconds."""
        # By hand: an event and a timeout make several times as many objects, for every command.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _answer, waiter, False)
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    async def ended(self, timeout_s: float, unless: asyncio.Event | None = None) -> bool:
        """Wait for the end; whether it has come within ``timeout_s`` seconds, or before ``unless`` was set."""
        deadline = time.monotonic() + timeout_s
        while self.end is None and (left_s := deadline - time.monotonic()) > 0:
            if unless is not None and unless.is_set():
                break
            await self.changed(left_s)
        return self.end is not None

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _answer(waiter, True)

    # -- writing -------------------------------------------------------------------------------------------------

    def pump(self, process: ExecProcess) -> None:
        """Take the command's output until its end, in a task of its own."""
        self.process, self.phase = process, "running"
        self.pumping = asyncio.create_task(self._pump(process), name=f"pump {self.exec_id[:40]}")

    async def _pump(self, process: ExecProcess) -> None:
        end = ExecEnd(ExecOutcome.LOST)
        cut: set[Stream] = set()
        try:
            async for event in process.events():
                if isinstance(event, ExecOutput):
                    if event.stream not in cut and not self._keep(event):
                        cut.add(event.stream)
                else:
                    end = event
        except NemoGymError as error:
            log.info("exec_lost", sandbox_id=self.sandbox_id, exec_id=self.exec_id, error=str(error)[:500])
        except Exception:
            # The boundary of a provider's own code: whatever it raises, nobody knows how the command ends.
            log.exception("exec_lost", sandbox_id=self.sandbox_id, exec_id=self.exec_id)
        cut |= getattr(process, "truncated", set())
        await self.finish(end, truncated=tuple(sorted(cut)))

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
        """Record the end, and tell it to nobody before it is durable."""
        if self.end is not None:
            return
        if end.outcome is not ExecOutcome.EXITED:
            # A provider may know the code of a shell that failed of its child's death; it is not the outcome.
            end = replace(end, return_code=None)
        said = ExecEndModel.of(end, output_bytes=self.size, truncated=truncated)
        written = said.model_dump_json().encode()
        record = ExecRecord(self.sandbox_id, self.exec_id, self.digest, self.submitted_at, written)
        backoff = Backoff(first_s=_WRITE_RETRY_S, factor=1)
        while True:
            try:
                await self._store.end(record)
                break
            except NemoGymError as error:
                log.warning("exec_end_not_written", exec_id=self.exec_id, error=str(error))
                await backoff.again()
        self.spool.close()
        self.end, self.phase, self.process = said, "ended", None
        self._space.ended(self.sandbox_id, self.exec_id, self.size)
        self.notify()

    async def box_ended(self) -> None:
        """Wait until the end is known, now that the box is gone; without word from the backend it is lost."""
        if self.pumping is not None:
            await asyncio.wait({self.pumping}, timeout=_END_PATIENCE_S)
            self.pumping.cancel()
        await self.finish(ExecEnd(ExecOutcome.LOST))


def _answer(waiter: asyncio.Future[bool], answer: bool) -> None:
    if not waiter.done():
        waiter.set_result(answer)
