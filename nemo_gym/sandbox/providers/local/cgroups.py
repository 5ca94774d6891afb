"""Control groups of boxes and of their commands, on cgroup v1, v2 and both at once. Uses only the standard library.

A box's group carries the box's limits. Each command has its own group inside, for two purposes: to kill the command's
whole process tree (a daemon can leave its session and its parent, but not its group), and to attribute an
out-of-memory kill to the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIMITS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_REMOVE_DEADLINE_S = 5.0
_FULL_WITHIN_BYTES = 4 * 1024 * 1024
"""Tolerance for a full box: the kernel charges memory in batches, so some may be free when an allocation fails."""
_HOW_TO_DELEGATE = "run as root, or start the client with `systemd-run --user --scope -p Delegate=yes …`"


@dataclass(frozen=True)
class _Mounted:
    version: int
    controllers: frozenset[str]
    own: Path
    """The directory of this process's group in the hierarchy."""
    top: Path


def _mounted_hierarchies() -> list[_Mounted]:
    """The cgroup hierarchies that this process can see, with its group in each."""
    own_groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        own_groups["" if number == "0" else names] = path
    hierarchies = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        top = Path(point.encode().decode("unicode_escape"))
        if kind == "cgroup2":
            path, version = own_groups.get("", "/"), 2
            try:
                controllers = frozenset((top / "cgroup.controllers").read_text().split())
            except OSError:
                continue
        elif kind == "cgroup":
            mount_options = set(options.rpartition(" ")[2].split(","))
            names = next((names for names in own_groups if names and set(names.split(",")) <= mount_options), "")
            if not names:
                continue
            path, version, controllers = own_groups[names], 1, frozenset(names.split(","))
        else:
            continue
        relative = path.removeprefix(root.rstrip("/")) if root != "/" else path
        own_directory = top / relative.lstrip("/")
        hierarchies.append(_Mounted(version, controllers, own_directory if own_directory.is_dir() else top, top))
    return hierarchies


class Cgroups:
    """Creates a supervisor's groups: ``<some group>/<name>/<box>/<command>`` in each usable hierarchy."""

    def __init__(self, name: str, *, enabled: bool = True) -> None:
        self.reasons: dict[str, str] = {}
        """Limit → why it cannot be enforced here."""
        self._limits: dict[str, tuple[int, Path]] = {}
        self._tracker: Path | None = None
        self.bases: list[Path] = []
        if not enabled:
            self.reasons = dict.fromkeys(LIMITS, "cgroups are switched off by the provider's option use_cgroups=false")
            return
        hierarchies = _mounted_hierarchies()
        if not hierarchies:
            self.reasons = dict.fromkeys(LIMITS, "no cgroup file system is mounted; mount cgroup2 on /sys/fs/cgroup")
        for mounted in hierarchies:
            requested = [limit for limit in LIMITS if limit in mounted.controllers]
            if mounted.version == 1 and not requested and "freezer" not in mounted.controllers:
                continue
            self._claim(mounted, requested, name)
        for limit in LIMITS:
            if limit not in self._limits:
                self.reasons.setdefault(limit, f"no mounted cgroup hierarchy has the '{limit}' controller")

    def _claim(self, mounted: _Mounted, requested: list[str], name: str) -> None:
        """Create the group ``name`` as near to this process as possible, where most wanted limits can be set."""
        best: tuple[Path, list[str]] | None = None
        problem = ""
        places = [mounted.own, *(p for p in mounted.own.parents if p.is_relative_to(mounted.top))]
        for place in places:
            base = place / name
            try:
                base.mkdir(exist_ok=True)
                usable = requested
                if mounted.version == 2:
                    usable = [limit for limit in requested if _enable(place, limit) and _enable(base, limit)]
                    if usable != requested:
                        problem = problem or f"{place} has processes of its own, so no limit can be set below it"
                _prove_joinable(base, mounted.version)
            except OSError as error:
                problem = problem or f"{place} cannot be used by this user ({error.strerror})"
                usable = []
                _remove_if_possible(base)
                continue
            if best is None or len(usable) > len(best[1]):
                if best is not None:
                    _remove_if_possible(best[0])
                best = base, usable
            else:
                _remove_if_possible(base)
            if usable == requested:
                break
        usable = best[1] if best is not None else []
        for limit in requested:
            if best is not None and limit in usable:
                self._limits[limit] = (mounted.version, best[0])
                self.reasons.pop(limit, None)
            elif limit not in self._limits:
                self.reasons[limit] = f"cgroup v{mounted.version}: {problem}; {_HOW_TO_DELEGATE}"
        if best is None:
            return
        self.bases.append(best[0])
        if mounted.version == 2 or ("freezer" in mounted.controllers and self._tracker is None):
            self._tracker = best[0]

    @property
    def enforced(self) -> frozenset[str]:
        """The limits, of `LIMITS`, that can be enforced here."""
        return frozenset(self._limits)

    @property
    def tracks_processes(self) -> bool:
        """Whether groups track the processes of each command."""
        return self._tracker is not None

    def create_box(self, box_id: str, *, memory_mib: int | None, pids: int | None, cpu: float | None) -> BoxGroups:
        """Create a box's groups and set its limits. Raises `OSError` if the kernel refuses a limit."""
        directories: dict[str, Path] = {}
        values = {"memory": memory_mib, "pids": pids, "cpu": cpu}
        for limit, value in values.items():
            if value is not None:
                directories[limit] = self._limits[limit][1] / box_id
        if self._tracker is not None:
            directories["tracker"] = self._tracker / box_id
        groups = BoxGroups(directories, self._limits.get("memory", (2, None))[0])
        try:
            for directory in set(directories.values()):
                directory.mkdir()
            if memory_mib is not None:
                _limit_memory(directories["memory"], self._limits["memory"][0], memory_mib * 1024 * 1024)
            if pids is not None:
                (directories["pids"] / "pids.max").write_text(str(pids))
            if cpu is not None:
                _limit_cpu(directories["cpu"], self._limits["cpu"][0], cpu)
            if self._limits.get("memory", (1, None))[0] == 2 and memory_mib is not None:
                _enable(directories["memory"], "memory")
        except BaseException:
            groups.remove()
            raise
        return groups

    def remove(self) -> None:
        """Remove the supervisor's own groups. Call this when no box is left."""
        for base in self.bases:
            remove_tree(base)


