"""Linux system calls that Python's standard library does not offer, through ctypes; standard library only.

Every wrapper raises `OSError` with the kernel's errno and a message that names the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# -- System calls --------------------------------------------------------------------------------------------------

CLONE_PARENT = 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_RELATIME = 0x200000
MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every type of processor
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOUNT_ATTR_IDMAP = 0x100000
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _syscall(call: str, number: int, *arguments: int | bytes) -> int:
    """Make a system call for which the C library has no function; ``call`` names it in the error message."""
    words = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    return _check(int(_libc.syscall(ctypes.c_long(number), *words)), call)


def setns(fd: int, namespaces: int) -> None:
    """Enter the namespaces behind ``fd``, which is a namespace file (``namespaces`` is 0 or its type) or a pidfd
    (``namespaces`` is a mask of types)."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(namespaces)), "setns")


def unshare(namespaces: int) -> None:
    """Leave the given namespaces for new ones."""
    _check(_libc.unshare(ctypes.c_int(namespaces)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """Call mount(2). The kernel refuses ``data`` that is longer than a page."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )
    _check(result, f"mount {kind or source} on {target}")


def clone_mount(path: str, user_namespace: int | None = None, *, recursive: bool = False) -> int:
    """Return a descriptor of a detached copy of the mount whose root is ``path``; attach it with `attach_mount`. With
    ``user_namespace`` (a descriptor), that namespace's id map applies to the owners of files in the copy."""
    recursion = _AT_RECURSIVE if recursive else 0
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | recursion
    tree = _syscall(f"open_tree {path}", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)
    if user_namespace is not None:
        attributes = struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
        flags = _AT_EMPTY_PATH | recursion
        try:
            _syscall(f"mount_setattr {path}", _MOUNT_SETATTR, tree, b"", flags, attributes, len(attributes))
        except OSError:
            os.close(tree)
            raise
    return tree


def attach_mount(tree: int, target: str) -> None:
    """Mount the tree that `clone_mount` returned at ``target``, and close its descriptor."""
    try:
        flags = _MOVE_MOUNT_F_EMPTY_PATH
        _syscall(f"move_mount {target}", _MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), flags)
    finally:
        os.close(tree)


def umount(target: str, flags: int = 0) -> None:
    """Call umount2(2)."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    """Call prctl(2) with 0 for the remaining arguments."""
    result = _libc.prctl(
        ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(third), ctypes.c_ulong(0), ctypes.c_ulong(0)
    )
    return _check(result, f"prctl {option}")


def die_with_parent(expected_parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; exits at once if that has already happened."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


def fork_as_sibling() -> int:
    """Fork a child whose parent is the caller's parent (CLONE_PARENT). Returns 0 in the child. Only for
    single-threaded processes whose child soon execs or exits, because Python's fork handlers do not run."""
    number = _CLONE_NUMBER.get(platform.machine())
    if number is None:
        raise OSError(f"fork_as_sibling: processor type {platform.machine()} is not supported")
    return _syscall("clone", number, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)


def drop_bounding_capabilities() -> None:
    """Make every capability unobtainable by exec. Call it before changing the user, which loses the right to do so."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if capability < 32:  # every kernel has those; beyond its last capability it returns EINVAL
                raise OSError(error.errno, f"cannot drop capability {capability}") from error
            break


def drop_capabilities() -> None:
    """Give up every capability this process has."""
    _check(_libc.capset(_CAPABILITY_HEADER, (ctypes.c_uint32 * 6)()), "capset")


def raise_capabilities() -> None:
    """Make every capability effective that this process is permitted to have."""
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capget(_CAPABILITY_HEADER, data), "capget")
    data[0], data[3] = data[1], data[4]
    _check(_libc.capset(_CAPABILITY_HEADER, data), "capset")


def become_for_files(uid: int, gid: int) -> None:
    """Switch the file system user and group, which own new files, and keep every capability."""
    _libc.setfsgid(ctypes.c_uint(gid))
    _libc.setfsuid(ctypes.c_uint(uid))
    raise_capabilities()


def no_new_privileges() -> None:
    """Prevent every later exec from gaining privileges (set-uid bits and file capabilities are ignored)."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def listen_on_loopback(port: int) -> socket.socket:
    """Return a non-blocking TCP socket that listens on 127.0.0.1 of the calling thread's network namespace."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_in_network_namespace(namespace: int | str, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:``port`` inside another network namespace.

    A socket stays in the namespace in which it was created, so a server in this process that accepts on it is
    reachable from inside that namespace without any process, mount or route there.

    Args:
        namespace: a process id, or the path of a namespace file (``/proc/<pid>/ns/net``, ``/run/netns/x``,
            ``/proc/self/fd/<n>``).
        port: TCP port; 0 lets the kernel choose.

    Raises:
        OSError: no such process, no permission (CAP_SYS_ADMIN over the namespace is needed), or the port is taken.
    """
    path = f"/proc/{namespace}/ns/net" if isinstance(namespace, int) else namespace
    return _in_network_namespace(path, lambda: listen_on_loopback(port))


def permit_low_ports(namespace: str) -> None:
    """Let every process of a network namespace listen on ports below 1024, as the Docker Engine does. Has no effect
    where ``/proc/sys`` is read-only.

    Args:
        namespace: the path of a namespace file.
    """
    setting = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    with contextlib.suppress(OSError):
        _in_network_namespace(namespace, lambda: setting.write_text("0"))


T = TypeVar("T")


def _in_network_namespace(path: str, function: Callable[[], T]) -> T:
    def work() -> T:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            setns(fd, CLONE_NEWNET)
        finally:
            os.close(fd)
        return function()

    # setns changes only the calling thread's namespace, so a thread of its own leaves all others where they are.
    with ThreadPoolExecutor(1, thread_name_prefix="netns") as thread:
        return thread.submit(work).result()


@contextlib.contextmanager
def locked(path: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on a file, which is created if it is missing, during the ``with`` block. Blocks until it is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


# -- Processes -----------------------------------------------------------------------------------------------------

_PF_EXITING = 0x4


@dataclass(frozen=True)
class LiveProcess:
    """What ``/proc/<pid>/stat`` says about a process that has not ended."""

    pid: int
    parent: int
    session: int
    is_exiting: bool
    """Whether the process has begun to exit. A box's process 1, when it exits, waits until all others have ended."""
    started_ticks: int
    """When it started, on the clock of `uptime_ticks`."""


def live_process(pid: int) -> LiveProcess | None:
    """Read a process's data; ``None`` if there is no such process, or it has ended and waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return LiveProcess(pid, int(fields[1]), int(fields[3]), bool(int(fields[6]) & _PF_EXITING), int(fields[19]))


def uptime_ticks() -> int:
    """The current time on the clock on which the kernel records when processes start."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


# -- System call filter of boxes -----------------------------------------------------------------------------------
# The system calls that no process of a box may make; standard library only.
#
# Namespaces do not isolate everything: VM sockets reach the machine's hypervisor and its neighbours from any network
# namespace, kernel keyrings belong to the host's session, and io_uring creates sockets without calling ``socket``, so
# a filter of that call does not catch them.

SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET)
"""The families that a box may use: those that its namespaces confine (a unix socket's name is a path in the box's file
system or an abstract name in its network namespace)."""

_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_X32 = 0x40000000

# struct seccomp_data: nr, arch, instruction pointer, six 64-bit arguments (little-endian machines).
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06


@dataclass(frozen=True)
class _Calls:
    """The system call numbers of one ABI."""

    arch: int
    socket: tuple[int, ...]
    refused: tuple[int, ...]
    """Calls that fail with EPERM: add_key, request_key, keyctl; perf_event_open, bpf, userfaultfd."""
    absent: tuple[int, ...] = (425, 426, 427)
    """Calls that fail with ENOSYS: io_uring_*, numbered alike everywhere."""


# Programs for the 32-bit ABI of the same processor get the same filter; socketcall (102) fails too, as a filter cannot
# see its arguments.
_BY_MACHINE = {
    "x86_64": (
        _Calls(0xC000003E, (41, 53), (248, 249, 250, 298, 321, 323)),
        _Calls(0x40000003, (359, 360), (286, 287, 288, 336, 357, 374), (102, 425, 426, 427)),
    ),
    "aarch64": (
        _Calls(0xC00000B7, (198, 199), (217, 218, 219, 241, 280, 282)),
        _Calls(0x40000028, (281, 288), (309, 310, 311, 364, 386, 388), (102, 425, 426, 427)),
    ),
}


def program(machine: str) -> bytes:
    """Return the filter as BPF instructions for a processor type as `platform.machine` names it.

    Raises:
        NotImplementedError: there is no filter for that processor type.
    """
    if machine not in _BY_MACHINE:
        raise NotImplementedError(f"no filter of system calls for the processor type {machine}")
    code: list[bytes] = []
    for calls in _BY_MACHINE[machine]:
        body = _body(calls)
        code += [_step(_LOAD, _ARCH_AT), _step(_EQUAL, calls.arch, 0, len(body)), *body]
    # Any other ABI: every call fails.
    return b"".join([*code, _step(_RETURN, _FAIL | errno.ENOSYS)])


def _body(calls: _Calls) -> list[bytes]:
    code = [_step(_LOAD, _NUMBER_AT)]
    if calls.arch == 0xC000003E:
        code += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _FAIL | errno.ENOSYS)]
    denied = dict.fromkeys(calls.refused, errno.EPERM) | dict.fromkeys(calls.absent, errno.ENOSYS)
    for number, error in sorted(denied.items()):
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _FAIL | error)]
    # For a call that creates sockets, jump to the check of its first argument; allow every other call.
    for index, number in enumerate(calls.socket):
        code.append(_step(_EQUAL, number, len(calls.socket) - index, 0))
    code += [_step(_RETURN, _ALLOW), _step(_LOAD, _FIRST_ARGUMENT_AT)]
    for index, family in enumerate(SOCKET_FAMILIES):
        code.append(_step(_EQUAL, int(family), len(SOCKET_FAMILIES) - index, 0))
    return [*code, _step(_RETURN, _FAIL | errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, if_true, if_false, value)


def install() -> None:
    """Filter this process and all its descendants permanently. Call `no_new_privileges` first.

    Raises:
        OSError: the kernel does not support such filters.
    """
    code = program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(description, len(description))
    try:
        prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(holder))
    except OSError as error:
        raise OSError(error.errno, f"cannot filter system calls: {os.strerror(error.errno or 0)}") from error


