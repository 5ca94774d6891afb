"""A box's processes on the host: finding those of one exec, signalling them, and counting memory kills.

This works only if the engine's processes have ids on this machine (`Engine.is_local`). The processes of an exec are
its descendants, processes with its mark in their environment, and processes in a session that either of these opened.
A process that detached, dropped its environment and opened a session of its own is found by elimination: it belongs
to the exec if it began during the exec and no other exec ran meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from nemo_gym._util.tasks import Backoff
from nemo_gym.sandbox import cgroups
from nemo_gym.sandbox.linux import live_process
from nemo_gym.sandbox.providers.docker.engine import EXEC_MARK

_KILL_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started_ticks: int
    mark: str | None


@dataclass(frozen=True)
class BoxControl:
    """The control groups of one container on the host."""

    init_pid: int
    group: Path
    """The control group with the container's processes."""
    memory: Path | None
    """The control group that counts the container's memory and memory kills."""

    @classmethod
    def find(cls, init_pid: int, container_id: str) -> BoxControl | None:
        """Find a container's groups; ``None`` if its processes are not visible or may not be signalled from here."""
        groups: dict[str, Path] = {}
        try:
            for hierarchy in cgroups.hierarchies(init_pid):
                names = ["unified"] if hierarchy.version == 2 else hierarchy.controllers
                if container_id in str(hierarchy.group):
                    groups |= dict.fromkeys(names, hierarchy.group)
            os.kill(init_pid, 0)
            Path(f"/proc/{init_pid}/environ").read_bytes()
        except OSError:
            return None
        paths = [groups[name] for name in ("pids", "memory", "unified") if name in groups]
        group = next((path for path in paths if (path / "cgroup.procs").is_file()), None)
        memory = next((path for path in paths if cgroups.counts_memory(path)), None)
        return None if group is None else cls(init_pid, group, memory)

    def is_alive(self) -> bool:
        """Whether the box's first process lives. When that begins to exit, the kernel kills all others."""
        process = live_process(self.init_pid)
        return process is not None and not process.is_exiting

    def oom_kills(self) -> int | None:
        """How many of the box's processes the kernel killed for memory; ``None`` if unknown or the box is gone."""
        return None if self.memory is None else cgroups.oom_kills(self.memory)

    def was_full(self) -> bool:
        """Whether the box has ever reached its memory limit. If not, a memory kill means that the host ran out."""
        return self.memory is not None and cgroups.was_full(self.memory)

    def processes(self) -> list[Process]:
        """All processes of the box outside the session of its first process, which only waits and reaps; the idle
        command below it keeps the box alive. An exec starts in its own session and cannot enter this one."""
        pids = cgroups.group_processes(self.group)
        processes = (read_process(pid) for pid in pids if pid != self.init_pid)
        return [process for process in processes if process is not None and process.session != self.init_pid]


def read_process(pid: int) -> Process | None:
    """Read a process's data; ``None`` if the process is gone or a zombie."""
    process = live_process(pid)
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if process is None:
        return None
    prefix = f"{EXEC_MARK}=".encode()
    mark = next((item[len(prefix) :] for item in environ.split(b"\0") if item.startswith(prefix)), None)
    decoded = None if mark is None else mark.decode(errors="replace")
    return Process(pid, process.parent, process.session, process.started_ticks, decoded)


def select(
    processes: Collection[Process], *, exec_id: str, main_pid: int | None, began_ticks: int, others: Collection[str]
) -> set[int]:
    """Return the pids of one exec's processes.

    Args:
        main_pid: the pid of the command itself, according to the engine.
        began_ticks: when the exec was requested.
        others: ids of execs that ran in the same box at any moment since then.
    """
    by_pid = {p.pid: p for p in processes}

    def ancestry(process: Process) -> list[Process]:
        """The process and its ancestors in the box, nearest first."""
        chain, current = [], by_pid.get(process.pid)
        while current is not None and current not in chain:
            chain.append(current)
            current = by_pid.get(current.parent)
        return chain

    chains = {p.pid: ancestry(p) for p in processes}

    def owner(pid: int) -> str | None:
        """The exec whose mark is nearest. A mark further up may be another exec's, by an accidental reuse of a pid."""
        return next(
            (exec_id if p.pid == main_pid else p.mark for p in chains[pid] if p.mark or p.pid == main_pid), None
        )

    selected = {pid for pid in chains if owner(pid) == exec_id}
    sessions = {by_pid[pid].session for pid in selected}
    for pid, chain in chains.items():
        # A process with an ancestor older than the exec was not started by the exec.
        unclaimed = owner(pid) is None and chain[-1].started_ticks >= began_ticks
        if unclaimed and (by_pid[pid].session in sessions or not others):
            selected.add(pid)
    return selected


Selection = Callable[[Collection[Process]], set[int]]
"""`select` for one exec: its processes' pids among those of the box."""


def send(control: BoxControl, pids: Collection[int], number: int) -> None:
    """Signal processes of the box, but no process outside it that has reused one of the pids since."""
    descriptors: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptors[pid] = os.pidfd_open(pid)
        still = set(cgroups.group_processes(control.group))
        for pid, descriptor in descriptors.items():
            if pid in still:
                with contextlib.suppress(OSError):
                    signals.pidfd_send_signal(descriptor, number)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def signal_exec(control: BoxControl, number: int, select_pids: Selection) -> None:
    """Signal every process of one exec once. Parents come first: a parent that notices its child's end might otherwise
    exit before its own signal arrives."""
    processes = control.processes()
    began = {process.pid: (process.started_ticks, process.pid) for process in processes}
    send(control, sorted(select_pids(processes), key=began.__getitem__), number)


def kill_exec(control: BoxControl, select_pids: Selection) -> bool:
    """Kill every process of one exec; return whether none is left. Blocks for about 10 seconds at most."""
    backoff = Backoff(first_s=0.002, longest_s=0.1, patience_s=_KILL_PATIENCE_S)
    while alive := select_pids(control.processes()):
        # Stop the processes first, so that none forks between being listed and being killed.
        send(control, alive, signals.SIGSTOP)
        send(control, alive, signals.SIGKILL)
        if not backoff.again_blocking():
            return False
    return True