class BoxGroups:
    """The groups of one box."""

    def __init__(self, directories: Mapping[str, Path], memory_version: int) -> None:
        self._directories = dict(directories)
        self._memory_version = memory_version

    def create_command(self, exec_id: str) -> CommandGroups:
        """Create the groups of one command inside the box's groups."""
        tracker, memory = self._directories.get("tracker"), self._directories.get("memory")
        created = {d / exec_id for d in (tracker, memory) if d is not None}
        for directory in created:
            directory.mkdir()
        shared = {d for name, d in self._directories.items() if name in ("pids", "cpu") and d != tracker}
        return CommandGroups(
            tracker=tracker / exec_id if tracker else None,
            memory=memory / exec_id if memory else None,
            box_memory=memory,
            memory_version=self._memory_version,
            join=[*created, *(d for d in shared if d not in {o.parent for o in created})],
        )

    def freeze(self, frozen: bool) -> None:
        """Stop or resume every process of the box."""
        tracker = self._directories.get("tracker")
        if tracker is None:
            return
        with contextlib.suppress(OSError):
            if (tracker / "cgroup.freeze").exists():
                (tracker / "cgroup.freeze").write_text("1" if frozen else "0")
            else:
                (tracker / "freezer.state").write_text("FROZEN" if frozen else "THAWED")

    def kill(self) -> None:
        """Kill every process of the box, without waiting."""
        if "tracker" in self._directories:
            kill_group(self._directories["tracker"])

    def try_remove(self) -> bool:
        """Remove the groups. If processes are left in them, kill these and return ``False``."""
        remaining = [directory for directory in set(self._directories.values()) if not try_remove_tree(directory)]
        return not remaining

    def remove(self) -> None:
        """Remove the groups, and wait until they are gone."""
        for directory in set(self._directories.values()):
            remove_tree(directory)


