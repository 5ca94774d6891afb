"""`StreamingProvider`: whole commands from streamed ones, and single files from archives."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from nemo_gym.contract.errors import SandboxArchiveError, SandboxError, SandboxLostError
from nemo_gym.sandbox.archive import pack
from nemo_gym.sandbox.base import (
    DEFAULT_MAX_OUTPUT_BYTES,
    ExecEnd,
    ExecOutcome,
    ExecOutput,
    ExecRequest,
    SandboxExecResult,
    SandboxHandle,
    absolute,
)
from nemo_gym.sandbox.tar_stream import ArchiveError, single_file

ERROR_TYPES = {
    ExecOutcome.EXITED: None,
    ExecOutcome.SIGNALED: "signal",
    ExecOutcome.TIMED_OUT: "timeout",
    ExecOutcome.OUT_OF_MEMORY: "oom",
    ExecOutcome.LOST: "lost",
}
"""NeMo Gym's spelling of each outcome."""


class CappedProcess(Protocol):
    """The part of `nemo_gym.sandbox.base.ExecProcess` that this module uses, plus ``truncated``."""

    truncated: set[str]
    """The streams whose output exceeded the cap; valid once the command has ended."""

    def events(self) -> AsyncGenerator[ExecOutput | ExecEnd, None]: ...


class StreamingProvider(ABC):
    """Base class of providers whose commands and archives stream. Subclasses implement the abstract methods and the
    rest of `nemo_gym.sandbox.base.SandboxProvider`, which documents every method."""

    @abstractmethod
    async def start_exec(self, handle: SandboxHandle, request: ExecRequest) -> CappedProcess: ...

    @abstractmethod
    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None: ...

    @abstractmethod
    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]: ...

    async def exec(
        self,
        handle: SandboxHandle,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
    ) -> SandboxExecResult:
        """Run a command to its end. The outcome is ``LOST`` if the box is lost before the command starts or while it
        runs."""
        request = ExecRequest(command, cwd, env or {}, timeout_s, user, stdin, merge_stderr, max_output_bytes)
        output = {"stdout": bytearray(), "stderr": bytearray()}
        end = ExecEnd(ExecOutcome.LOST)
        truncated: set[str] = set()
        try:
            process = await self.start_exec(handle, request)
        except SandboxLostError:
            pass
        else:
            async with contextlib.aclosing(process.events()) as events:
                async for event in events:
                    if isinstance(event, ExecOutput):
                        output[event.stream] += event.data
                    else:
                        end = event
            truncated = process.truncated
        return SandboxExecResult(
            stdout=output["stdout"].decode("utf-8", "surrogateescape"),
            stderr=output["stderr"].decode("utf-8", "surrogateescape"),
            return_code=end.return_code,
            error_type=ERROR_TYPES[end.outcome],
            outcome=end.outcome,
            signal=end.signal,
            duration_s=end.duration_s,
            stdout_truncated="stdout" in truncated,
            stderr_truncated="stderr" in truncated,
        )

    async def upload_file(self, handle: SandboxHandle, source: Path, target: str) -> None:
        """Copy a host file (links are followed) to ``target`` in the box, with its mode, replacing what is there."""
        parent, _, name = absolute(target).rpartition("/")
        if not name:
            raise SandboxError(f"'{target}' does not name a file")
        if not await asyncio.to_thread(source.is_file):
            raise SandboxError(f"'{source}' is not a file of this host")
        packed = pack(source.resolve(), name=name, owner=self._owner_of_uploads(handle))
        await self.put_archive(handle, parent or "/", _in_thread(packed))

    def _owner_of_uploads(self, handle: SandboxHandle) -> int | None:
        """User and group id that `upload_file` gives a file; ``None`` keeps the host file's, if unpacking does."""
        return None

    async def download_file(self, handle: SandboxHandle, source: str, target: Path) -> None:
        """Copy a regular file of the box to ``target`` on this host, atomically.

        Raises:
            SandboxArchiveError: ``source`` is not a regular file, or its stream was damaged.
            SandboxError: there is no such file.
        """
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            async with contextlib.aclosing(single_file(self.get_archive(handle, source))) as pieces:
                await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
                with await asyncio.to_thread(partial.open, "wb") as file:
                    async for piece in pieces:
                        await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(partial.replace, target)
        except ArchiveError as error:
            raise SandboxArchiveError(f"downloading {source}: {error}") from error
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)


async def _in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate asynchronously over a blocking iterator, whose steps run in threads."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
