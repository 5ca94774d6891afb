"""Commands in boxes: starting them, their timeouts, killing whole trees, and how each one ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.local.cgroups import CommandGroups
from nemo_gym.sandbox.providers.local.protocol import close_all
from nemo_gym.sandbox.providers.local.supervisor import children
from nemo_gym.sandbox.providers.local.supervisor.enter import Command, enter_and_execute

_KILL_DEADLINE_S = 10.0


class StartError(Exception):
    """A command that was never started; ``kind`` is ``user``, ``out_of_memory`` or ``lost``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RunningCommand:
    """One command, from its start until its end was told."""

    def __init__(self, groups: CommandGroups | None, init_pid: int, on_end: Callable[[dict[str, Any]], None]) -> None:
        self.groups = groups
        self._init_pid = init_pid
        self._on_end = on_end
        self._pid = 0
        self._pidfd = -1
        self._status_fd = -1
        self._started_at = time.monotonic()
        self._started_ticks = _uptime_ticks()
        self._timer: asyncio.TimerHandle | None = None
        self._killed = False
        self._timed_out = False
        self.ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None

    async def start(self, command: Command, init_fd: int, timeout_s: float | None) -> None:
        """Start it. The descriptors of ``command`` stay the caller's.

        Raises:
            StartError: it was never started.
        """
        joins = self.groups.open_joins() if self.groups is not None else []
        report_read, report_write = os.pipe()
        status_read, status_write = os.pipe()
        keep = [init_fd, *joins, report_write, status_write, command.stdin, command.stdout, command.stderr]
        try:
            helper = children.fork(
                lambda: enter_and_execute(command, init_fd, joins, report_write, status_write), keep=keep
            )
        finally:
            close_all([*joins, report_write, status_write])
        said = await children.read_all(report_read)
        children.reap(helper)
        first, _, rest = said.partition(b"\n")
        started: dict[str, Any] = json.loads(first) if first else {}
        self._pid = int(started.get("pid", 0))
        if not self._pid:
            os.close(status_read)
            raise StartError("lost", f"the box could not be entered: {started.get('message', 'it is gone')}")
        self._pidfd = os.pidfd_open(self._pid)
        self._status_fd = status_read
        if rest:
            problem = json.loads(rest)
            await children.wait_for_exit(self._pid, self._pidfd)
            os.close(status_read)
            kind = "user" if problem["step"] == "user" else "lost"
            raise StartError(
                kind, f"{problem['step']}: {problem['message']}" if kind == "lost" else problem["message"]
            )
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._time_out)
        self._task = asyncio.create_task(self._finish(command.watched))

    def signal(self, number: int) -> None:
        """Send a signal to every process of the tree."""
        for pid in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill the whole tree; the end is told when it is gone. Idempotent."""
        if self._killed:
            return
        self._killed = True
        if self._is_grouped:
            self._kill_tree()
        else:
            self._killing = asyncio.create_task(self._kill_watched())

    def _time_out(self) -> None:
        if not self._killed:
            self._timed_out = True
            self.kill()

    @property
    def _is_grouped(self) -> bool:
        return self.groups is not None and self.groups.tracker is not None

    def _kill_tree(self) -> None:
        if self.groups is not None and self.groups.tracker is not None:
            self.groups.kill()
        else:
            self.signal(signal.SIGKILL)

    async def _kill_watched(self) -> None:
        """Without cgroups: while its watcher is stopped, nobody leaves the tree by losing its parent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGSTOP)
        await self._await_empty()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _tree(self) -> list[int]:
        if self.groups is not None and self.groups.tracker is not None:
            return self.groups.processes()
        processes = _processes()
        if any(pid == self._pid for pid, _, _ in processes):
            return _descendants(processes, self._pid)
        # The watcher was killed from within the box: what process 1 inherited since this command began is the rest.
        strays = [p for p, parent, ticks in processes if parent == self._init_pid and ticks >= self._started_ticks]
        return [pid for stray in strays for pid in (stray, *_descendants(processes, stray))]

    async def _finish(self, watched: bool) -> None:
        status = await self._await_end(watched)
        if self._timer is not None:
            self._timer.cancel()
        if self._killed:
            await self._await_empty()
        oom_kills = self.groups.oom_kills() if self.groups is not None else 0
        end: dict[str, Any] = {"duration_s": time.monotonic() - self._started_at}
        if os.WIFEXITED(status):
            end.update(outcome="exited", return_code=os.WEXITSTATUS(status))
        else:
            end.update(outcome="signaled", signal=os.WTERMSIG(status))
        if self._timed_out:
            end.update(outcome="timed_out", return_code=None)
        elif oom_kills and end.get("return_code") != 0:
            if self.groups is not None and self.groups.box_was_full():
                end.update(outcome="out_of_memory")
            else:
                # Nothing in the box need have caused that, so its end says nothing of the command.
                end.update(outcome="lost", reason="the host ran out of memory")
        self.ended.set()
        self._on_end(end)

    async def _await_end(self, watched: bool) -> int:
        if not watched:
            os.close(self._status_fd)
            return await children.wait_for_exit(self._pid, self._pidfd)
        said = await children.read_all(self._status_fd)
        status = await children.wait_for_exit(self._pid, self._pidfd)
        if len(said) == 4:
            return int(struct.unpack("i", said)[0])
        self._killed = True
        return status

    async def _await_empty(self) -> None:
        """Kill until nothing of the tree is left; gives up on what the kernel cannot end (a process stuck in I/O)."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while self._tree() and time.monotonic() < deadline:
            self._kill_tree()
            await asyncio.sleep(0.003)


def _uptime_ticks() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _processes() -> list[tuple[int, int, int]]:
    """Id, parent and start time (ticks since boot) of every live process that can be seen."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, not paths
        if not name.isdigit():
            continue
        try:
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            found.append((int(name), int(fields[1]), int(fields[19])))
    return found


def _descendants(processes: Sequence[tuple[int, int, int]], root: int) -> list[int]:
    found: list[int] = []
    level: Sequence[int] = [root]
    while level:
        level = [pid for pid, parent, _ in processes if parent in level]
        found += level
    return found
