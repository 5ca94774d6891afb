"""`Execs`: submitted commands, each of which runs once even if it is sent again, and their records and output."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from nemo_gym.broker.backend import EXEC_VARIABLE, Backend
from nemo_gym.broker.box import Box, ExecRun, OutputSpool, SpoolSpace
from nemo_gym.broker.boxes import not_adopted, too_many_of_box
from nemo_gym.broker.registry import ExecRecord
from nemo_gym.broker.stores import ExecStore
from nemo_gym.contract.errors import NemoGymError, SandboxError, SandboxLostError
from nemo_gym.http.telemetry import Counter
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, SandboxHandle
from nemo_gym.sandbox.wire.models import ExecEndModel, ExecSubmission
from nemo_gym.sandbox.wire.problems import BrokerError

log = structlog.get_logger(__name__)

STARTED = Counter("sandbox_broker_execs", "Commands started")
MAX_OPEN_EXECS = 256
"""Limit per box. Each open exec uses descriptors of this process, and memory while it waits for its input."""
_KILL_PATIENCE_S = 10.0
_KEPT_ENDED = 32
"""Number of a box's ended execs that stay in memory; older ones are read from the registry on request."""


class Execs:
    """The execs of all boxes.

    Args:
        max_output_bytes: output kept per stream, even if a submission requests more.
    """

    def __init__(self, store: ExecStore, backend: Backend, space: SpoolSpace, *, max_output_bytes: int) -> None:
        self.store, self.backend, self.space = store, backend, space
        self._max_output_bytes = max_output_bytes

    async def submit(
        self,
        box: Box,
        handle: SandboxHandle,
        exec_id: str,
        submission: ExecSubmission,
        digest: bytes,
        lease_id: str | None = None,
    ) -> tuple[ExecRun, bool]:
        """Run a command, or find the existing run of this id; return the run, and whether it is new.

        Raises:
            BrokerError: ``exec_conflict`` if the id was used for another command; ``too_many_of_box``.
            SandboxError: the command could not be started; no part of it ran.
        """
        run = box.execs.get(exec_id)
        if run is not None:
            _require_same(run.record.body_digest, digest, exec_id)
            if run.started is not None:
                await asyncio.shield(run.started)
            return run, False
        if sum(run.end is None for run in box.execs.values()) >= MAX_OPEN_EXECS:
            raise too_many_of_box(box.sandbox_id, MAX_OPEN_EXECS, "unfinished commands; end some first")
        intent = ExecRecord(box.sandbox_id, exec_id, digest, time.time())
        spool = OutputSpool(self.space.directory(box.sandbox_id), exec_id)
        run = ExecRun(intent, spool, self.store, self.space, submission=submission, lease_id=lease_id)
        run.started = asyncio.get_running_loop().create_future()
        box.execs[exec_id] = run
        try:
            record = await self.store.insert(intent)
        except BaseException as error:
            self._never_started(box, run, error)
            raise
        # All unfinished commands of this box are in memory. So a record without an end is left over from a write that
        # was reported as failed, or whose caller was cancelled; no command was started for it.
        if record is not None and (record.end is not None or record.body_digest != digest):
            return self._resume_recorded(box, run, record), False
        if submission.stdin == "attached":
            run.phase = "awaiting_stdin"
            self._started(run)
            return run, True
        await asyncio.shield(asyncio.create_task(self._start(box, handle, run, None)))
        return run, True

    def _resume_recorded(self, box: Box, run: ExecRun, record: ExecRecord) -> ExecRun:
        """Return the run of an id that is already in the registry, from before a restart or no longer in memory."""
        if record.end is not None:
            run.end, run.phase = ExecEndModel.model_validate_json(record.end), "ended"
        submitted = run.record
        run.record = record
        run.spool = OutputSpool.load(self.space.directory(box.sandbox_id), run.exec_id)
        self._started(run)
        del box.execs[run.exec_id]
        _require_same(record.body_digest, submitted.body_digest, run.exec_id)
        return run

    async def attach_stdin(self, box: Box, handle: SandboxHandle, run: ExecRun, data: bytes) -> None:
        """Start a command that waits for its standard input. Does nothing if the command already has the same bytes,
        or ended in an earlier process of the broker. Raises `BrokerError` ``stdin_not_expected``."""
        stdin_digest = hashlib.sha256(data).digest()
        if run.stdin_digest == stdin_digest or (run.submission is None and run.end is not None):
            if run.started is not None:
                await asyncio.shield(run.started)
            return
        if run.phase != "awaiting_stdin":
            raise BrokerError("stdin_not_expected", f"exec '{run.exec_id}' is {run.phase}: it takes no standard input")
        run.phase, run.stdin_digest = "running", stdin_digest
        run.started = asyncio.get_running_loop().create_future()
        await asyncio.shield(asyncio.create_task(self._start(box, handle, run, data)))

    async def _start(self, box: Box, handle: SandboxHandle, run: ExecRun, stdin: bytes | None) -> None:
        assert run.submission is not None
        request = run.submission.to_request(stdin)
        env: Mapping[str, str] = {**request.env, EXEC_VARIABLE: run.exec_id}
        limit = min(request.max_output_bytes, self._max_output_bytes)
        try:
            process = await self.backend.provider.start_exec(handle, replace(request, env=env, max_output_bytes=limit))
        except SandboxLostError:
            await run.finish(ExecEnd(ExecOutcome.LOST))
            self._started(run)
            return
        except (NemoGymError, OSError) as error:
            if isinstance(error, OSError):  # the host has no descriptors or memory left
                detail = f"the broker's host cannot start a command: {error.strerror}"
                client_error: NemoGymError = SandboxError(detail, retryable=True)
            else:
                client_error = await self.backend.judged(error, handle) if isinstance(error, SandboxError) else error
            try:
                await self.store.discard(box.sandbox_id, run.exec_id)
            except NemoGymError as failure:  # the intent stays recorded; it has no effect until it is submitted again
                log.warning("exec_not_discarded", exec_id=run.exec_id, error=str(failure))
            self._never_started(box, run, client_error)
            raise client_error from error
        except Exception:
            # A provider's own code may raise anything; whether the command runs is then unknown.
            log.exception("exec_lost", sandbox_id=box.sandbox_id, exec_id=run.exec_id)
            await run.finish(ExecEnd(ExecOutcome.LOST))
            self._started(run)
            return
        STARTED.add()
        run.pump(process)
        assert run.pumping is not None
        run.pumping.add_done_callback(lambda _: self._trim(box))
        self._started(run)

    @staticmethod
    def _started(run: ExecRun) -> None:
        if run.started is not None and not run.started.done():
            run.started.set_result(None)

    @staticmethod
    def _never_started(box: Box, run: ExecRun, error: BaseException) -> None:
        box.execs.pop(run.exec_id, None)
        if run.started is not None and not run.started.done():
            if isinstance(error, NemoGymError):
                run.started.set_exception(error)
                run.started.exception()  # mark it as retrieved, because there may be no waiter
            else:
                run.started.cancel()

    @staticmethod
    def _trim(box: Box) -> None:
        ended = [run for run in box.execs.values() if run.phase == "ended"]
        for run in ended[:-_KEPT_ENDED]:
            del box.execs[run.exec_id]

    async def signal(self, run: ExecRun, number: int) -> None:
        """Signal a command, unless it has ended. A command that still waits for its standard input never starts."""
        if run.phase == "awaiting_stdin":
            await run.finish(ExecEnd(ExecOutcome.SIGNALED, signal=number))
            return
        if run.started is not None:
            await asyncio.wait({run.started})  # a command that is being started has its process after this
        if run.process is not None:
            await run.process.signal(number)

    async def end_execs_of(self, box: Box, lease_ids: set[str]) -> None:
        """Kill the commands of revoked leases, and wait for their ends."""
        runs = [run for run in box.execs.values() if run.lease_id in lease_ids and run.end is None]
        for run in runs:
            try:
                await self.signal(run, signal.SIGKILL)
            except SandboxError as error:
                log.warning("exec_not_killed", sandbox_id=box.sandbox_id, exec_id=run.exec_id, error=str(error)[:300])
        await asyncio.gather(*(run.ended(_KILL_PATIENCE_S) for run in runs))

    # -- reading -------------------------------------------------------------------------------------------------

    async def find(self, sandbox_id: str, box: Box | None, exec_id: str) -> ExecRun:
        """Return an exec of a live or gone box. Raises `BrokerError` ``exec_not_found``, or
        ``backend_unreachable`` for a box that reconciliation has not taken over yet."""
        run = box.execs.get(exec_id) if box is not None else None
        if run is not None:
            return run
        record = await self.store.find(sandbox_id, exec_id)
        if record is None:
            raise _not_found(sandbox_id, exec_id)
        run = box.execs.get(exec_id) if box is not None else None
        if run is not None:
            return run
        if record.end is None and box is not None:
            if box.adopting:  # the command's end is known once the box is taken over
                raise not_adopted(f"box '{sandbox_id}'")
            # It is left over from a write that was reported as failed; no command was started for it.
            raise _not_found(sandbox_id, exec_id)
        end = ExecEndModel.model_validate_json(record.end) if record.end is not None else None
        spool = OutputSpool.load(self.space.directory(sandbox_id), exec_id)
        if end is None:
            end = ExecEndModel.of(ExecEnd(ExecOutcome.LOST), output_bytes=spool.size)
        return ExecRun(record, spool, self.store, self.space, end=end)

    # -- after a restart -----------------------------------------------------------------------------------------

    async def recover(self, box: Box, handle: SandboxHandle | None) -> None:
        """Record as lost the commands that an earlier process of the broker left without an end, because their results
        are unknown. Those that still run are killed first."""
        unfinished = await self.store.unfinished(box.sandbox_id)
        if unfinished and handle is not None:
            await self.backend.kill_strays(handle, [record.exec_id for record in unfinished])
        for record in unfinished:
            spool = OutputSpool.load(self.space.directory(box.sandbox_id), record.exec_id)
            end = ExecEndModel.of(ExecEnd(ExecOutcome.LOST), output_bytes=spool.size)
            await self.store.end(replace(record, end=end.model_dump_json().encode()))


def _not_found(sandbox_id: str, exec_id: str) -> BrokerError:
    return BrokerError("exec_not_found", f"box '{sandbox_id}' has no exec '{exec_id}'", exec_id=exec_id)


def _require_same(recorded: bytes, submitted: bytes, exec_id: str) -> None:
    if recorded != submitted:
        raise BrokerError(
            "exec_conflict",
            f"exec id '{exec_id}' was used for another command of this box; an exec id is bound to one"
            " command permanently",
            exec_id=exec_id,
        )
