"""One box as the supervisor holds it: its lease, its processes, its files, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.local.cgroups import BoxGroups, CommandGroups
from nemo_gym.sandbox.providers.local.images import ImageManifest, remove_directory
from nemo_gym.sandbox.providers.local.protocol import close_all
from nemo_gym.sandbox.providers.local.supervisor import children
from nemo_gym.sandbox.providers.local.supervisor.construction import BuiltBox
from nemo_gym.sandbox.providers.local.supervisor.enter import Command
from nemo_gym.sandbox.providers.local.supervisor.execs import RunningCommand

_NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)

_PF_EXITING = 0x4
_REMOVE_PAUSE_S = 0.002
_REMOVE_ATTEMPTS = 5000


class Box:
    """A running box. `destroy` ends it; what is left of it then is a line in the supervisor's list of the dead."""

    def __init__(
        self,
        box_id: str,
        directory: Path,
        built: BuiltBox,
        *,
        manifest: ImageManifest,
        layer_locks: list[int],
        groups: BoxGroups,
        open_network: bool,
        labels: Mapping[str, str],
        upper: Path,
        parts: list[str],
        max_uid: int,
        first_id: int | None,
    ) -> None:
        self.box_id = box_id
        self.first_id = first_id
        self.directory = directory
        self.manifest = manifest
        self.labels = dict(labels)
        self.upper = upper
        self.parts = parts
        self.groups = groups
        self.env = dict(built.env)
        self.init_fd = built.init_fd
        self.monitor_fd = built.monitor_fd
        self.created_at = time.time()
        self.commands: dict[str, RunningCommand] = {}
        self.termination_reason: str | None = None
        self.watched_disk_bytes: int | None = None
        """What it may write, where no disk of its own bounds that."""
        self._built = built
        self._layer_locks = layer_locks
        self._open_network = open_network
        self._max_uid = max_uid
        self._finished: list[CommandGroups] = []
        self._expires_at = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._destroying: asyncio.Task[None] | None = None
        self._on_expired: Callable[[Box], object] = lambda _: None
        self._gone = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @property
    def expires_in_s(self) -> float:
        """Seconds until the lease ends."""
        return max(0.0, self._expires_at - time.monotonic())

    def renew(self, ttl_s: float, on_expired: Callable[[Box], object] | None = None) -> None:
        """Let the lease end ``ttl_s`` seconds from now, by a clock that nobody sets."""
        if on_expired is not None:
            self._on_expired = on_expired
        self._expires_at = time.monotonic() + ttl_s
        self._arm()

    def _arm(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        # The loop's clock stops while the machine sleeps, as does ours; a day at a time keeps its timers small.
        self._lease = asyncio.get_running_loop().call_later(min(self.expires_in_s, 86400.0), self._check_lease)

    def _check_lease(self) -> None:
        if self.expires_in_s > 0:
            self._arm()
        else:
            self._on_expired(self)

    async def start_command(
        self,
        exec_id: str,
        command: Mapping[str, Any],
        descriptors: tuple[int, int, int],
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        """Start a command with the given standard descriptors, which stay the caller's.

        Raises:
            StartError: it never ran.
        """
        self._finished = [groups for groups in self._finished if not groups.remove_if_empty()]
        groups = self.groups.create_command(exec_id)

        def ended(end: dict[str, Any]) -> None:
            self.commands.pop(exec_id, None)
            if not groups.remove_if_empty():
                self._finished.append(groups)
            on_end(end)

        running = RunningCommand(groups, self._built.init_pid, ended)
        self.commands[exec_id] = running
        try:
            await running.start(
                Command(
                    argv=command["argv"],
                    env=command["env"],
                    cwd=command["cwd"],
                    user=command.get("user"),
                    stdin=descriptors[0],
                    stdout=descriptors[1],
                    stderr=descriptors[2],
                    namespaces=_NAMESPACES | (0 if self._open_network else linux.CLONE_NEWNET),
                    max_uid=self._max_uid,
                    first_id=self.first_id,
                    watched=groups.tracker is None,
                ),
                self.init_fd,
                command.get("timeout_s"),
            )
        except BaseException:
            self.commands.pop(exec_id, None)
            groups.kill()
            self._finished.append(groups)
            raise

    def listen(self, port: int) -> socket.socket:
        """A listener on the box's loopback. Raises `OSError` when the port is taken."""
        if self._open_network:
            return linux.listen_on_loopback(port)
        # Not by entering it ourselves: an ordinary user's supervisor could not come back.
        return linux.listen_in_network_namespace(f"/proc/self/fd/{self._built.network_fd}", port)

    def is_dying(self) -> bool:
        """Whether the box's processes are being killed because it ends, though nobody closed it."""
        return any(_is_exiting(pid) for pid in (self._built.monitor_pid, self._built.init_pid))

    async def died(self) -> None:
        """Wait until the box's processes are gone, whatever ended them."""
        await self._gone.wait()

    async def _watch(self) -> None:
        await children.readable(self.monitor_fd)
        self._gone.set()

    async def destroy(self, reason: str) -> None:
        """End the box: processes, groups, files. Every caller waits for the same one end."""
        if self._destroying is None:
            self.termination_reason = reason
            self._destroying = asyncio.create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.monitor_fd, signal.SIGKILL)
        for command in list(self.commands.values()):
            # They die with process 1 of their pid namespace; only their ends must still be told.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await command.ended.wait()
        await children.readable(self.init_fd)
        await self._gone.wait()
        children.reap(self._built.monitor_pid)
        os.close(self.monitor_fd)
        os.close(self.init_fd)
        os.close(self._built.network_fd)
        for _ in range(_REMOVE_ATTEMPTS):
            if self.groups.try_remove():
                break
            await asyncio.sleep(_REMOVE_PAUSE_S)
        await remove_files(self.directory)
        close_all(self._layer_locks)


def _is_exiting(pid: int) -> bool:
    """Whether a process has ended or is about to: a box's first process waits for all others before it ends."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


async def remove_files(directory: Path) -> None:
    """Delete a box's files without keeping the supervisor from its other work."""
    doomed = directory.with_name(f".{directory.name}.removed")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        await children.run(lambda _: remove_directory(doomed))
