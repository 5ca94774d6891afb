"""Boxes of the supervisor and the commands that run in them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.cgroups import BoxGroups, CommandGroups
from nemo_gym.sandbox.providers.local.images import ImageManifest, remove_directory
from nemo_gym.sandbox.providers.local.protocol import close_all, readable
from nemo_gym.sandbox.providers.local.supervisor import processes
from nemo_gym.sandbox.providers.local.supervisor.construction import BoxPlan, BuiltBox
from nemo_gym.sandbox.providers.local.supervisor.processes import Command, enter_and_execute

# -- Commands ------------------------------------------------------------------------------------------------------

_KILL_DEADLINE_S = 10.0


class RequestError(Exception):
    """An error response; ``kind`` selects the exception that the client raises."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RunningCommand:
    """One command, from its start until its end is reported."""

    def __init__(self, groups: CommandGroups, init_pid: int, on_end: Callable[[dict[str, Any]], None]) -> None:
        self.groups = groups
        self._is_grouped = groups.tracker is not None
        """Whether a control group keeps the process tree together; if not, a watcher process does."""
        self._init_pid = init_pid
        self._on_end = on_end
        self._pid = 0
        self._pidfd = -1
        self._status_fd = -1
        self._started_at = time.monotonic()
        self._started_ticks = linux.uptime_ticks()
        self._timer: asyncio.TimerHandle | None = None
        self._killed = False
        self._timed_out = False
        self.ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None

    async def start(self, command: Command, init_fd: int, timeout_s: float | None) -> None:
        """Start the command. The caller keeps the descriptors in ``command`` and must close them.

        Raises:
            RequestError: the command was not started.
        """
        joins = self.groups.open_joins()
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            report_read, report_write, status_read, status_write = pipes
            helper = processes.fork(
                lambda report: enter_and_execute(command, init_fd, joins, report, status_write),
                report_write,
                keep=[init_fd, *joins, status_write, *command.streams],
            )
        except BaseException:
            close_all(pipes[::2])
            raise
        finally:
            close_all([*joins, *pipes[1::2]])
        report = await processes.read_all(report_read)
        processes.reap(helper)
        lines = [json.loads(line) for line in report.splitlines()]
        self._pid = next((line["pid"] for line in lines if "pid" in line), 0)
        problem: processes.Problem | None = next((line for line in lines if "pid" not in line), None)
        if not self._pid:
            os.close(status_read)
            reason = "it is gone" if problem is None else problem["message"]
            raise RequestError("lost", f"the box could not be entered: {reason}")
        self._pidfd = os.pidfd_open(self._pid)
        self._status_fd = status_read
        if problem is not None:
            await processes.wait_for_exit(self._pid, self._pidfd)
            os.close(status_read)
            if problem["kind"] == "user":
                raise RequestError("user", problem["message"])
            raise RequestError("lost", f"{problem['step']}: {problem['message']}")
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._time_out)
        self._task = asyncio.create_task(self._finish())
        if self._killed:
            self._kill()

    def signal(self, number: int) -> None:
        """Send a signal to every process of the tree; to none while the command starts."""
        if self._task is None:
            return
        for pid in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the whole tree. The end is reported once the tree is gone. Idempotent."""
        if self._killed:
            return
        self._killed = True
        if self._task is not None:  # else `start` kills it: until then its process is unknown or in no group yet
            self._kill()

    def _kill(self) -> None:
        if self._is_grouped:
            self._kill_tree()
        else:
            self._killing = asyncio.create_task(self._kill_watched())

    def _time_out(self) -> None:
        if not self._killed:
            self._timed_out = True
            self.kill()

    def _kill_tree(self) -> None:
        if self._is_grouped:
            self.groups.kill()
        else:
            self.signal(signal.SIGKILL)

    async def _kill_watched(self) -> None:
        """Kill the tree without cgroups. A stopped watcher cannot exit, so orphans stay in its tree meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGSTOP)
        await self._await_empty()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _tree(self) -> list[int]:
        if self._is_grouped:
            return self.groups.processes()
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names, not paths
        running = [process for process in map(linux.live_process, pids) if process is not None]
        if any(process.pid == self._pid for process in running):
            return _descendants(running, self._pid)
        # The watcher was killed from within the box: find the processes that process 1 inherited since the start.
        strays = [p.pid for p in running if p.parent == self._init_pid and p.started_ticks >= self._started_ticks]
        return [pid for stray in strays for pid in (stray, *_descendants(running, stray))]

    async def _finish(self) -> None:
        status = await self._await_end()
        if self._timer is not None:
            self._timer.cancel()
        if self._killed:
            await self._await_empty()
        end: dict[str, Any] = {"duration_s": time.monotonic() - self._started_at}
        if os.WIFEXITED(status):
            end.update(outcome="exited", return_code=os.WEXITSTATUS(status))
        else:
            end.update(outcome="signaled", signal=os.WTERMSIG(status))
        if self._timed_out:
            end.update(outcome="timed_out", return_code=None)
        elif self.groups.ran_out_of_memory and end.get("return_code") != 0:
            if self.groups.box_was_full:
                end.update(outcome="out_of_memory")
            else:
                # The host ran out of memory, not the box, so the command is not to blame.
                end.update(outcome="lost", reason="the host ran out of memory")
        self.ended.set()
        self._on_end(end)

    async def _await_end(self) -> int:
        if self._is_grouped:
            os.close(self._status_fd)
            return await processes.wait_for_exit(self._pid, self._pidfd)
        packed_status = await processes.read_all(self._status_fd)
        status = await processes.wait_for_exit(self._pid, self._pidfd)
        if len(packed_status) == 4:
            return int(struct.unpack("i", packed_status)[0])
        self._killed = True
        return status

    async def _await_empty(self) -> None:
        """Kill until the tree is empty. Give up after a deadline: the kernel cannot end a process stuck in I/O."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while self._tree() and time.monotonic() < deadline:
            self._kill_tree()
            await asyncio.sleep(0.003)


def _descendants(processes: Sequence[linux.LiveProcess], root: int) -> list[int]:
    descendants: list[int] = []
    level: Sequence[int] = [root]
    while level:
        level = [process.pid for process in processes if process.parent in level]
        descendants += level
    return descendants


# -- Boxes ---------------------------------------------------------------------------------------------------------

_NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)

_REMOVE_PAUSE_S = 0.002
_REMOVE_ATTEMPTS = 5000


class Box:
    """A running box. After `destroy`, only an entry in the supervisor's list of dead boxes is left."""

    def __init__(
        self,
        box_id: str,
        plan: BoxPlan,
        built: BuiltBox,
        *,
        manifest: ImageManifest,
        layer_locks: list[int],
        groups: BoxGroups,
        labels: dict[str, str],
        max_uid: int,
        on_expired: Callable[[Box], object],
    ) -> None:
        self.box_id = box_id
        self.plan = plan
        self.manifest = manifest
        self.labels = labels
        self.groups = groups
        self.env = dict(built.env)
        self.init_fd = built.init_fd
        self.monitor_fd = built.monitor_fd
        self.created_at = time.time()
        self.commands: dict[str, RunningCommand] = {}
        self.termination_reason: str | None = None
        self.watched_disk_bytes: int | None = None
        """Bytes that the box may write, if it has no separate disk of that size."""
        self._built = built
        self._layer_locks = layer_locks
        self._max_uid = max_uid
        self._finished: list[CommandGroups] = []
        self._expires_at = 0.0
        self._lease: asyncio.TimerHandle | None = None
        self._destroying: asyncio.Task[None] | None = None
        self._on_expired = on_expired
        self._death = asyncio.create_task(readable(self.monitor_fd))

    @property
    def upper(self) -> Path:
        """The directory with the files that the box wrote."""
        return self.plan.writable / "upper"

    @property
    def expires_in_s(self) -> float:
        """Seconds until the lease ends."""
        return max(0.0, self._expires_at - time.monotonic())

    def renew(self, ttl_s: float) -> None:
        """Let the lease end ``ttl_s`` seconds from now, on a clock that cannot be set."""
        self._expires_at = time.monotonic() + ttl_s
        self._arm()

    def _arm(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        # The loop's clock, like the lease's, stops while the machine sleeps. No timer is longer than a day.
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
        """Start a command with the given standard descriptors, which the caller must close.

        Raises:
            RequestError: the command was not started.
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
                    streams=descriptors,
                    namespaces=_NAMESPACES | (0 if self.plan.open_network else linux.CLONE_NEWNET),
                    max_uid=self._max_uid,
                    first_id=self.plan.first_id,
                    watched=groups.tracker is None,
                ),
                self.init_fd,
                command.get("timeout_s"),
            )
        except BaseException:
            self.commands.pop(exec_id, None)
            running.ended.set()  # `destroy` may be waiting for it
            groups.kill()
            self._finished.append(groups)
            raise

    def listen(self, port: int) -> socket.socket:
        """Open a listener on the box's loopback interface. Raises `OSError` if the port is taken."""
        if self.plan.open_network:
            return linux.listen_on_loopback(port)
        # The supervisor does not enter the network namespace itself: as an ordinary user it could not come back.
        return linux.listen_in_network_namespace(f"/proc/self/fd/{self._built.network_fd}", port)

    def is_dying(self) -> bool:
        """Whether the box is ending by itself, so that the kernel is killing its processes."""
        firsts = map(linux.live_process, (self._built.monitor_pid, self._built.init_pid))
        return any(process is None or process.is_exiting for process in firsts)

    async def died(self) -> None:
        """Wait until the box's processes are gone, for any reason."""
        await asyncio.shield(self._death)

    async def destroy(self, reason: str) -> None:
        """End the box: remove its processes, groups and files. All callers wait for the same removal."""
        if self._destroying is None:
            self.termination_reason = reason
            self._destroying = asyncio.create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
        for pidfd in (self.init_fd, self.monitor_fd):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for command in list(self.commands.values()):
            # Commands die with process 1 of their pid namespace; wait until their ends have been reported.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await command.ended.wait()
        await readable(self.init_fd)
        await self._death
        processes.reap(self._built.monitor_pid)
        close_all([self.monitor_fd, self.init_fd, self._built.network_fd])
        for _ in range(_REMOVE_ATTEMPTS):
            if self.groups.try_remove():
                break
            await asyncio.sleep(_REMOVE_PAUSE_S)
        await remove_files(self.plan.directory)
        close_all(self._layer_locks)


_left: set[Path] = set()
"""Files of boxes that could not be deleted; the next deletion includes them."""


async def remove_files(directory: Path) -> None:
    """Delete a box's files in a child process, so that the supervisor is not blocked. An error is only logged: where
    no process can be started, boxes must end nevertheless."""
    removed = directory.with_name(f".{directory.name}.removed")
    try:
        directory.rename(removed)
    except FileNotFoundError:
        return
    except OSError:
        removed = directory
    doomed = [removed, *_left]

    def job(_: processes.Report) -> None:
        failure: OSError | None = None
        for path in doomed:
            try:
                remove_directory(path)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    try:
        problem = await processes.run(job)
    except OSError as error:
        problem = {"message": str(error)}
    if problem is None:
        _left.difference_update(doomed)
    else:
        _left.update(doomed)
        sys.stderr.write(f"{removed} was not deleted: {problem['message']}\n")  # the supervisor's log
