"""Start and end of the supervisor: its namespaces, the cleanup after a killed predecessor, and its socket.

A client starts the supervisor as ``python -I -S -X utf8 -c BOOT``. The options are JSON in the environment, which
boxes cannot read, unlike a command line. The client reads the supervisor's standard output until it closes: it is
empty if the socket is ready, else it is one line of JSON with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import hashlib
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.cgroups import Cgroups, remove_tree
from nemo_gym.sandbox.providers.local.images import remove_directory
from nemo_gym.sandbox.providers.local.supervisor.server import Supervisor

OPTIONS_VARIABLE = "NEMO_GYM_LOCAL_SUPERVISOR"
BOOT = (
    f"import json, os, sys; sys.path.append(json.loads(os.environ['{OPTIONS_VARIABLE}'])['import_root']); "
    "from nemo_gym.sandbox.providers.local.supervisor.main import main; main()"
)
SOCKET_NAME = "socket"
_ST_RELATIME = 4096
_SAME_FLAGS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME


def main() -> None:
    """Become the supervisor of a state directory, in the background."""
    options: dict[str, Any] = json.loads(os.environ[OPTIONS_VARIABLE])
    try:
        if not options.get("confined"):
            _detach()
            _confine(options)
        _supervise(options)
    except Exception as error:  # noqa: BLE001 - the client waits for a reason, whatever it is
        traceback.print_exc()
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"error": message}).encode())
    os._exit(1)


def _detach() -> None:
    """Leave the client's process tree and session, so that neither the client's end nor its terminal affects us."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    os.umask(0o022)


def _confine(options: dict[str, Any]) -> NoReturn:
    """Enter a new mount namespace (and, as an ordinary user, a new user namespace), and start again there.

    The interpreter is started again from a read-only mount. Otherwise a process of a box that runs this interpreter
    could write to the host's file through /proc/<pid>/exe.
    """
    user, group = os.geteuid(), os.getegid()
    ordinary = False
    try:
        linux.unshare(linux.CLONE_NEWNS)
    except PermissionError:
        ordinary = True
        try:
            linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:
            hint = (
                "set the sysctl user.max_user_namespaces higher"
                if error.errno == errno.ENOSPC
                else (
                    "set kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0 where "
                    "the system has them, allow them to the container, or run as root"
                )
            )
            _fail(f"user {user} cannot make user namespaces here ({error.strerror}): {hint}")
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)  # mount events stay in this namespace
    interpreter = os.path.realpath(sys.executable)
    linux.mount(interpreter, interpreter, None, linux.MS_BIND)
    flags = os.statvfs(interpreter).f_flag
    kept_flags = flags & _SAME_FLAGS | (linux.MS_RELATIME if flags & _ST_RELATIME else 0)
    linux.mount("none", interpreter, None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | kept_flags)
    confined_options = {**options, "confined": True, "ordinary": ordinary}
    environment = {**os.environ, OPTIONS_VARIABLE: json.dumps(confined_options)}
    os.execve(interpreter, [interpreter, "-I", "-S", "-X", "utf8", "-c", BOOT], environment)


def _supervise(options: dict[str, Any]) -> None:
    state_dir = Path(options["state_dir"])
    lock = os.open(state_dir / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # wait for a predecessor that is exiting
    name = group_name(lock)
    _sweep(state_dir, name)
    _sweep_other_releases(state_dir)
    cgroups = Cgroups(name, enabled=bool(options["use_cgroups"]))
    (state_dir / "supervisor.json").write_text(
        json.dumps({"pid": os.getpid(), "cgroups": [str(base) for base in cgroups.bases]})
    )
    listener = _listen(state_dir)
    gc.freeze()
    try:
        asyncio.run(_serve(options, state_dir, cgroups, listener))
    finally:
        with contextlib.suppress(FileNotFoundError):
            (state_dir / SOCKET_NAME).unlink()
        listener.close()
        cgroups.remove()
        with contextlib.suppress(OSError):
            remove_directory(state_dir / "host")


def _sweep_other_releases(state_dir: Path) -> None:
    """Remove the directories of releases whose supervisors are gone."""
    for other in state_dir.parent.iterdir():
        if other == state_dir:
            continue
        try:
            lock = os.open(other / "supervisor.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not a release's directory, or another supervisor has just removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sweep(other, group_name(lock))
            remove_directory(other)
        except OSError:
            continue  # its supervisor runs or is just starting
        finally:
            os.close(lock)


def group_name(lock: int) -> str:
    """The name of the control groups of the supervisor that holds this lock. No other live supervisor has that name.

    It is not derived from the directory's path: the path may be another directory in another mount namespace that
    shares the control groups. The device and inode numbers of an open file are unique on a machine.
    """
    info = os.fstat(lock)
    return f"nemo-gym-{hashlib.sha256(f'{info.st_dev}:{info.st_ino}'.encode()).hexdigest()[:12]}"


def _sweep(state_dir: Path, name: str) -> None:
    """Remove the control groups and files of a killed supervisor. Its boxes died with it, and so did their mounts."""
    with contextlib.suppress(OSError, ValueError):
        for base in map(Path, json.loads((state_dir / "supervisor.json").read_text())["cgroups"]):
            # A copied directory contains the record of the original, whose supervisor may be alive.
            if base.name == name:
                remove_tree(base)
    for path in (state_dir / "boxes", state_dir / "host"):
        remove_directory(path)
    (state_dir / "boxes").mkdir(mode=0o700)


def _listen(state_dir: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            (state_dir / SOCKET_NAME).unlink()
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")  # socket paths are at most 107 bytes long
        (state_dir / SOCKET_NAME).chmod(0o600)
        listener.listen(1024)
        listener.setblocking(False)
    finally:
        os.close(directory)
    return listener


async def _serve(options: dict[str, Any], state_dir: Path, cgroups: Cgroups, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    builder = importlib.import_module(options["builder"])
    supervisor = Supervisor(
        state_dir,
        cgroups,
        user_overlays=bool(options["ordinary"]),
        linger_s=float(options["linger_s"]),
        build=builder.build,
        moves_ids=builder.MOVES_IDS,
    )

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if int.from_bytes(peer[4:8], sys.byteorder) != os.getuid():
                sock.close()
                continue
            supervisor.accept(sock)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.finished.set)
    loop.add_reader(listener.fileno(), accept)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 1)  # closes our standard output, which tells the client that we are ready
    os.close(null)
    supervisor.consider_leaving()
    await supervisor.finished.wait()
    loop.remove_reader(listener.fileno())
    await supervisor.close_everything()
