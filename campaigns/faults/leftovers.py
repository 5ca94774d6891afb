"""Find what the boxes of one run leave on this machine, from the kernel and the engine instead of our own records."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.sandbox.base import BoxLabel

NAMESPACES = ("net", "pid", "mnt", "ipc", "uts", "user")
CGROUP_ROOT = Path("/sys/fs/cgroup")
KINDS = ("processes", "mounts", "cgroups", "namespaces", "containers", "files")


@dataclass(frozen=True)
class Scope:
    """The run whose boxes to look for, so that other runs may use the machine meanwhile."""

    state_dir: Path
    """The local provider's state directory. The records of its supervisors name the control groups of boxes."""
    run_id: str
    docker_host: str | None = None
    groups: set[str] = field(default_factory=set)
    """Control groups of local boxes so far: processes in them are found even when their supervisor is gone."""


def leftovers(scope: Scope) -> dict[str, list[str]]:
    """Return what exists of the run's boxes now, by kind, without empty kinds."""
    own_namespaces = {name: _namespace("self", name) for name in NAMESPACES}
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    found["containers"] |= set(_containers(scope))
    found["cgroups"] |= _cgroups(scope, found["containers"])
    found["files"] |= {str(path) for path in scope.state_dir.glob("*/boxes/*")}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            mounts = [
                line.split()[4] for line in (entry / "mountinfo").read_text().splitlines() if _is_of_scope(line, scope)
            ]
            groups = (entry / "cgroup").read_text()
            member = any(container in groups for container in found["containers"])
            # The kernel names groups from the root of each hierarchy: the last two parts are enough to identify one.
            member |= any("/" + "/".join(Path(group).parts[-2:]) in groups for group in scope.groups)
            spaces = {name: _namespace(entry.name, name) for name in NAMESPACES}
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:80]
        except OSError:
            continue  # the process ended meanwhile
        if mounts or member:
            found["processes"].add(f"{entry.name} {command}")
            found["mounts"] |= {f"{spaces['mnt']} {mount}" for mount in mounts}
            found["namespaces"] |= {value for name, value in spaces.items() if value != own_namespaces[name]}
    return {kind: sorted(things) for kind, things in found.items() if things}


def open_sockets() -> list[str]:
    """Return this process's sockets. `foreign_sockets` may mistake some of them for doors: the kernel's tables omit
    sockets that are not connected yet or no longer, and other tests may have left some."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(f"{descriptor.name}: {descriptor.readlink()}")
    return [link for link in links if "socket:[" in link]


def foreign_sockets() -> list[str]:
    """Return the sockets that this process has in other network namespaces: doors of boxes."""
    own_inodes: set[str] = set()
    for table, column in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9), ("unix", 6), ("netlink", 9)):
        lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        own_inodes |= {fields[column] for fields in map(str.split, lines) if len(fields) > column}
    foreign = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue  # closed meanwhile
        if target.startswith("net:[") or (target.startswith("socket:[") and target[8:-1] not in own_inodes):
            foreign.append(f"{descriptor.name}: {target}")
    return foreign


def _is_of_scope(mount: str, scope: Scope) -> bool:
    return str(scope.state_dir) in mount


def _namespace(pid: str, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


def _cgroups(scope: Scope, containers: set[str]) -> set[str]:
    """Return existing groups of boxes: below the group of a supervisor that runs or ran, or named like a container."""
    groups = set()
    for record in scope.state_dir.glob("*/supervisor.json"):
        for base in json.loads(record.read_bytes())["cgroups"]:
            scope.groups.update(f"{base}/{name}" for name in next(os.walk(base), (base, [], []))[1])
    groups |= {group for group in scope.groups if Path(group).is_dir()}
    for directory, _, _ in os.walk(CGROUP_ROOT):
        if any(container in directory for container in containers):
            groups.add(directory)
    return groups


def _containers(scope: Scope) -> list[str]:
    if scope.docker_host is None:
        return []
    label_filter = f"label={BoxLabel.RUN}={scope.run_id}"
    command = ["docker", "-H", scope.docker_host, "ps", "-aq", "--no-trunc", "--filter", label_filter]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
