"""A provider without real boxes, so that a composition with a box can be measured without the cost of a sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxCapabilities, SandboxExecResult, SandboxHandle


class NothingProvider:
    """A provider whose commands do nothing, and print what ``echo`` would print."""

    name = "nothing"
    capabilities = SandboxCapabilities()

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        return SandboxHandle(uuid4().hex, self.name)

    async def exec(self, handle: SandboxHandle, command: str | Sequence[str], **_: Any) -> SandboxExecResult:
        text = command if isinstance(command, str) else command[-1]
        return SandboxExecResult(stdout=text.removeprefix("echo ") + "\n", stderr="", return_code=0)

    async def renew(self, handle: SandboxHandle, ttl_s: float) -> None:
        pass

    async def close(self, handle: SandboxHandle) -> None:
        pass

    async def aclose(self) -> None:
        pass


@contextmanager
def installed() -> Iterator[tuple[Path, Path]]:
    """Yield a folder for the module search path with the provider's entry point, and a file for ``sandbox=``."""
    with TemporaryDirectory() as directory:
        package = Path(directory, "nothing-1.dist-info")
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nothing\nVersion: 1\n")
        (package / "entry_points.txt").write_text(
            f"[nemo_gym.sandbox_providers]\nnothing = {__name__}:{NothingProvider.__name__}\n"
        )
        block = Path(directory, "nothing.yaml")
        block.write_text("sandbox:\n  nothing: {}\n")
        yield Path(directory), block
