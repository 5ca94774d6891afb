"""What the tests of the local provider share: a provider with a place of its own, and what boxes leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.local import LocalProvider
from nemo_gym.sandbox.providers.local.supervisor.main import group_name


@dataclass
class LocalPlace:
    """A provider and its directories."""

    provider: LocalProvider
    base: Path

    @property
    def state_dir(self) -> Path:
        return self.provider.supervisor_dir

    @property
    def config(self) -> dict[str, Any]:
        """The provider's configuration, for other processes."""
        return config_below(self.base)

    async def create(self, **fields: Any) -> SandboxHandle:
        return await self.provider.create(SandboxSpec(**{"ttl_s": 120, **fields}))

    async def run(self, handle: SandboxHandle, command: str, **options: Any) -> str:
        """Output of a command that must succeed."""
        done = await self.provider.exec(handle, command, **{"timeout_s": 60, **options})
        assert done.ok, (command, done)
        return done.stdout or ""

    def supervisor_pid(self) -> int:
        return int(json.loads((self.state_dir / "supervisor.json").read_text())["pid"])


def config_below(base: Path) -> dict[str, Any]:
    return {"state_dir": str(base / "state"), "image_dir": str(base / "images"), "linger_s": 0.5}


@contextlib.asynccontextmanager
async def local_place(base: Path, provider: LocalProvider | None = None, **options: Any) -> AsyncIterator[LocalPlace]:
    """A provider below ``base``; when the block ends, no box of it is left and its supervisor is gone."""
    provider = provider or LocalProvider(**{**config_below(base), **options})
    place = LocalPlace(provider, base)
    try:
        yield place
    finally:
        if (place.state_dir / "supervisor.json").exists():
            for info in await provider.list():
                await provider.close(await _handle(provider, info.sandbox_id))
        await provider.aclose()
        if (place.state_dir / "supervisor.json").exists():
            pid = place.supervisor_pid()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            await until(lambda: not alive(pid))


async def _handle(provider: LocalProvider, sandbox_id: str) -> SandboxHandle:
    return await provider.connect({"sandbox_id": sandbox_id, "state_dir": str(provider.options.state_dir)})


def leftovers(base: Path) -> list[str]:
    """What boxes of the provider below ``base`` have on this machine: processes, mounts, cgroups, files."""
    found = []
    state_dir = str(LocalProvider(**config_below(base)).supervisor_dir)
    group = ""
    with contextlib.suppress(FileNotFoundError), Path(state_dir, "supervisor.lock").open() as lock:
        group = group_name(lock.fileno())
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            mounts = (process / "mountinfo").read_text().splitlines()
            if any(" - overlay overlay " in line and state_dir in line for line in mounts):
                found.append(f"mount namespace of process {process.name}: {(process / 'cmdline').read_bytes()!r}")
            if group and group in (process / "cgroup").read_text():
                found.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r}")
    for root, directories, _ in os.walk("/sys/fs/cgroup"):
        found += [f"cgroup {root}/{name}/{box}" for name in directories if name == group for box in _below(root, name)]
    boxes = Path(state_dir) / "boxes"
    found += [f"file {path}" for path in boxes.iterdir()] if boxes.exists() else []
    return found


def _below(root: str, name: str) -> list[str]:
    return [path.name for path in Path(root, name).iterdir() if path.is_dir()]


def alive(pid: int) -> bool:
    """Whether a process exists and is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = 30) -> None:
    """Wait until ``condition`` holds; fail when it does not for ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.05)
