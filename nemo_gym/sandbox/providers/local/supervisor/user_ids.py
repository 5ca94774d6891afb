"""User ids of a box's own: a range of the host's for each, which no file has.

The kernel counts inotify instances, queued signals, epoll watches, pipe buffers and more per user. With user 0 of a
box being the host's by number, one box that holds all of them leaves none to the host's root and to every other box.
So a box has a range of ids for itself, and its user namespace is made by the first of them, to whom the kernel then
charges what the box holds. Files keep the owners that they have: the file systems of a box are mounted with their ids
moved by as much (idmapped mounts, Linux 5.19 below overlayfs).

Where that cannot be had, boxes have the host's ids, and a share of what one user may hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.local.supervisor import children

COUNT = 65536
_FIRST = 0x7000_0000
"""Container managers, systemd and useradd leave what lies between here and 2^31 alone."""
_RANGES = 0x1000_0000 // COUNT
_REGISTER = Path("/run/nemo-gym-box-ids")
"""A byte of it is locked for each range in use, so that supervisors share them out; locks end with their holder."""
_STAGES = ("/run", "/mnt", "/srv", "/tmp")
_SHARES = 4
_COUNTED = ("max_inotify_instances", "max_inotify_watches")
_LIMITED = (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)


class IdRanges:
    """The ranges that this supervisor's boxes have."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._register = -1
        if _all_ids_exist():
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._register = os.open(_REGISTER, flags, 0o600)
        self._moves: dict[frozenset[int], bool] = {}

    def take(self) -> int | None:
        """The first id of a range that nobody has; ``None`` when there is none."""
        if self._register < 0:
            return None
        for number in range(_RANGES):
            if number not in self._taken:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._register, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                    self._taken.add(number)
                    return _FIRST + number * COUNT
        return None

    def give_back(self, first: int | None) -> None:
        """Let others have a range, once no process has an id of it."""
        if first is not None:
            number = (first - _FIRST) // COUNT
            self._taken.discard(number)
            fcntl.lockf(self._register, fcntl.LOCK_UN, 1, number)

    async def can_move(self, directories: Sequence[str]) -> bool:
        """Whether the file systems of all these directories can be mounted with their ids moved."""
        if self._register < 0:
            return False
        devices = frozenset(os.stat(directory).st_dev for directory in directories)  # noqa: PTH116 - plain strings
        if devices not in self._moves:

            def job(report_fd: int) -> None:
                try:
                    linux.unshare(linux.CLONE_NEWNS)
                    namespace = user_namespace(_FIRST)
                    for directory in directories:
                        os.close(linux.clone_mount(directory, namespace))
                except OSError as error:
                    children.report_error(report_fd, "moving user ids", error)

            self._moves[devices] = await children.run(job) is None
        return self._moves[devices]


def _all_ids_exist() -> bool:
    """Whether every id there is exists for us, as it does outside of any user namespace."""
    for name in ("uid_map", "gid_map"):
        first = Path("/proc/self", name).read_text().split()
        if (int(first[0]), int(first[1])) != (0, 0) or int(first[2]) < _FIRST + _RANGES * COUNT:
            return False
    return True


def stage_for(directory: Path) -> str:
    """A directory that everybody may enter, and that a box's own mounts can cover while it is made."""
    return next(stage for stage in _STAGES if os.path.isdir(stage) and not directory.is_relative_to(stage))  # noqa: PTH112


def user_namespace(first: int) -> int:
    """A descriptor of a new user namespace with the ids from ``first`` on, whose maker the kernel takes for user
    ``first``. Raises `OSError`."""
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(done_write)
            os.setgroups([])
            # Kept, as some systems let nobody without them make user namespaces.
            linux.prctl(linux.PR_SET_KEEPCAPS, 1)
            os.setresgid(first, first, first)
            os.setresuid(first, first, first)
            linux.raise_capabilities()
            linux.unshare(linux.CLONE_NEWUSER)
            os.write(ready_write, b"\0")
            os.read(done_read, 1)
        except OSError as error:
            os.write(ready_write, bytes([min(error.errno or 255, 255)]))
        finally:
            os._exit(0)
    os.close(done_read)
    os.close(ready_write)
    try:
        number = os.read(ready_read, 1)
        if number != b"\0":
            raise OSError(number[0] if number else 0, os.strerror(number[0]) if number else "its maker died")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {first} {COUNT}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(done_write)
        os.waitpid(pid, 0)


def become_root_of(namespace: int) -> None:
    """Enter a user namespace, as its user 0."""
    linux.setns(namespace, linux.CLONE_NEWUSER)
    become_root()


def become_root() -> None:
    """Be user 0 of the user namespace that was entered; until then one is whoever one was outside."""
    with contextlib.suppress(PermissionError):  # an ordinary user's namespace has one group
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def limit_counters() -> None:
    """In a user namespace with the host's ids: let it hold a share of what its maker may hold, whoever of it does."""
    for name in _COUNTED:
        file = Path("/proc/sys/user", name)
        with contextlib.suppress(OSError):  # kernels without it have no such counter
            host = int(Path("/proc/sys/fs/inotify", f"max_user_{name.removeprefix('max_inotify_')}").read_text())
            file.write_text(str(max(1, host // _SHARES)))


def limit_process() -> None:
    """The same for what the kernel limits by process; children have it too, and nobody in a box can raise it."""
    for kind in _LIMITED:
        _, hard = resource.getrlimit(kind)
        share = 1024 if hard == resource.RLIM_INFINITY else max(1, hard // _SHARES)
        resource.setrlimit(kind, (share, share))
