"""Hosts on one machine: each with a network, processes, a name and writable files of its own.

What they share is what hosts share that were set up alike: the kernel, the system's programs, this checkout and the
fetched agents, all of it read-only. They see each other over a switch, and nothing else: no route leaves it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym._util.files import cache_root

ROOT = Path(__file__).resolve().parents[3]
NETWORK = "10.77.0.0/24"
_ADDRESS = "10.77.0.{}"
OWN = ("/tmp", "/var/tmp", "/var/lib", "/run", "/dev/shm", str(Path.home()))
"""Where anything is written; each host has these for itself, in memory."""
_CGROUPS = Path("/sys/fs/cgroup")
_READY = "a host is up"
STARTED_WITHIN_S = 30.0


@dataclass
class Host:
    """One of them. ``run`` and ``start`` begin processes in it, ``kill`` ends it as a power cut does."""

    name: str
    address: str
    holder: subprocess.Popen[str] = field(repr=False)
    init: int
    """Its first process, as this machine numbers it; the host ends with it."""
    groups: tuple[Path, ...] = field(repr=False)

    @property
    def is_up(self) -> bool:
        return self.holder.poll() is None

    def command(self, argv: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        join = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in self.groups)
        inside = ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--net", "--pid", f"--wd={ROOT}"]
        own = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(Path.home()),
            "LANG": "C.UTF-8",
            "COLUMNS": "200",
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        }
        words = [*inside, "env", "-i", *(f"{key}={value}" for key, value in own.items()), *argv]
        return ["sh", "-c", f"{join or ':'}; exec {shlex.join(words)}"]

    def run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> bytes:
        """What the command printed. Raises `AssertionError`, with its last words, when it fails."""
        done = subprocess.run(
            self.command(argv, environment or {}), input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        said = (done.stdout + done.stderr)[-3000:].decode(errors="replace")
        assert done.returncode == 0, f"{self.name}: {shlex.join(argv)} ended with {done.returncode}:\n{said}"
        return done.stdout

    def start(
        self, argv: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command(argv, environment or {}), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def write(self, path: str, data: bytes) -> None:
        """Put a file where only this host has it."""
        self.run(["sh", "-c", 'mkdir -p "${1%/*}" && cat > "$1"', "sh", path], stdin=data)

    def read(self, path: str) -> bytes:
        return self.run(["cat", path])

    def kill(self) -> None:
        """Everything in it dies at once, and its addresses are gone."""
        if self.is_up:
            os.kill(self.init, signal.SIGKILL)
            self.holder.wait(30)


@contextmanager
def switched_hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """These hosts, on one switch, until the block ends."""
    assert os.geteuid() == 0, "networks, mounts and a switch of their own are root's to make: run these tests as root"
    run = f"nghosts-{uuid.uuid4().hex[:8]}"
    hosts: dict[str, Host] = {}
    switch = _held("switch", _UNSHARE_SWITCH, "true")
    try:
        _ip(switch[1], "link add br0 type bridge", "link set br0 up")
        for number, name in enumerate(names, start=11):
            hosts[name] = _host(name, _ADDRESS.format(number), number, switch[1], run)
        yield hosts
    finally:
        for host in hosts.values():
            host.kill()
        switch[0].kill()
        switch[0].wait()
        for host in hosts.values():
            for group in host.groups:
                _remove_group(group.parent)
        for hierarchy in _hierarchies():
            _remove_group(hierarchy / run)


_UNSHARE_SWITCH = ("--net",)
_UNSHARE_HOST = ("--mount", "--uts", "--ipc", "--net", "--mount-proc", "--propagation=private")


def _host(name: str, address: str, number: int, switch: int, run: str) -> Host:
    holder, init = _held(name, _UNSHARE_HOST, f"hostname {name}\n{_own_files()}")
    groups = []
    for hierarchy in _hierarchies():
        # Processes one level below the host's own group: cgroup v2 limits only groups that hold groups alone.
        group = hierarchy / run / name / "main"
        group.mkdir(parents=True)
        groups.append(group)
        _inherit_cpuset(hierarchy, group)
    host = Host(name, address, holder, init, tuple(groups))
    _ip(switch, f"link add v{number} type veth peer name eth0 netns {init}", f"link set v{number} master br0 up")
    prefix = NETWORK.partition("/")[2]
    _ip(init, "link set lo up", f"addr add {address}/{prefix} dev eth0", "link set eth0 up")
    return host


def _held(name: str, unshare: Sequence[str], setup: str) -> tuple[subprocess.Popen[str], int]:
    """Namespaces, and the process that keeps them: it dies with this one, and they with it."""
    # Its orphans need no parent to wait for them where their end is ignored, which stays so across exec.
    script = f"set -e\n{setup}\necho '{_READY}'\ntrap '' CHLD\nexec sleep infinity"
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", "unshare", *unshare, "--pid", "--fork", "--kill-child", "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdout is not None
    said = holder.stdout.readline().strip()
    assert said == _READY, f"host {name}: {said} {holder.stdout.read() if holder.poll() is not None else ''}"
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not (children := Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()):
        assert time.monotonic() < deadline, f"host {name} has no first process"
        time.sleep(0.01)
    holder.stdout.close()
    return holder, int(children[0])


def _own_files() -> str:
    """Lines of a script that give a host its own writable directories and keep what is installed, read-only."""
    lines, kept = [], _installed()
    descriptors = [f"exec {number}<{shlex.quote(str(path))}" for number, path in enumerate(kept, start=3)]
    lines += descriptors
    lines += [f"[ ! -d {path} ] || mount -t tmpfs -o mode=1777 tmpfs {path}" for path in map(shlex.quote, OWN)]
    for number, path in enumerate(kept, start=3):
        place = shlex.quote(str(path))
        lines += [
            f"mkdir -p {place}",
            # As it is: the path that it leads to is hidden by now.
            f"mount --no-canonicalize --bind /proc/self/fd/{number} {place}",
            f"mount -o remount,bind,ro {place}",
            f"exec {number}<&-",
        ]
    return "\n".join(lines)


def _installed() -> list[Path]:
    """Directories of software: the checkout, the interpreter and its packages, the fetched agents."""
    wanted = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *(cache_root() / name for name in ("agents", "clis"))]
    found = [path.resolve() for path in wanted if path.is_dir()]
    return [path for path in found if not any(path != other and path.is_relative_to(other) for other in found)]


def _ip(process: int, *commands: str) -> None:
    for command in commands:
        argv = ["nsenter", f"--target={process}", "--net", "ip", *command.split()]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"ip {command}: {done.stderr}"


def _hierarchies() -> list[Path]:
    """Where control groups are made: the one hierarchy, or each of them."""
    if (_CGROUPS / "cgroup.procs").is_file():
        return [_CGROUPS]
    return [path for path in sorted(_CGROUPS.iterdir()) if not path.is_symlink() and (path / "cgroup.procs").is_file()]


def _inherit_cpuset(hierarchy: Path, group: Path) -> None:
    """A new group of cgroup v1's cpuset takes no process until it is told which processors and memory it has."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (value := hierarchy / name).is_file() and not (hierarchy / "cgroup.controllers").is_file():
            for each in (group.parent.parent, group.parent, group):
                (each / name).write_text(value.read_text())


def _remove_group(group: Path) -> None:
    """With the groups in it; what still ends is waited for."""
    deadline = time.monotonic() + 10
    while group.is_dir():
        for path in sorted((p for p in group.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
            _rmdir(path)
        _rmdir(group)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        pass  # a process in it is just ending
