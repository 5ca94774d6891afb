"""Control groups of boxes and of their commands, on cgroup v1, v2 and both at once. Uses only the standard library.

The first part reads the groups of any process, also a container's. The rest makes those of the local provider: a box's
group carries the box's limits. Each command has its own group inside, for two purposes: to kill the command's
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
class Hierarchy:
    """A mounted cgroup hierarchy, and the group of one process in it."""

    version: int
    controllers: frozenset[str]
    group: Path
    """The directory of the process's group."""
    top: Path


def hierarchies(pid: int | str = "self") -> list[Hierarchy]:
    """The cgroup hierarchies that this process can see, with the group of the process ``pid`` in each. Raises
    `OSError` if there is no such process."""
    own_groups: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        own_groups["" if number == "0" else names] = path
    found = []
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
        group = top / relative.lstrip("/")
        found.append(Hierarchy(version, controllers, group if group.is_dir() else top, top))
    return found


def group_processes(directory: Path) -> list[int]:
    """The ids of the processes in a group and in the groups below it."""
    pids: list[int] = []
    for path, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            pids += [int(word) for word in Path(path, "cgroup.procs").read_text().split()]
    return [pid for pid in pids if pid > 0]


def counts_memory(group: Path) -> bool:
    """Whether the files of a memory group are readable here."""
    return (group / "memory.events").is_file() or (group / "memory.oom_control").is_file()


def oom_kills(memory: Path) -> int | None:
    """How many processes of a memory group the kernel killed because memory ran out; ``None`` if the group is gone."""
    kills = _counter(memory / "memory.events", "oom_kill")
    return _counter(memory / "memory.oom_control", "oom_kill") if kills is None else kills


def was_full(memory: Path) -> bool:
    """Whether a memory group has ever reached its limit. If not, a memory kill means that the host ran out."""
    if (overruns := _counter(memory / "memory.events", "oom")) is not None:
        return overruns > 0
    # Not the group's failcnt: Linux 6.18 does not count it if memory and swap have the same limit.
    limit, peak = _counter(memory / "memory.limit_in_bytes"), _counter(memory / "memory.max_usage_in_bytes")
    return limit is not None and peak is not None and peak > limit - _FULL_WITHIN_BYTES


def _counter(file: Path, name: str = "") -> int | None:
    """Read the counter ``name`` from a group's file, or its only counter; ``None`` if it is not readable."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            word, _, value = line.rpartition(" ")
            if word == name:
                return int(value)
    return None


# -- Groups of local boxes -----------------------------------------------------------------------------------------


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
        mounted_hierarchies = hierarchies()
        if not mounted_hierarchies:
            self.reasons = dict.fromkeys(LIMITS, "no cgroup file system is mounted; mount cgroup2 on /sys/fs/cgroup")
        for mounted in mounted_hierarchies:
            requested = [limit for limit in LIMITS if limit in mounted.controllers]
            if mounted.version == 1 and not requested and "freezer" not in mounted.controllers:
                continue
            self._claim(mounted, requested, name)
        for limit in LIMITS:
            if limit not in self._limits:
                self.reasons.setdefault(limit, f"no mounted cgroup hierarchy has the '{limit}' controller")

    def _claim(self, mounted: Hierarchy, requested: list[str], name: str) -> None:
        """Create the group ``name`` as near to this process as possible, where most wanted limits can be set."""
        base: Path | None = None
        usable: list[str] = []
        problem = ""
        for place in (mounted.group, *(p for p in mounted.group.parents if p.is_relative_to(mounted.top))):
            candidate, possible = place / name, requested
            try:
                candidate.mkdir(exist_ok=True)
                if mounted.version == 2:
                    possible = [limit for limit in requested if _enable(place, limit) and _enable(candidate, limit)]
                    if possible != requested:
                        problem = problem or f"{place} has processes of its own, so no limit can be set below it"
                _prove_joinable(candidate, mounted.version)
            except OSError as error:
                problem = problem or f"{place} cannot be used by this user ({error.strerror})"
                _remove_if_possible(candidate)
                continue
            if base is not None:
                if len(possible) <= len(usable):
                    _remove_if_possible(candidate)
                    continue
                _remove_if_possible(base)
            base, usable = candidate, possible
            if usable == requested:
                break
        for limit in requested:
            if base is not None and limit in usable:
                self._limits[limit] = (mounted.version, base)
                self.reasons.pop(limit, None)
            elif limit not in self._limits:
                self.reasons[limit] = f"cgroup v{mounted.version}: {problem}; {_HOW_TO_DELEGATE}"
        if base is not None:
            self.bases.append(base)
            if mounted.version == 2 or ("freezer" in mounted.controllers and self._tracker is None):
                self._tracker = base

    @property
    def enforced(self) -> list[str]:
        """The limits, of `LIMITS`, that can be enforced here."""
        return sorted(self._limits)

    def create_box(self, box_id: str, *, memory_mib: int | None, pids: int | None, cpu: float | None) -> BoxGroups:
        """Create a box's groups and set its limits. Raises `OSError` if the kernel refuses a limit."""
        values = {"memory": memory_mib, "pids": pids, "cpu": cpu}
        directories = {limit: self._limits[limit][1] / box_id for limit in LIMITS if values[limit] is not None}
        if self._tracker is not None:
            directories["tracker"] = self._tracker / box_id
        groups = BoxGroups(directories)
        try:
            for directory in set(directories.values()):
                directory.mkdir()
            if memory_mib is not None:
                version = self._limits["memory"][0]
                _limit_memory(directories["memory"], version, memory_mib * 1024 * 1024)
                if version == 2:
                    _enable(directories["memory"], "memory")
            if pids is not None:
                (directories["pids"] / "pids.max").write_text(str(pids))
            if cpu is not None:
                _limit_cpu(directories["cpu"], self._limits["cpu"][0], cpu)
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

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories

    def create_command(self, exec_id: str) -> CommandGroups:
        """Create the groups of one command inside the box's groups."""
        tracker, memory = self._directories.get("tracker"), self._directories.get("memory")
        parents = {d for d in (tracker, memory) if d is not None}
        for directory in parents:
            (directory / exec_id).mkdir()
        shared = {d for name, d in self._directories.items() if name in ("pids", "cpu")} - parents
        return CommandGroups(
            tracker=tracker / exec_id if tracker else None,
            memory=memory / exec_id if memory else None,
            join=[*(d / exec_id for d in parents), *shared],
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
    """The command's group inside the memory group of the whole box, which carries the limit."""
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

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the command because memory ran out, in the box or on the host."""
        return self.memory is not None and bool(oom_kills(self.memory))

    @property
    def box_was_full(self) -> bool:
        return self.memory is not None and was_full(self.memory.parent)

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