@dataclass(frozen=True)
class CommandGroups:
    """The groups of one command."""

    tracker: Path | None
    memory: Path | None
    box_memory: Path | None
    """The memory group of the whole box, which carries the limit."""
    memory_version: int
    join: list[Path]

    def open_joins(self) -> list[int]:
        """Open descriptors through which a process joins the groups by writing ``0``, in any mount namespace."""
        return [os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for directory in self.join]

    def processes(self) -> list[int]:
        """The ids of the command's live processes."""
        return group_processes(self.tracker) if self.tracker is not None else []

    def kill(self) -> None:
        if self.tracker is not None:
            kill_group(self.tracker)

    def oom_kills(self) -> int:
        """How many of the command's processes the kernel killed because memory ran out."""
        if self.memory is None:
            return 0
        name = "memory.events" if self.memory_version == 2 else "memory.oom_control"
        return _counter(self.memory / name, "oom_kill")

    def box_was_full(self) -> bool:
        """Whether the box has ever reached its memory limit. If not, a memory kill means that the host ran out."""
        if self.box_memory is None:
            return False
        if self.memory_version == 2:
            return _counter(self.box_memory / "memory.events", "oom") > 0
        # Not the group's failcnt: Linux 6.18 does not count it if memory and swap have the same limit.
        limit = _counter(self.box_memory / "memory.limit_in_bytes")
        return _counter(self.box_memory / "memory.max_usage_in_bytes") > limit - _FULL_WITHIN_BYTES

    def remove_if_empty(self) -> bool:
        """Remove the groups; return ``False`` if processes are left in them."""
        for directory in {d for d in (self.tracker, self.memory) if d is not None}:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def _counter(file: Path, name: str = "") -> int:
    """Read the counter ``name`` from a control group's file, or its only counter; 0 if the group is gone."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            word, _, value = line.rpartition(" ")
            if word == name:
                return int(value)
    return 0


def group_processes(directory: Path) -> list[int]:
    """The ids of the processes in a group and in the groups below it."""
    pids: list[int] = []
    for path, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            pids += [int(word) for word in Path(path, "cgroup.procs").read_text().split()]
    return [pid for pid in pids if pid > 0]


def kill_group(directory: Path) -> None:
    """Kill every process in a group and below it; if possible atomically or frozen, so that no fork escapes."""
    with contextlib.suppress(OSError):
        (directory / "cgroup.kill").write_text("1")
        return
    state = directory / "freezer.state"
    with contextlib.suppress(OSError):
        state.write_text("FROZEN")
    for _ in range(20):
        processes = group_processes(directory)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not processes or state.exists():
            break
    with contextlib.suppress(OSError):
        state.write_text("THAWED")


def try_remove_tree(directory: Path) -> bool:
    """Remove a group and those below it. If processes are left in them, kill these and return ``False``."""
    for path, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    if directory.exists():
        kill_group(directory)
        return False
    return True


def remove_tree(directory: Path) -> None:
    """Repeat `try_remove_tree` until the group is gone. Give up after 5 s: the kernel cannot end some processes."""
    deadline = time.monotonic() + _REMOVE_DEADLINE_S
    while not try_remove_tree(directory) and time.monotonic() < deadline:
        time.sleep(0.002)


def _remove_if_possible(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _enable(directory: Path, controller: str) -> bool:
    """Make a v2 controller available to the groups below ``directory``."""
    control = directory / "cgroup.subtree_control"
    try:
        if controller not in control.read_text().split():
            control.write_text(f"+{controller}")
    except OSError:
        return False
    return True


def _prove_joinable(base: Path, version: int) -> None:
    """Raise `OSError` unless a child of this process can join a group below ``base``."""
    probe = base / f"probe-{os.getpid()}"
    probe.mkdir()
    try:
        child = os.fork()
        if child == 0:
            try:
                (probe / "cgroup.procs").write_text("0")
                os._exit(0)
            except OSError as error:
                os._exit(min(error.errno or 1, 255))
        _, status = os.waitpid(child, 0)
        if status:
            number = os.waitstatus_to_exitcode(status)
            raise OSError(number, f"cgroup v{version}: {os.strerror(number)}")
    finally:
        probe.rmdir()


def _limit_memory(directory: Path, version: int, size: int) -> None:
    names = (
        ("memory.max", "memory.swap.max") if version == 2 else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    )
    (directory / names[0]).write_text(str(size))
    with contextlib.suppress(FileNotFoundError):  # a kernel without swap accounting has no such file
        (directory / names[1]).write_text("0" if version == 2 else str(size))


def _limit_cpu(directory: Path, version: int, cores: float) -> None:
    quota = max(1000, int(cores * _CPU_PERIOD_US))
    if version == 2:
        (directory / "cpu.max").write_text(f"{quota} {_CPU_PERIOD_US}")
    else:
        (directory / "cpu.cfs_period_us").write_text(str(_CPU_PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota))
