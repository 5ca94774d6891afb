"""What is done to a box around Apptainer's own work: places for mounts before it, the last mounts after it.

Standard library only: it runs in children of the supervisor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.local.supervisor import children
from nemo_gym.sandbox.providers.local.supervisor.construction import (
    PROC_ABSENT,
    PROC_READ_ONLY,
    RUN_BYTES,
    SHM_BYTES,
    BoxPlan,
)

_MS_NOEXEC = 0x8
_MS_REMOUNT = 0x20
_STANDARD_PLACES = ("/dev", "/proc", "/run", "/tmp", "/var/tmp")
_OWN_VARIABLES = ("APPTAINER_", "SINGULARITY_", "PS1", "PROMPT_COMMAND", "PWD", "OLDPWD", "HOME", "SHLVL", "TERM", "_")


def make_places(root: Path, binds: Sequence[tuple[str, str]]) -> None:
    """Make what Apptainer mounts on, where it is missing. Works in a child whose root the box is, so that no link of
    the image leads out of it."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            raise OSError(os.waitstatus_to_exitcode(status), "a directory or file to mount on cannot be made")
        return
    try:
        kinds = [os.path.isdir(source) for source, _ in binds]  # noqa: PTH112 - plain strings throughout
        os.chroot(root)
        os.chdir("/")
        os.umask(0o022)
        for path in _STANDARD_PLACES:
            if not os.path.lexists(path):
                os.makedirs(path)  # noqa: PTH103
                if path.endswith("tmp"):
                    os.chmod(path, 0o1777)  # noqa: PTH101
        for (_, target), is_directory in zip(binds, kinds, strict=True):
            if os.path.exists(target):  # noqa: PTH110
                continue
            os.makedirs(target if is_directory else os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            if not is_directory:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        os._exit(0)
    except OSError as error:
        os._exit(error.errno or 1)
    finally:
        os._exit(1)


async def finish(init_fd: int, plan: BoxPlan) -> dict[str, Any] | None:
    """The mounts that Apptainer does not make, in a box where nothing has run yet; the problem, or ``None``."""

    def job(report_fd: int) -> None:
        step = "entering the box"
        try:
            linux.setns(init_fd, linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
            step = "protecting /proc"
            _protect_proc()
            step = "mounting /dev/shm and /run"
            _mount_memory(plan.memory_bytes)
            for path in plan.hidden:
                step = f"hiding {path}"
                _hide(path)
        except OSError as error:
            children.report_error(report_fd, step, error)

    return await children.run(job, keep=[init_fd])


def _protect_proc() -> None:
    """A box's user 0 may be the host's by number, and files of /proc that concern the whole machine go by that."""
    for path in PROC_READ_ONLY:
        if os.path.exists(path):  # noqa: PTH110
            linux.mount(path, path, None, linux.MS_BIND | linux.MS_REC)
            _remount_read_only(path, _MS_NOEXEC)
    for path in PROC_ABSENT:
        if os.path.exists(path):  # noqa: PTH110
            _hide(path)


def _mount_memory(memory_bytes: int | None) -> None:
    # Files in memory count as memory that nobody can reclaim, so they must leave room for a process to delete them.
    shm, run = SHM_BYTES, RUN_BYTES
    if memory_bytes is not None:
        shm, run = min(shm, memory_bytes // 2), min(run, memory_bytes // 8)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    with contextlib.suppress(OSError):
        linux.umount("/dev/mqueue", linux.MNT_DETACH)
    linux.mount("tmpfs", "/dev/shm", "tmpfs", flags, f"mode=1777,size={shm}")
    _remount_read_only("/dev", 0, nodev=False)
    linux.mount("tmpfs", "/run", "tmpfs", flags, f"mode=0755,size={run}")
    os.mkdir("/run/lock")  # noqa: PTH102
    os.chmod("/run/lock", 0o1777)  # noqa: PTH101


def _hide(path: str) -> None:
    if os.path.isdir(path):  # noqa: PTH112
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY
        linux.mount("tmpfs", path, "tmpfs", flags, "mode=0555,size=4096")
    else:
        linux.mount("/dev/null", path, None, linux.MS_BIND)


def _remount_read_only(path: str, more: int, *, nodev: bool = True) -> None:
    flags = linux.MS_BIND | _MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | more
    linux.mount("none", path, None, flags | (linux.MS_NODEV if nodev else 0))


def image_env(init_pid: int) -> dict[str, str]:
    """What the image sets for every process: the environment Apptainer gave the first one, without its own names."""
    env: dict[str, str] = {}
    for entry in Path(f"/proc/{init_pid}/environ").read_bytes().split(b"\0"):
        name, found, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if not found or name in _OWN_VARIABLES or name.startswith(_OWN_VARIABLES[:2]):
            continue
        if (name, value) in (("LANG", "C"), ("LD_LIBRARY_PATH", "/.singularity.d/libs")):
            continue
        env[name] = value
    return env
