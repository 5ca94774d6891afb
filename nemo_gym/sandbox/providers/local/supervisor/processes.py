"""Processes of the supervisor: its children, the user ids of boxes, and how a command enters a box."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import stat
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym.sandbox import archive, linux
from nemo_gym.sandbox.providers.local.protocol import read_stream, readable

# -- Children ------------------------------------------------------------------------------------------------------

_RESET_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


Problem = dict[str, Any]
"""Why a child failed: ``step`` (what it was doing), ``kind`` (of error response), ``errno`` and ``message``."""


class UserError(Exception):
    """A user that does not exist in the box."""


_KINDS = {UserError: "user", archive.ArchiveTooLargeError: "archive_too_large", archive.ArchiveError: "archive"}
_MESSAGE_CHARS = 300
"""Limit of a problem's message, with which its line is shorter than PIPE_BUF (4,096 bytes) however it is escaped."""


class Report:
    """A child's pipe to its parent. If the child fails, its parent learns from it the last ``step`` and the error."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.step = "starting a helper process"

    def write(self, error: Exception) -> None:
        kind = next((kind for class_, kind in _KINDS.items() if isinstance(error, class_)), "sandbox")
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        # Another process may write a line at the same time; the pipe keeps lines up to PIPE_BUF in one piece.
        message = message[:_MESSAGE_CHARS]
        problem = {"step": self.step, "kind": kind, "errno": getattr(error, "errno", None), "message": message}
        os.write(self.descriptor, json.dumps(problem).encode() + b"\n")


def fork(function: Callable[[Report], None], report_fd: int, *, keep: Sequence[int] = ()) -> int:
    """Run ``function`` in a child that has only the descriptors in ``keep`` (and 0, 1, 2 and ``report_fd``) and dies
    with the supervisor. The child exits with 0 if the function returns and with 1 if it raises. An `OSError`, an
    `archive.ArchiveError` or a `UserError` is written to ``report_fd`` as a `Problem`. Return the child's pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    report = Report(report_fd)
    try:
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        linux.die_with_parent(parent)
        close_all_but([*keep, report_fd])
        function(report)
        status = 0
    except (OSError, archive.ArchiveError, UserError) as error:
        report.write(error)
    except BaseException:  # noqa: BLE001 - a forked child must never return into the supervisor's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def close_all_but(keep: Sequence[int]) -> None:
    """Close every descriptor above 2 that is not in ``keep``."""
    start = 3
    for descriptor in sorted({d for d in keep if d > 2}):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 1 << 20)


async def read_byte(descriptor: int) -> bytes:
    """Wait for a byte from a pipe; return it, or ``b""`` at the pipe's end."""
    await readable(descriptor)
    return os.read(descriptor, 1)


async def read_all(descriptor: int) -> bytes:
    """Read a pipe to its end, and close it."""
    return b"".join([chunk async for chunk in read_stream(descriptor)])


def reap(pid: int) -> int:
    """Reap a child that has ended or is about to end; return its wait status."""
    return os.waitpid(pid, 0)[1]


async def wait_for_exit(pid: int, pidfd: int) -> int:
    """Wait for a child of this process and reap it; return its wait status. Closes ``pidfd``."""
    try:
        await readable(pidfd)
    finally:
        os.close(pidfd)
    return reap(pid)


async def run(function: Callable[[Report], None], *, keep: Sequence[int] = ()) -> Problem | None:
    """Run a blocking job in a child; return its problem, or ``None``. Cancelling kills the child."""
    read_end, write_end = os.pipe()
    try:
        pid = fork(function, write_end, keep=keep)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    pidfd = os.pidfd_open(pid)
    try:
        report = await read_all(read_end)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        reap(pid)
        os.close(pidfd)
        raise
    status = await wait_for_exit(pid, pidfd)
    if report:
        problem: Problem = json.loads(report)
        return problem
    if status:
        message = f"a helper process ended with wait status {status}"
        return {"step": "helper", "kind": "sandbox", "errno": None, "message": message}
    return None


# -- User ids ------------------------------------------------------------------------------------------------------
# Separate user ids for each box: a range of the host's ids in which no file has an owner.
#
# The kernel counts inotify instances, queued signals, epoll watches, pipe buffers and more per user. If user 0 of a
# box were user 0 of the host, one box could use them all up and leave none to the host's root and to other boxes. So
# each box has its own range of ids, whose first id creates the box's user namespace and is charged for its resources.
# Files keep their owners, because a box's file systems are mounted with ids shifted into the range (idmapped mounts,
# which need Linux 5.19 below overlayfs). Elsewhere boxes have the host's ids, and a share of what one user may hold.

COUNT = 65536
_FIRST = 0x7000_0000
"""First id of all ranges. Container managers, systemd and useradd do not use the ids from here to 2^31."""
_RANGES = 0x1000_0000 // COUNT
_REGISTER = Path("/run/nemo-gym-box-ids")
"""Supervisors lock one byte of this file for each range in use. The kernel releases the locks of a dead supervisor."""
_STAGES = ("/run", "/mnt", "/srv", "/tmp")
_SHARES = 4
_COUNTED = ("max_inotify_instances", "max_inotify_watches")
_LIMITED = (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)


