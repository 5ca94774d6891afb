"""`Sandbox`: the same object for programs without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from nemo_gym.contract.errors import SandboxError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxExecResult, SandboxProvider, SandboxStatus
from nemo_gym.sandbox.facade import DEFAULT_EXEC_TIMEOUT_S, AsyncSandbox

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread. All `Sandbox` objects of a process share one: providers belong to a loop."""

    _shared: LoopThread | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="sandbox-loop", daemon=True).start()

    @classmethod
    def shared(cls) -> LoopThread:
        with cls._lock:
            # A forked child has the object but not the thread.
            if cls._shared is None or cls._shared._pid != os.getpid():
                cls._shared = cls()
            return cls._shared

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end on the loop; interrupting the caller cancels the work.

        Raises:
            SandboxError: called from a running event loop, which this would block.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            work.close()
            raise SandboxError("Sandbox blocks its thread and this one runs an event loop; use AsyncSandbox here")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise


class Sandbox:
    """`AsyncSandbox` without ``await``; arguments and errors are the same."""

    def __init__(self, provider: SandboxProvider | Mapping[str, Any] | str, spec: SandboxSpec | None = None) -> None:
        self._loop = LoopThread.shared()

        async def make() -> AsyncSandbox:
            return AsyncSandbox(provider, spec)

        self._box = self._loop.run(make())

    def start(self, spec: SandboxSpec | None = None) -> Self:
        self._loop.run(self._box.start(spec))
        return self

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_EXEC_TIMEOUT_S,
        user: str | None = None,
        stdin: bytes | None = None,
        merge_stderr: bool = False,
    ) -> SandboxExecResult:
        return self._loop.run(
            self._box.exec(
                command, cwd=cwd, env=env, timeout_s=timeout_s, user=user, stdin=stdin, merge_stderr=merge_stderr
            )
        )

    def upload(self, local_path: Path | str, remote_path: str) -> None:
        self._loop.run(self._box.upload(local_path, remote_path))

    def download(self, remote_path: str, local_path: Path | str) -> None:
        self._loop.run(self._box.download(remote_path, local_path))

    def status(self) -> SandboxStatus:
        return self._loop.run(self._box.status())

    def endpoint(self, port: int) -> str:
        return self._loop.run(self._box.endpoint(port))

    def serialize(self, *, scope: str | None = None) -> dict[str, Any]:
        return self._loop.run(self._box.serialize(scope=scope))

    @classmethod
    def connect(cls, descriptor: Mapping[str, Any], *, provider: SandboxProvider | Mapping[str, Any] | str) -> Self:
        sandbox = cls.__new__(cls)
        sandbox._loop = LoopThread.shared()
        sandbox._box = sandbox._loop.run(AsyncSandbox.connect(descriptor, provider=provider))
        return sandbox

    def stop(self) -> None:
        self._loop.run(self._box.stop())

    def __enter__(self) -> Self:
        if self._box.spec is not None:
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
