"""A disk of limited size for what a box writes: a file system in a sparse file, mounted through a loop device.

Only root can mount one. It exists in the mount namespace of its box alone, and goes with it. Elsewhere boxes share the
disk of the state directory, and what they write is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemo_gym.sandbox import linux
from nemo_gym.sandbox.providers.local.supervisor import children

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_ATTEMPTS = 64
_MIN_BYTES = 16 * 1024 * 1024
_PROBE_BYTES = 16 * 1024 * 1024


def make_and_mount(file: Path, target: Path, size: int) -> None:
    """Make a file system of ``size`` bytes in ``file`` and mount it on ``target``, in the calling process's namespace.

    Raises:
        OSError: a step failed; the message names it.
    """
    if size < _MIN_BYTES:
        raise OSError(errno.EINVAL, f"a disk needs at least {_MIN_BYTES // 1024 // 1024} MiB")
    program = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise OSError(errno.ENOENT, "mkfs.ext4 was not found; install the package e2fsprogs")
    with file.open("xb") as opened:
        os.truncate(opened.fileno(), size)
    # Nothing on it survives a crash, so it keeps no journal, and nobody waits for the host's disk when it is unmounted
    # (barrier=0); it never grows, and nobody else uses it, so nothing is reserved for that or for root.
    options = [
        "-q",
        "-F",
        "-m",
        "0",
        "-O",
        "^has_journal,^resize_inode",
        "-E",
        "lazy_itable_init=1,nodiscard,root_owner=0:0",
    ]
    made = subprocess.run([program, *options, str(file)], capture_output=True, check=False, env={"LC_ALL": "C"})
    if made.returncode:
        if os.strerror(errno.ENOSPC).encode() in made.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError(errno.EIO, f"mkfs.ext4 failed: {made.stderr.decode(errors='replace').strip()}")
    target.mkdir(exist_ok=True)
    device, descriptor = _attach(file)
    try:
        linux.mount(device, str(target), "ext4", linux.MS_NODEV | linux.MS_NOSUID, "discard,barrier=0")
    finally:
        os.close(descriptor)


def _attach(file: Path) -> tuple[str, int]:
    """A loop device of the file, which detaches itself at the last use; its path, and a descriptor that is one use."""
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    # struct loop_config: descriptor, block size, loop_info64 with its flags at byte 52, and 64 bytes reserved
    config = struct.pack("=II52xI176x64x", backing, 0, _LO_FLAGS_AUTOCLEAR)
    try:
        for _ in range(_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # somebody else was faster
                    raise
            else:
                return path, device
        raise OSError(errno.EBUSY, "no free loop device")
    finally:
        os.close(control)
        os.close(backing)


async def measure(directories: Sequence[str]) -> dict[str, int]:
    """Bytes that each directory takes of its disk; those that are gone are left out."""
    # A program for this: it is ten times as fast as we could be, and no depth or number of files is too much for it.
    process = await asyncio.create_subprocess_exec(
        *("du", "--summarize", "--one-file-system", "--block-size=1", "--null", "--", *directories),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        said, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    sizes = (line.partition(b"\t") for line in said.split(b"\0") if line)
    return {os.fsdecode(path): int(size) for size, _, path in sizes}


async def why_not(directory: Path) -> str | None:
    """Why disks cannot be limited here, found out by making one; ``None`` when they can."""

    def job(report_fd: int) -> None:
        file = Path(tempfile.mkdtemp(prefix=".probe-", dir=directory))
        try:
            linux.unshare(linux.CLONE_NEWNS)
            make_and_mount(file / "disk.img", file / "disk", _PROBE_BYTES)
            linux.umount(str(file / "disk"))
        except OSError as error:
            children.report(report_fd, {"step": "disk", "errno": error.errno, "message": error.strerror or str(error)})
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(file)

    problem = await children.run(job)
    return None if problem is None else str(problem["message"])