# -- First process of a box ----------------------------------------------------------------------------------------
# The first process of a local box: a program of about a hundred bytes; standard library only.
#
# It must not come from the box's image (so any image works, and nothing in the box can replace it), must not be
# killable from inside (only process 1 of a pid namespace is safe), and must adopt orphans. It writes one byte when the
# box is ready, and then sleeps until it is killed from outside.

READY = b"R"
_BASE = 0x400000
_HEADERS = 64 + 56

# x86_64 (the string and the 32 bytes before it are data):
#   mov eax,13; mov edi,17; lea rsi,[rip+ignore]; xor edx,edx; mov r10d,8; syscall    rt_sigaction(SIGCHLD, SIG_IGN)
#   mov eax,1; mov edi,1; lea rsi,[rip+ready]; mov edx,1; syscall                     write(1, "R", 1)
#   xor edi,edi; close: mov eax,3; syscall; inc edi; cmp edi,3; jb close              close(0), close(1), close(2)
#   sleep: mov eax,34; syscall; jmp sleep                                             pause()
#   ignore: .quad 1,0,0,0; ready: .ascii "R"
# Because SIGCHLD is ignored, the kernel reaps every orphan.
_X86_64 = bytes.fromhex(
    "b80d000000bf11000000488d353f00000031d241ba080000000f05b801000000bf01000000488d3544000000ba010000"
    "000f0531ffb8030000000f05ffc783ff0372f2b8220000000f05ebf70f1f400001000000000000000000000000000000"
    "0000000000000000000000000000000052"
)
# aarch64: the same calls (134, 64, 57), but ppoll(NULL, 0, NULL, NULL), as it has no pause.
_AARCH64 = bytes.fromhex(
    "c81080d2200280d201030010020080d2030180d2010000d4080880d2200080d241030010220080d2010000d4130080d2"
    "280780d2e00313aa010000d4730600917f0e00f163ffff54280980d2000080d2010080d2020080d2030080d2010000d4"
    "faffff171f2003d5010000000000000000000000000000000000000000000000000000000000000052"
)
_PROGRAMS = {"x86_64": (62, _X86_64), "aarch64": (183, _AARCH64)}


def elf_image(machine: str) -> bytes:
    """Return the program as a static ELF executable for a processor type as `platform.machine` names it.

    Raises:
        NotImplementedError: there is no program for that processor type.
    """
    if machine not in _PROGRAMS:
        raise NotImplementedError(
            f"the first process of a local box exists for {' and '.join(sorted(_PROGRAMS))}, not for {machine}; "
            "use another sandbox provider"
        )
    number, code = _PROGRAMS[machine]
    size = _HEADERS + len(code)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01" + bytes(9),
        *(2, number, 1, _BASE + _HEADERS, 64, 0, 0, 64, 56, 1, 0, 0, 0),
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    return header + segment + code


def open_program() -> int:
    """Return an inheritable descriptor of the executable for this machine, sealed against every change."""
    descriptor = os.memfd_create("box-init", os.MFD_ALLOW_SEALING)
    os.write(descriptor, elf_image(platform.machine()))
    # Not readable, so that the kernel lets no process in the box trace it. A tracer could make it exit, which would
    # end the box and look as if the backend had lost it.
    os.fchmod(descriptor, 0o111)
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    return descriptor
