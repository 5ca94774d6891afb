"""A box's processes as the host sees them: which belong to one exec, signalling them, and memory kills.

Only where the engine's processes have ids here (`Engine.is_local`). An exec's processes are its descendants, those
that carry its mark in their environment, and those of the sessions that either of these opened. A process that
detached, dropped its environment and opened a session of its own is found by elimination: it began during the exec,
and no other exec ran meanwhile.
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
"""The kernel charges memory in batches, so what does not fit may leave some of it free."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started_ticks: int
    mark: str | None


@dataclass(frozen=True)
class BoxControl:
    """Where the host keeps the counters and the process list of one container."""

    init_pid: int
    process_list: Path
    """Its ``cgroup.procs``."""
    memory_events: Path | None
    """The file with its ``oom_kill`` counter."""

    @classmethod
    def find(cls, init_pid: int, container_id: str) -> BoxControl | None:
        """``None`` when the container's processes are not visible or not ours to signal."""
        groups = _cgroup_paths(init_pid)
        own = {name: path for name, path in groups.items() if container_id in path.name or container_id in str(path)}
        for name in ("pids", "memory", "unified"):
            path = own.get(name)
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
        if "memory" in own and (own["memory"] / "memory.oom_control").is_file():
            events = own["memory"] / "memory.oom_control"
        elif "unified" in own and (own["unified"] / "memory.events").is_file():
            events = own["unified"] / "memory.events"
        return cls(init_pid=init_pid, process_list=path / "cgroup.procs", memory_events=events)

    def is_alive(self) -> bool:
        """Whether the box's first process lives; when it begins to end, the kernel kills all others."""
        try:
            fields = (_PROC / str(self.init_pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return False
        return fields[0] not in "ZX" and not int(fields[6]) & _PF_EXITING

    def oom_kills(self) -> int | None:
        """Processes of this box the kernel killed for memory so far; ``None`` when that is unknown or it is gone."""
        return None if self.memory_events is None else _counter(self.memory_events, "oom_kill")

    def was_full(self) -> bool:
        """Whether the box has ever reached its memory limit. Where not, it was the host that ran out."""
        if self.memory_events is None:
            return False
        if self.memory_events.name == "memory.events":
            return bool(_counter(self.memory_events, "oom"))
        # Not its failcnt, which Linux 6.18 does not count where memory and swap have one limit.
        limit = _counter(self.memory_events.with_name("memory.limit_in_bytes")) or 0
        peak = _counter(self.memory_events.with_name("memory.max_usage_in_bytes")) or 0
        return peak > limit - _FULL_WITHIN_BYTES

    def pids(self) -> list[int]:
        """Every process of the box, its nested control groups included."""
        found: list[int] = []
        root = self.process_list.parent
        for directory, _, _ in os.walk(root):
            with contextlib.suppress(OSError):
                found += [int(line) for line in (Path(directory) / "cgroup.procs").read_text().split()]
        return found

    def processes(self) -> list[Process]:
        """Every process of the box but those of its first one's session: that one only waits and reaps, and the idle
        command below it is the box's life. An exec begins in a session of its own and cannot enter this one."""
        found = (read_process(pid) for pid in self.pids() if pid != self.init_pid)
        return [process for process in found if process is not None and process.session != self.init_pid]


def _counter(file: Path, name: str = "") -> int | None:
    """A counter of a control group: the one of that name, or the only one; ``None`` when it cannot be read."""
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
    """``None`` for one that is gone or only waits to be reaped."""
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
    """The present on the clock of `Process.started_ticks`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def select(
    processes: Collection[Process], *, exec_id: str, main_pid: int | None, began_ticks: int, others: Collection[str]
) -> set[int]:
    """The pids that belong to one exec.

    Args:
        main_pid: the command itself, as the engine knows it.
        began_ticks: when the exec was asked for.
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
        """The nearest mark says most: an exec's own process may have started another exec's by accident of reuse."""
        return next(
            (exec_id if p.pid == main_pid else p.mark for p in chains[pid] if p.mark or p.pid == main_pid), None
        )

    ours = {pid for pid in chains if owner(pid) == exec_id}
    sessions = {by_pid[pid].session for pid in ours}
    for pid, chain in chains.items():
        # What descends from something older than the exec was not begun by it.
        unclaimed = owner(pid) is None and chain[-1].started_ticks >= began_ticks
        if unclaimed and (by_pid[pid].session in sessions or not others):
            ours.add(pid)
    return ours


def send(control: BoxControl, pids: Collection[int], number: int) -> None:
    """Signal processes of the box, and never one that took over a number meanwhile."""
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
    """Signal every process of one exec, once; parents first, as one that sees its child's end may end before its own
    signal comes."""
    processes = control.processes()
    began = {process.pid: (process.started_ticks, process.pid) for process in processes}
    found = select(processes, exec_id=exec_id, main_pid=main_pid, began_ticks=began_ticks, others=others)
    send(control, sorted(found, key=began.__getitem__), number)


def kill_exec(
    control: BoxControl, *, exec_id: str, main_pid: int | None, began_ticks: int, others: Collection[str]
) -> bool:
    """Kill every process of one exec; whether none is left. Blocks for at most some seconds."""
    backoff = Backoff(first_s=0.002, longest_s=0.1, patience_s=_KILL_PATIENCE_S)
    while True:
        left = select(control.processes(), exec_id=exec_id, main_pid=main_pid, began_ticks=began_ticks, others=others)
        if not left:
            return True
        # Stopped first, so that nothing forks between being listed and being killed.
        send(control, left, signals.SIGSTOP)
        send(control, left, signals.SIGKILL)
        if not backoff.again_blocking():
            return False
