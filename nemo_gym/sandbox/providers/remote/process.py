"""Commands and archives of a box behind a broker. A command's output stream survives broken connections."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp
import structlog

from nemo_gym._util.tasks import BackgroundTasks
from nemo_gym.contract.errors import NemoGymError, SandboxError, SandboxLostError
from nemo_gym.sandbox import wire
from nemo_gym.sandbox.base import ExecEnd, ExecOutcome, ExecOutput, ExecRequest, absolute
from nemo_gym.sandbox.providers.remote.connection import (
    BrokerConnection,
    BrokerUnreachableError,
    DoorCounts,
    RemoteBox,
    SourceError,
    refusals,
    retries,
)
from nemo_gym.sandbox.wire.frames import PING_INTERVAL_S, FrameError, FrameParser
from nemo_gym.sandbox.wire.models import ExecSubmission, SignalExec
from nemo_gym.sandbox.wire.problems import error_of, parse_problem

# -- Commands ------------------------------------------------------------------------------------------------------

log = structlog.get_logger(__name__)

_SILENCE_S = 3 * PING_INTERVAL_S
_KILL_PATIENCE_S = 10.0
"""For how long a command whose submission was interrupted may still arrive at the broker."""
_FRAMES = {"Accept": wire.OCTET_STREAM}


class RemoteProcess:
    """A running command (`nemo_gym.sandbox.base.ExecProcess`).

    Args:
        doors: refreshed after the command has ended and before its end is yielded.
        background: runs work for which no caller waits.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        box: RemoteBox,
        request: ExecRequest,
        *,
        doors: DoorCounts,
        background: BackgroundTasks,
    ) -> None:
        self.exec_id = f"e-{uuid.uuid4().hex}"
        self.truncated: set[str] = set()
        """Streams whose output was cut."""
        with refusals():
            self._submission = ExecSubmission.of(request)
        self._stdin = request.stdin
        self._connection, self._box = connection, box
        self._doors, self._background = doors, background
        self._offset = 0
        self._end: ExecEnd | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._opened = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Submit the command. Raises `SandboxLostError` if the box or its broker is gone; as far as is known, nothing
        runs then. If this call is cancelled, the command is killed in case it started."""
        try:
            if self._stdin is not None:
                await self._ask("PUT", body=self._submission)
                await self._ask("PUT", "stdin", body=self._stdin)
            await self._open(self._connection.patience_s)
        except BrokerUnreachableError as error:
            self.abandon()
            raise SandboxLostError(str(error), **error.details) from error
        except BaseException as error:
            if not (isinstance(error, NemoGymError) and error.details.get("started") == "no"):
                self.abandon()
            raise

    async def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]:
        """Yield the output in order of arrival, then the end. Stopping early kills the command."""
        try:
            if self._end is None:
                async with contextlib.aclosing(self._resumed()) as output:
                    async for piece in output:
                        yield piece
                self._end = self._end or ExecEnd(ExecOutcome.LOST)
                await self._doors.refresh(self._box)
            yield self._end
        finally:
            await self._opened.aclose()
            if self._end is None:
                self.abandon()

    async def signal(self, number: int) -> None:
        """Send a signal to the command's whole process tree."""
        if self._end is None:
            with refusals():
                body = SignalExec(signal=int(number))
            # Sending a signal twice differs from sending it once, except for SIGKILL.
            await self._ask("POST", "signal", body=body, repeatable=number == signal.SIGKILL)

    async def kill(self) -> None:
        """Kill the whole process tree; idempotent."""
        with contextlib.suppress(SandboxLostError):
            await self.signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Kill the command without waiting."""
        self._background.start(self._kill_wherever_it_is())

    async def _kill_wherever_it_is(self) -> None:
        backoff = retries(_KILL_PATIENCE_S)
        while True:
            try:
                await self.kill()
                return
            except NemoGymError as error:
                arrives_later = error.details.get("problem") == "exec_not_found"
                if not arrives_later or not await backoff.again():
                    log.info("remote_exec_not_killed", exec_id=self.exec_id, error=str(error))
                    return

    async def _resumed(self) -> AsyncGenerator[ExecOutput, None]:
        """Yield all output, over as many connections as needed. Afterwards `_end` is set, unless the exec is lost."""
        backoff = retries(self._connection.patience_s)
        while True:
            before = self._offset
            try:
                if self._response is None:
                    await self._open(max(backoff.left_s, 0))
                async with contextlib.aclosing(self._read_connection()) as output:
                    async for piece in output:
                        yield piece
                if self._end is not None:
                    return
            except (SandboxLostError, BrokerUnreachableError) as error:
                log.warning("remote_exec_lost", exec_id=self.exec_id, error=str(error))
                return
            except (aiohttp.ClientError, TimeoutError, ConnectionError, FrameError) as error:
                log.info("remote_output_resumed", exec_id=self.exec_id, offset=self._offset, error=str(error))
            except SandboxError as error:
                if not error.retryable:
                    log.warning("remote_exec_lost", exec_id=self.exec_id, error=str(error))
                    return
            await self._opened.aclose()
            self._response = None
            if self._offset > before:
                backoff = retries(self._connection.patience_s)
            if not await backoff.again():
                return

    async def _read_connection(self) -> AsyncGenerator[ExecOutput, None]:
        assert self._response is not None
        parser = FrameParser()
        async for data in self._response.content.iter_any():
            for frame in parser.feed(data):
                output = frame.output
                if output is not None:
                    self._offset += len(output.data)
                    yield output
                elif (end := frame.end) is not None:
                    if end.output_bytes != self._offset:
                        raise FrameError(
                            f"an exec ended after {end.output_bytes} bytes of output, but {self._offset} were received"
                        )
                    self.truncated, self._end = set(end.truncated), end.to_end()
        if self._end is None:
            raise FrameError("the output stream of an exec ended without an exit frame")

    async def _open(self, patience_s: float) -> None:
        """Connect to the output from `_offset` on. Without standard input, this submits the exec, which the broker
        runs only once, however often it is submitted."""
        has_stdin = self._stdin is not None
        opening = self._connection.open(
            "GET" if has_stdin else "PUT",
            self._box.url("execs", self.exec_id, *(["output"] if has_stdin else [])),
            headers={**self._box.headers, **_FRAMES},
            query={"offset": str(self._offset)} if self._offset else None,
            body=None if has_stdin else self._submission,
            repeatable=True,
            silence_s=_SILENCE_S,
            patience_s=patience_s,
        )
        self._response = await self._opened.enter_async_context(opening)

    async def _ask(self, method: str, *parts: str, **options: Any) -> None:
        await self._connection.ask_box(self._box, method, "execs", self.exec_id, *parts, **options)


# -- Archives ------------------------------------------------------------------------------------------------------


async def put(connection: BrokerConnection, box: RemoteBox, path: str, tar: AsyncIterator[bytes]) -> None:
    """See `SandboxProvider.put_archive`. The request is not retried once reading ``tar`` has begun."""
    with _lost_when_unreachable():
        try:
            query = {"path": absolute(path)}
            await connection.ask_box(box, "PUT", "archive", query=query, stream=lambda: tar, repeatable=False)
        except SourceError as source_error:
            raise source_error.error from None


async def get(
    connection: BrokerConnection, box: RemoteBox, path: str, *, exclude: Sequence[str], max_bytes: int | None
) -> AsyncIterator[bytes]:
    """See `SandboxProvider.get_archive`."""
    query = [("path", absolute(path)), *(("exclude", item) for item in exclude)]
    if max_bytes is not None:
        query.append(("max_bytes", str(max_bytes)))
    request_id = uuid.uuid4().hex
    with _lost_when_unreachable():
        opening = connection.open(
            "GET",
            box.url("archive"),
            headers={**box.headers, "Accept": wire.TAR, wire.REQUEST_ID_HEADER: request_id},
            query=query,
            repeatable=True,
        )
        try:
            async with opening as response:
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise await _archive_error(connection, box, path, request_id, error) from error


async def _archive_error(
    connection: BrokerConnection, box: RemoteBox, path: str, request_id: str, cause: BaseException
) -> NemoGymError:
    """Ask the broker why an archive broke off. A response that has begun can no longer report an error itself."""
    try:
        answer = await connection.ask_box(box, "GET", "archive", "failure", query={"request_id": request_id})
    except NemoGymError:
        return SandboxLostError(f"the archive of {path} broke off ({type(cause).__name__})", retryable=True)
    return error_of(parse_problem(500, answer))


@contextlib.contextmanager
def _lost_when_unreachable() -> Iterator[None]:
    try:
        yield
    except BrokerUnreachableError as error:
        raise SandboxLostError(str(error), retryable=True, **error.details) from error
