"""What follows from a provider's streams: whole commands from streamed ones, single files from archives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from nemo_gym.sandbox.base import DEFAULT_MAX_OUTPUT_BYTES, ExecRequest, SandboxExecResult, SandboxHandle
from nemo_gym.sandbox.outputs import CappedProcess, run_to_end
from nemo_gym.sandbox.transfer import download, upload


class StreamingProvider(ABC):
    """Base of providers whose commands and archives stream; the rest of `nemo_gym.sandbox.base.SandboxProvider` is
    theirs. What each method promises stands there."""

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
        request = ExecRequest(command, cwd, env or {}, timeout_s, user, stdin, merge_stderr, max_output_bytes)
        return await run_to_end(self.start_exec(handle, request))

    async def upload_file(self, handle: SandboxHandle, source: Path, target: str) -> None:
        await upload(self, handle, source, target)

    async def download_file(self, handle: SandboxHandle, source: str, target: Path) -> None:
        await download(self, handle, source, target)