class IdRanges:
    """The id ranges of this supervisor's boxes."""

    def __init__(self) -> None:
        self._reserved: set[int] = set()
        self._register = -1
        if _all_ids_exist():
            with contextlib.suppress(OSError):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._register = os.open(_REGISTER, flags, 0o600)
        self._can_shift: dict[frozenset[int], bool] = {}

    def take(self) -> int | None:
        """Reserve a free range and return its first id; ``None`` if none is available."""
        if self._register < 0:
            return None
        for number in range(_RANGES):
            if number not in self._reserved:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._register, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                    self._reserved.add(number)
                    return _FIRST + number * COUNT
        return None

    def give_back(self, first: int | None) -> None:
        """Release a range. Call this when no process has an id in it."""
        if first is not None:
            number = (first - _FIRST) // COUNT
            self._reserved.discard(number)
            fcntl.lockf(self._register, fcntl.LOCK_UN, 1, number)

    async def can_move(self, directories: Sequence[str]) -> bool:
        """Whether the file systems of all these directories support mounts with shifted ids."""
        if self._register < 0:
            return False
        devices = frozenset(os.stat(directory).st_dev for directory in directories)  # noqa: PTH116 - plain strings
        if devices not in self._can_shift:

            def job(_: Report) -> None:
                linux.unshare(linux.CLONE_NEWNS)
                namespace = user_namespace(_FIRST)
                for directory in directories:
                    os.close(linux.clone_mount(directory, namespace))

            self._can_shift[devices] = await run(job) is None
        return self._can_shift[devices]


def _id_maps() -> list[tuple[int, int, int]]:
    """The first line of this process's maps of user ids and of group ids: first id here, first id outside, count."""
    lines = (Path("/proc/self", name).read_text().split()[:3] for name in ("uid_map", "gid_map"))
    return [(int(here), int(outside), int(count)) for here, outside, count in lines]


def _all_ids_exist() -> bool:
    """Whether all ids up to the end of the ranges exist here, as they do outside of any user namespace."""
    return all((here, outside) == (0, 0) and count >= _FIRST + _RANGES * COUNT for here, outside, count in _id_maps())


def highest_id() -> int:
    """The highest user and group id that boxes can have: the highest one that exists here, at most 65535."""
    return min(COUNT - 1, *(count - 1 if here == 0 else 0 for here, _, count in _id_maps()))


def stage_for(directory: Path) -> str:
    """A directory that every user may enter and that the box's mounts can cover while the box is created."""
    return next(stage for stage in _STAGES if os.path.isdir(stage) and not directory.is_relative_to(stage))  # noqa: PTH112


def user_namespace(first: int) -> int:
    """Create a user namespace with the ids from ``first`` on, which the kernel regards as created by user ``first``.
    Return its descriptor. Raises `OSError`."""
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(done_write)
            os.setgroups([])
            # Keep capabilities, because some systems require them to create user namespaces.
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


