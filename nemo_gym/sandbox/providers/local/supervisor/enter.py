"""The child's side of a command in a box: join its groups and namespaces, give up all rights, become the command."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from nemo_gym.sandbox import linux, syscall_filter
from nemo_gym.sandbox.providers.local.supervisor import user_ids
from nemo_gym.sandbox.providers.local.supervisor.children import report

NOT_EXECUTABLE = 126
NOT_FOUND = 127


@dataclass(frozen=True)
class Command:
    """One command as its child needs it."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    user: str | None
    stdin: int
    stdout: int
    stderr: int
    namespaces: int
    """Mask of the box's namespaces to enter."""
    max_uid: int
    """Highest user id that exists in the box."""
    first_id: int | None
    """The host's number of the box's user 0, where its ids are the box's alone."""
    watched: bool
    """Whether a watcher must keep hold of the process tree, because no cgroup does."""


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    groups: Sequence[int]
    home: str
    name: str


class UserError(Exception):
    """A user the box does not have."""


def enter_and_execute(command: Command, pidfd: int, joins: Sequence[int], report_fd: int, status_fd: int) -> NoReturn:
    """In a child of the supervisor: start the command as the supervisor's own child, and end.

    Writes ``{"pid": …}`` to ``report_fd``, then a problem if the command could not be started. With ``watched``,
    the command's wait status goes to ``status_fd``.
    """
    if command.first_id is not None:
        for descriptor in (command.stdin, command.stdout, command.stderr):
            _own_stream(descriptor, command.first_id, command.first_id)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)  # until the command itself runs, nothing in the box may look into us
    linux.setns(pidfd, command.namespaces)
    os.close(pidfd)
    pid = linux.fork_as_sibling()
    if pid:
        os.write(report_fd, json.dumps({"pid": pid}).encode() + b"\n")
        os._exit(0)
    _start(command, joins, report_fd, status_fd)


def _own_stream(descriptor: int, uid: int, gid: int) -> None:
    """Give a pipe to the command's user, who may then open /dev/stdout; a device or a socket stays whose it is."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.fchown(descriptor, uid, gid)


def _start(command: Command, joins: Sequence[int], report_fd: int, status_fd: int) -> NoReturn:
    step = "joining the box's control groups"
    try:
        for descriptor in joins:
            os.write(descriptor, b"0")
            os.close(descriptor)
        step = "starting the command"
        os.setsid()
        if command.watched:
            _watch(status_fd)
        else:
            os.close(status_fd)
        for wanted, descriptor in enumerate((command.stdin, command.stdout, command.stderr)):
            os.dup2(descriptor, wanted)
        for descriptor in {command.stdin, command.stdout, command.stderr} - {0, 1, 2}:
            os.close(descriptor)
        account = find_account(command.user, command.max_uid)
        with contextlib.suppress(OSError):
            for descriptor in range(3):
                _own_stream(descriptor, account.uid, account.gid)
        if command.first_id is None:
            user_ids.limit_process()
        _become(account)
        os.umask(0o022)
        env = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, **command.env}
        _change_directory(command.cwd)
        _execute(command.argv, env)
    except UserError as error:
        report(report_fd, {"step": "user", "errno": None, "message": str(error)})
    except OSError as error:
        report(report_fd, {"step": step, "errno": error.errno, "message": f"{error.strerror}"})
    finally:
        os._exit(1)


def _become(account: Account) -> None:
    linux.drop_bounding_capabilities()
    with contextlib.suppress(PermissionError):  # forbidden in an ordinary user's namespace, which has one group anyway
        os.setgroups(account.groups)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    linux.drop_capabilities()
    linux.no_new_privileges()
    syscall_filter.install()


def _change_directory(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        os.write(2, f"cannot change to directory {cwd}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        os._exit(NOT_EXECUTABLE)


def _execute(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)


def _watch(status_fd: int) -> None:
    """Fork; the child returns to become the command. The parent adopts the command's orphans, so that they stay its
    descendants, reports the command's end, and leaves what is left to the box."""
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
    """The account a command runs as, looked up in the box's own files by our code.

    Raises:
        UserError: no such user, or its id does not exist in the box.
    """
    wanted, _, wanted_group = (user or "0").partition(":")
    entries = [line.rstrip("\n").split(":") for line in _lines("/etc/passwd")]
    entry = next((e for e in entries if len(e) >= 7 and wanted in (e[0], e[2])), None)
    if entry is not None and entry[2].isdigit() and entry[3].isdigit():
        name, uid, gid, home = entry[0], int(entry[2]), int(entry[3]), entry[5] or "/"
    elif wanted.isdigit():
        name, uid, gid, home = wanted, int(wanted), int(wanted), "/root" if wanted == "0" else "/"
        name = "root" if uid == 0 else name
    else:
        raise UserError(f"the box has no user '{wanted}' in /etc/passwd")
    groups = [line.rstrip("\n").split(":") for line in _lines("/etc/group")]
    if wanted_group:
        found = next((g for g in groups if len(g) >= 3 and wanted_group in (g[0], g[2])), None)
        if found is None and not wanted_group.isdigit():
            raise UserError(f"the box has no group '{wanted_group}' in /etc/group")
        gid = int(found[2]) if found is not None else int(wanted_group)
    if max(uid, gid) > max_uid:
        why = "an ordinary user's boxes have only user 0" if max_uid == 0 else f"ids end at {max_uid}"
        raise UserError(f"the box cannot run commands as '{user}' (uid {uid}, gid {gid}): {why}")
    extra = [int(g[2]) for g in groups if len(g) >= 4 and g[2].isdigit() and name in g[3].split(",")]
    return Account(uid, gid, sorted({gid, *(g for g in extra if g <= max_uid)}), home, name)


def _lines(path: str) -> list[str]:
    """Lines of a file of the box; none when it is missing, not a file, or unreasonably large."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
