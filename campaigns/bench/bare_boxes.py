"""The bare tools that the sandbox benchmark compares with: Docker's SDK and CLI, and overlay mount + `bwrap`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE = ["/bin/sh", "-c", "while :; do sleep 3600; done"]


class BareDocker:
    """A container made, used and removed with the fewest calls the SDK (or the CLI) needs.

    Limits and policy are those of our boxes, and as many calls run at once as in our provider.
    """

    def __init__(self, engine: str, image: str, tar: bytes, *, cli: bool = False) -> None:
        import docker

        self._image, self._tar, self._engine = image, tar, engine
        self._client: Any = docker.APIClient(base_url=engine, timeout=120, num_pools=64)
        self._threads = ThreadPoolExecutor(32)
        self._creates = asyncio.Semaphore(8)
        self._cli = cli

    @staticmethod
    def image_of(engine: str, container_id: str) -> str:
        import docker

        client: Any = docker.APIClient(base_url=engine)
        with contextlib.closing(client):
            return str(client.inspect_container(container_id)["Config"]["Image"])

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _docker(self, *args: str, stdin: bytes | None = None) -> bytes:
        command = ["docker", "-H", self._engine, *args]
        return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, check=True).stdout

    async def create(self) -> str:
        async with self._creates:
            return str(await self._run(self._create))

    def _create(self) -> str:
        if self._cli:
            options = ["-d", "--init", "--network", "none", "--cap-drop", "ALL", "--log-driver", "none"]
            options += ["--security-opt", "no-new-privileges", "--pids-limit", "4096"]
            return self._docker("run", *options, "--entrypoint", IDLE[0], self._image, *IDLE[1:]).decode().strip()
        host_config = self._client.create_host_config(
            init=True,
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            pids_limit=4096,
            log_config={"Type": "none", "Config": {}},
        )
        container = self._client.create_container(self._image, IDLE[1:], entrypoint=[IDLE[0]], host_config=host_config)
        self._client.start(container["Id"])
        return str(container["Id"])

    async def exec(self, box: str) -> None:
        assert await self._run(self._exec, box) == b"done\n"

    def _exec(self, box: str) -> bytes:
        if self._cli:
            return self._docker("exec", box, "echo", "done")
        created = self._client.exec_create(box, ["echo", "done"])
        stdout, _ = self._client.exec_start(created["Id"], demux=True)
        assert self._client.exec_inspect(created["Id"])["ExitCode"] == 0
        return bytes(stdout)

    async def tar_in(self, box: str) -> None:
        await self._run(self._tar_in, box)

    def _tar_in(self, box: str) -> None:
        if self._cli:
            self._docker("cp", "-", f"{box}:/srv", stdin=self._tar)
        else:
            assert self._client.put_archive(box, "/srv", self._tar)

    async def tar_out(self, box: str) -> None:
        assert await self._run(self._tar_out, box) > 10_000_000

    def _tar_out(self, box: str) -> int:
        if self._cli:
            return len(self._docker("cp", f"{box}:/srv/blob", "-"))
        stream, _ = self._client.get_archive(box, "/srv/blob")
        return sum(len(chunk) for chunk in stream)

    async def destroy(self, box: str) -> None:
        await self._run(self._destroy, box)

    def _destroy(self, box: str) -> None:
        if self._cli:
            self._docker("rm", "-f", box)
        else:
            self._client.remove_container(box, force=True, v=True)


@dataclass
class BareBox:
    place: Path
    process: asyncio.subprocess.Process
    child: int
    """A process in the box, whose namespaces `nsenter` enters."""


class BareLocal:
    """An overlay over ``/usr``, `bwrap` in it with a shell that waits, `nsenter` for execs, `tar` for files."""

    def __init__(self, tar: bytes) -> None:
        self._tar = tar
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _mount(self, place: Path) -> None:
        for name in ("upper", "work", "usr"):
            (place / name).mkdir()
        options = f"lowerdir=/usr,upperdir={place}/upper,workdir={place}/work"
        if self._libc.mount(b"overlay", os.fsencode(place / "usr"), b"overlay", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "overlay mount")

    async def create(self) -> BareBox:
        place = Path(tempfile.mkdtemp(prefix="bare-box-"))
        self._mount(place)
        links = [part for name in ("bin", "sbin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
        process = await asyncio.create_subprocess_exec(
            *["bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--new-session"],
            *["--bind", str(place / "usr"), "/usr", *links, "--ro-bind", "/etc", "/etc", "--dir", "/srv"],
            *["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--info-fd", "2"],
            *["/bin/sh", "-c", "echo ready; read wait"],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert await process.stdout.readline() == b"ready\n"
        info = await process.stderr.readuntil(b"}")
        child = int(info.split(b'"child-pid":')[1].split(b",")[0].strip(b" }\n"))
        return BareBox(place, process, child)

    async def _enter(self, box: BareBox, *command: str, stdin: bytes | None = None) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *["nsenter", "-t", str(box.child), "-m", "-p", "-n", "-i", "-u", "--root", "--wd=/"],
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        stdout, _ = await process.communicate(stdin)
        assert process.returncode == 0
        return stdout

    async def exec(self, box: BareBox) -> None:
        assert await self._enter(box, "echo", "done") == b"done\n"

    async def tar_in(self, box: BareBox) -> None:
        await self._enter(box, "tar", "-x", "-C", "/usr/local", stdin=self._tar)

    async def tar_out(self, box: BareBox) -> None:
        assert len(await self._enter(box, "tar", "-c", "-C", "/usr/local", "blob")) > 10_000_000

    async def destroy(self, box: BareBox) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(box.child, signal.SIGKILL)
        await box.process.wait()
        if self._libc.umount2(os.fsencode(box.place / "usr"), 2):
            raise OSError(ctypes.get_errno(), "umount")
        await asyncio.to_thread(shutil.rmtree, box.place)