def become_root() -> None:
    """Become user 0 of the current user namespace. On entry, a process still has its user from outside."""
    with contextlib.suppress(PermissionError):  # an ordinary user's namespace has one group
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def limit_counters() -> None:
    """Limit this user namespace, which has the host's ids, to a share of the inotify objects that a user may hold."""
    for name in _COUNTED:
        file = Path("/proc/sys/user", name)
        with contextlib.suppress(OSError):  # kernels without it have no such counter
            host = int(Path("/proc/sys/fs/inotify", f"max_user_{name.removeprefix('max_inotify_')}").read_text())
            file.write_text(str(max(1, host // _SHARES)))


def limit_process() -> None:
    """Likewise lower the limits that belong to a process. Children inherit these, and no box can raise them."""
    for kind in _LIMITED:
        _, hard = resource.getrlimit(kind)
        share = 1024 if hard == resource.RLIM_INFINITY else max(1, hard // _SHARES)
        resource.setrlimit(kind, (share, share))


# -- Entering a box ------------------------------------------------------------------------------------------------

NOT_EXECUTABLE = 126
NOT_FOUND = 127


@dataclass(frozen=True)
class Command:
    """One command, as passed to the child that executes it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    user: str | None
    streams: Sequence[int]
    """Descriptors of standard input, output and error."""
    namespaces: int
    """Mask of the box's namespaces to enter."""
    max_uid: int
    """Highest user and group id in the box."""
    first_id: int | None
    """The host's id of the box's user 0, if the box has its own range of ids."""
    watched: bool
    """Whether a watcher process must keep the process tree together, because there is no cgroup for that."""


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    groups: Sequence[int]
    home: str
    name: str


def enter_and_execute(command: Command, pidfd: int, joins: Sequence[int], report: Report, status_fd: int) -> NoReturn:
    """Start the command as a child of the supervisor, and exit. Runs in another child of the supervisor.

    Writes ``{"pid": …}`` to the report, and before or after it a problem if the command cannot be started. With
    ``watched``, the command's wait status is written to ``status_fd``.
    """
    report.step = "entering the box"
    if command.first_id is not None:
        for descriptor in command.streams:
            _give_stream(descriptor, command.first_id, command.first_id)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # nothing in the box may inspect this process until it runs the command
    linux.setns(pidfd, command.namespaces)
    os.close(pidfd)
    pid = linux.fork_as_sibling()
    if pid:
        os.write(report.descriptor, json.dumps({"pid": pid}).encode() + b"\n")
        os._exit(0)
    try:
        _start(command, joins, report, status_fd)
    except (OSError, UserError):
        raise
    except BaseException:  # noqa: BLE001 - such as a group id of the box's files that is no number
        os._exit(1)  # without a traceback: standard error may be the command's already


def _give_stream(descriptor: int, uid: int, gid: int) -> None:
    """Give a pipe to the command's user, who may then open /dev/stdout. Devices and sockets keep their owners."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.fchown(descriptor, uid, gid)


def _start(command: Command, joins: Sequence[int], report: Report, status_fd: int) -> NoReturn:
    report.step = "joining the box's control groups"
    for descriptor in joins:
        os.write(descriptor, b"0")
        os.close(descriptor)
    report.step = "starting the command"
    os.setsid()
    if command.watched:
        _watch(status_fd)
    else:
        os.close(status_fd)
    for number, descriptor in enumerate(command.streams):
        os.dup2(descriptor, number)
    for descriptor in {*command.streams} - {0, 1, 2}:
        os.close(descriptor)
    account = find_account(command.user, command.max_uid)
    with contextlib.suppress(OSError):
        for descriptor in range(3):
            _give_stream(descriptor, account.uid, account.gid)
    if command.first_id is None:
        limit_process()
    _become(account)
    os.umask(0o022)
    env = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, **command.env}
    _change_directory(command.cwd)
    _execute(command.argv, env)


def _become(account: Account) -> None:
    linux.drop_bounding_capabilities()
    with contextlib.suppress(PermissionError):  # not permitted in an ordinary user's namespace, which has one group
        os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    linux.drop_capabilities()
    linux.no_new_privileges()
    linux.install()


def _change_directory(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as error:
        _give_up(f"cannot change to directory {cwd}", error, NOT_EXECUTABLE)


def _execute(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except (OSError, TypeError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        _give_up(argv[0], error, NOT_FOUND if missing else NOT_EXECUTABLE)


def _give_up(what: str, error: Exception, exit_code: int) -> NoReturn:
    """Exit as a shell does. Python itself refuses zero bytes, lone surrogates and numbers, with no `OSError`."""
    reason = error.strerror if isinstance(error, OSError) else error
    os.write(2, f"{what}: {reason}\n".encode("utf-8", "backslashreplace"))
    os._exit(exit_code)


def _watch(status_fd: int) -> None:
    """Fork. The child returns, to become the command. The parent adopts the command's orphans, so that they stay its
    descendants, reports the command's wait status, and exits; the box's process 1 inherits the remaining processes."""
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        os.close(status_fd)
        return
    for descriptor in range(3):
        os.close(descriptor)
    os.closerange(3, status_fd)
    os.closerange(status_fd + 1, 1 << 20)
    while True:
        pid, status = os.wait()
        if pid == child:
            os.write(status_fd, struct.pack("i", status))
            os._exit(0)


def find_account(user: str | None, max_uid: int) -> Account:
    """Look up the account for a command in the box's own files, without running a program of the box.

    Raises:
        UserError: there is no such user or group, or its id does not exist in the box.
    """
    requested, _, requested_group = (user or "0").partition(":")
    entries = [line.rstrip("\n").split(":") for line in _lines("/etc/passwd")]
    entry = next((e for e in entries if len(e) >= 7 and requested in (e[0], e[2])), None)
    if entry is not None and entry[2].isdigit() and entry[3].isdigit():
        name, uid, gid, home = entry[0], int(entry[2]), int(entry[3]), entry[5] or "/"
    elif requested.isdigit():
        name, uid, gid, home = requested, int(requested), int(requested), "/root" if requested == "0" else "/"
        name = "root" if uid == 0 else name
    else:
        raise UserError(f"the box has no user '{requested}' in /etc/passwd")
    groups = [line.rstrip("\n").split(":") for line in _lines("/etc/group")]
    if requested_group:
        group = next((g for g in groups if len(g) >= 3 and requested_group in (g[0], g[2])), None)
        if group is None and not requested_group.isdigit():
            raise UserError(f"the box has no group '{requested_group}' in /etc/group")
        gid = int(group[2]) if group is not None else int(requested_group)
    if max(uid, gid) > max_uid:
        why = "an ordinary user's boxes have only user 0" if max_uid == 0 else f"ids end at {max_uid}"
        raise UserError(f"the box cannot run commands as '{user}' (uid {uid}, gid {gid}): {why}")
    extra = [int(g[2]) for g in groups if len(g) >= 4 and g[2].isdigit() and name in g[3].split(",")]
    return Account(uid, gid, sorted({gid, *(g for g in extra if g <= max_uid)}), home, name)


def _lines(path: str) -> list[str]:
    """The lines in the first MiB of a file of the box; none if the file is not readable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
