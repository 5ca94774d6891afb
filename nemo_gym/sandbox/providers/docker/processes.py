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
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nemo_gym._util.tasks import Backoff
from nemo_gym.sandbox.providers.docker.names import EXEC_MARK

_PROC = Path("/proc")
_KILL_PATIENCE_S = 10.0
_PF_EXITING = 0x4
_FULL_WITHIN_BYTES = 4 * 1024 * 1024
"""Tolerance for a full box: the kernel charges memory in batches, so some may be free when an allocation fails."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started_ticks: int
    mark: str | None


@dataclass(frozen=True)
class BoxControl:
    """The host's files with the counters and the process list of one container."""

    init_pid: int
    process_list: Path
    """The ``cgroup.procs`` of the container's control group."""
    memory_events: Path | None
    """The file with the container's ``oom_kill`` counter."""

    @classmethod
    def find(cls, init_pid: int, container_id: str) -> BoxControl | None:
        """Find a container's files; ``None`` if its processes are not visible, or this process may not signal them."""
        groups = _cgroup_paths(init_pid)
        paths = {name: path for name, path in groups.items() if container_id in path.name or container_id in str(path)}
        for name in ("pids", "memory", "unified"):
            path = paths.get(name)
            if path is not None and (path / "cgroup.procs").is_file():
                break
        else:
            return None
        try:
            os.kill(init_pid, 0)
            (_PROC / str(init_pid) / "environ").read_bytes()
        except OSError:
            return None
        events = None
        if "memory" in paths and (paths["memory"] / "memory.oom_control").is_file():
            events = paths["memory"] / "memory.oom_control"
        elif "unified" in paths and (paths["unified"] / "memory.events").is_file():
            events = paths["unified"] / "memory.events"
        return cls(init_pid=init_pid, process_list=path / "cgroup.procs", memory_events=events)

    def is_alive(self) -> bool:
        """Whether the box's first process lives. When that begins to exit, the kernel kills all others."""
        try:
            fields = (_PROC / str(self.init_pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return False
        return fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING

    def oom_kills(self) -> int | None:
        """How many of the box's processes the kernel killed for memory; ``None`` if unknown or the box is gone."""
        return None if self.memory_events is None else _counter(self.memory_events, "oom_kill")

    def was_full(self) -> bool:
        """Whether the box has ever reached its memory limit. If not, a memory kill means that the host ran out."""
        if self.memory_events is None:
            return False
        if self.memory_events.name == "memory.events":
            return bool(_counter(self.memory_events, "oom"))
        # Not the group's failcnt: Linux 6.18 does not count it if memory and swap have the same limit.
        limit = _counter(self.memory_events.with_name("memory.limit_in_bytes")) or 0
        peak = _counter(self.memory_events.with_name("memory.max_usage_in_bytes")) or 0
        return peak > limit - _FULL_WITHIN_BYTES

    def pids(self) -> list[int]:
        """The ids of all processes of the box, including those in nested control groups."""
        pids: list[int] = []
        root = self.process_list.parent
        for directory, _, _ in os.walk(root):
            with contextlib.suppress(OSError):
                pids += [int(line) for line in (Path(directory) / "cgroup.procs").read_text().split()]
        return pids

    def processes(self) -> list[Process]:
        """All processes of the box outside the session of its first process, which only waits and reaps; the idle
        command below it keeps the box alive. An exec starts in its own session and cannot enter this one."""
        processes = (read_process(pid) for pid in self.pids() if pid != self.init_pid)
        return [process for process in processes if process is not None and process.session != self.init_pid]


def _counter(file: Path, name: str = "") -> int | None:
    """Read the counter ``name`` from a control group's file, or its only counter; ``None`` if it is not readable."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            word, _, value = line.rpartition(" ")
            if word == name:
                return int(value)
    return None


def _cgroup_paths(pid: int) -> dict[str, Path]:
    """Controller name (``unified`` for version 2) → the directory of the process's control group."""
    mounts: dict[str, tuple[str, str]] = {}
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = [*after.split(" "), "", ""][:3]
            root, point = before.split(" ")[3:5]
            if kind == "cgroup2":
                mounts["unified"] = (root, point)
            elif kind == "cgroup":
                for option in options.split(","):
                    mounts[option] = (root, point)
        lines = (_PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return {}
    paths: dict[str, Path] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        for name in ["unified"] if number == "0" and not controllers else controllers.split(","):
            if name in mounts:
                root, point = mounts[name]
                below = path.removeprefix(root) if root != "/" else path
                paths[name] = Path(point + "/" + below.lstrip("/"))
    return paths


def read_process(pid: int) -> Process | None:
    """Read a process's data; ``None`` if the process is gone or a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    prefix = f"{EXEC_MARK}=".encode()
    marks = [item[len(prefix) :] for item in environ.split(b"\0") if item.startswith(prefix)]
    mark = marks[0].decode(errors="replace") if marks else None
    return Process(pid=pid, parent=int(fields[1]), session=int(fields[3]), started_ticks=int(fields[19]), mark=mark)


def now_ticks() -> int:
    """The current time on the clock of `Process.started_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


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


def send(control: BoxControl, pids: Collection[int], number: int) -> None:
    """Signal processes of the box, but no process outside it that has reused one of the pids since."""
    descriptors: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptors[pid] = os.pidfd_open(pid)
        still = set(control.pids())
        for pid, descriptor in descriptors.items():
            if pid in still:
                with contextlib.suppress(OSError):
                    signals.pidfd_send_signal(descriptor, number)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def signal_exec(
    control: BoxControl,
    number: int,
    *,
    exec_id: str,
    main_pid: int | None,
    began_ticks: int,
    others: Collection[str],
) -> None:
    """Signal every process of one exec once. Parents come first: a parent that notices its child's end might otherwise
    exit before its own signal arrives."""
    processes = control.processes()
    began = {process.pid: (process.started_ticks, process.pid) for process in processes}
    pids = select(processes, exec_id=exec_id, main_pid=main_pid, began_ticks=began_ticks, others=others)
    send(control, sorted(pids, key=began.__getitem__), number)


def kill_exec(
    control: BoxControl, *, exec_id: str, main_pid: int | None, began_ticks: int, others: Collection[str]
) -> bool:
    """Kill every process of one exec; return whether none is left. Blocks for about 10 seconds at most."""
    backoff = Backoff(first_s=0.002, longest_s=0.1, patience_s=_KILL_PATIENCE_S)
    while True:
        alive = select(control.processes(), exec_id=exec_id, main_pid=main_pid, began_ticks=began_ticks, others=others)
        if not alive:
            return True
        # Stop the processes first, so that none forks between being listed and being killed.
        send(control, alive, signals.SIGSTOP)
        send(control, alive, signals.SIGKILL)
        if not backoff.again_blocking():
            return False
