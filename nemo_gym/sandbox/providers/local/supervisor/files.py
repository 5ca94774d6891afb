"""Work on a box's files in short-lived children: archives, files of the spec and layers. Also disk limits.

A child enters the box's mount namespace, but not its pid namespace: it sees the box's files as the box does, runs none
of the box's programs, and is not visible in the box.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_gym._util.files import write_all
from nemo_gym.sandbox import archive, linux
from nemo_gym.sandbox.providers.local.images import (
    ImageError,
    ImageManifest,
    ImageStore,
    copy_layer,
    remove_directory,
)
from nemo_gym.sandbox.providers.local.supervisor import processes
from nemo_gym.sandbox.providers.local.supervisor.processes import Problem, Report

_ENTER = linux.CLONE_NEWUSER | linux.CLONE_NEWNS
_ERRORS_OF_THE_BOX = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
"""What a path may meet because of the box's contents; any other error is a failure of the supervisor."""


async def put_archive(init_fd: int, path: str, stream: int) -> Problem | None:
    """Unpack the tar stream from the pipe ``stream`` below ``path`` of the box; return the problem, or ``None``."""

    def job(report: Report) -> None:
        report.step = f"unpacking into {path}"
        _enter(init_fd)
        os.umask(0o022)
        try:
            os.makedirs(path, exist_ok=True)  # noqa: PTH103 - plain strings throughout
        except OSError as error:
            if error.errno not in (*_ERRORS_OF_THE_BOX, errno.EEXIST, errno.EROFS):
                raise
            raise archive.ArchiveError(error.strerror) from error
        archive.extract(functools.partial(os.read, stream), path)

    return await processes.run(job, keep=[init_fd, stream])


async def get_archive(
    init_fd: int, path: str, stream: int, exclude: Sequence[str], max_bytes: int | None
) -> Problem | None:
    """Pack ``path`` of the box into the pipe ``stream``; return the problem, or ``None``."""

    def job(report: Report) -> None:
        report.step = f"packing {path}"
        _enter(init_fd)
        target = ""
        try:
            os.stat(path)  # noqa: PTH116 - bounds the number of links, which `realpath` would follow by recursion
            target = os.path.realpath(path, strict=True)
            name = os.path.basename(os.path.normpath(path))  # noqa: PTH119 - plain strings throughout
            for chunk in archive.pack(target, exclude=exclude, max_bytes=max_bytes, name=name):
                write_all(stream, chunk)
        except OSError as error:
            # A link of the box may lead to the memory of a process, where reading fails as on a broken disk.
            if error.errno not in _ERRORS_OF_THE_BOX and not target.startswith("/proc/"):
                raise
            raise archive.ArchiveError(f"there is nothing to pack at '{path}': {error.strerror}") from error

    return await processes.run(job, keep=[init_fd, stream])


async def write_files(init_fd: int, files: Mapping[str, str], directory: str | None) -> Problem | None:
    """Create the spec's working directory and write its files, in a box where nothing has run yet."""

    def job(report: Report) -> None:
        _enter(init_fd)
        os.umask(0o022)
        if directory is not None:
            report.step = f"making the working directory {directory}"
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        for name, text in files.items():
            report.step = f"writing {name}"
            os.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH103, PTH120
            # Without waiting: the image may hold a pipe of that name.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, 0o666), "wb") as file:  # noqa: PTH123
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EEXIST, "a regular file was expected here", name)
                file.write(text.encode("utf-8", "surrogateescape"))

    return await processes.run(job, keep=[init_fd])


async def copy_upper(monitor_fd: int, upper: Path, parts: Sequence[str], staged: Path) -> Problem | None:
    """Copy the files that a box wrote into ``staged``, one directory per part; return the problem, or ``None``."""

    def job(report: Report) -> None:
        report.step = "copying the box's files"
        # The box's disk may be mounted only in the mount namespace where its overlays were mounted.
        linux.setns(monitor_fd, linux.CLONE_NEWNS)
        for part in parts:
            copy_layer(upper / part, staged / part)
            for name in ("tmp", "var/tmp"):
                _empty(staged / part, name)
        os.sync()

    return await processes.run(job, keep=[monitor_fd])


def _empty(root: Path, name: str) -> None:
    """Empty a directory of a copied tree. A link on the way is left alone: the box chose where it leads, and this
    process sees the host's files."""
    place = root
    for step in name.split("/"):
        place /= step
        if place.is_symlink() or not place.is_dir():
            return
    for path in place.iterdir():
        remove_directory(path)


async def publish(
    store: ImageStore, name: str, parent: ImageManifest, staged: Path, labels: Mapping[str, str], xattrs: str
) -> Problem | None:
    """`ImageStore.publish`, which may wait for another process and delete large layers; return the problem, or
    ``None``."""

    def job(report: Report) -> None:
        report.step = f"storing the image '{name}'"
        try:
            store.publish(name, parent, staged, labels, xattrs)
        except ImageError as error:
            raise OSError(str(error)) from error

    return await processes.run(job)


def _enter(init_fd: int) -> None:
    """Enter a box's mount namespace, as the box's user 0."""
    linux.setns(init_fd, _ENTER)
    processes.become_root()


# -- Disk limits ---------------------------------------------------------------------------------------------------
# A disk of limited size for the files that a box writes: a file system in a sparse file, mounted via a loop device.
#
# Only root can mount one. It exists only in its box's mount namespace, and ends with the box. Where this is not
# possible, boxes share the disk of the state directory, and the supervisor measures what they write.

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_ATTEMPTS = 64
_MIN_BYTES = 16 * 1024 * 1024


def make_and_mount(file: Path, target: Path, size: int) -> None:
    """Create a file system of ``size`` bytes in ``file``, and mount it on ``target`` in this process's namespace.

    Raises:
        OSError: a step failed; the message describes the failure.
    """
    if size < _MIN_BYTES:
        raise OSError(errno.EINVAL, f"a disk needs at least {_MIN_BYTES // 1024 // 1024} MiB")
    program = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise OSError(errno.ENOENT, "mkfs.ext4 was not found; install the package e2fsprogs")
    with file.open("xb") as opened:
        os.truncate(opened.fileno(), size)
    # Its data need not survive a crash, so it has no journal, and unmounting it does not wait for the host's disk
    # (barrier=0). It never grows and has one user, so no blocks are reserved for growth or for root.
    features = ("-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0")
    command = [program, "-q", "-F", "-m", "0", *features, str(file)]
    result = subprocess.run(command, capture_output=True, check=False, env={"LC_ALL": "C"})
    if result.returncode:
        if os.strerror(errno.ENOSPC).encode() in result.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OSError(errno.EIO, f"mkfs.ext4 failed: {result.stderr.decode(errors='replace').strip()}")
    target.mkdir(exist_ok=True)
    device, descriptor = _attach(file)
    try:
        linux.mount(device, str(target), "ext4", linux.MS_NODEV | linux.MS_NOSUID, "discard,barrier=0")
    finally:
        os.close(descriptor)


def _attach(file: Path) -> tuple[str, int]:
    """Attach a loop device to the file; return its path and a descriptor. It detaches itself when no longer used."""
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
                if error.errno != errno.EBUSY:  # EBUSY: another process took the device first
                    raise
            else:
                return path, device
        raise OSError(errno.EBUSY, "no free loop device")
    finally:
        os.close(control)
        os.close(backing)


async def measure(directories: Sequence[str]) -> dict[str, int]:
    """Return the bytes that each directory takes on its disk. Omits directories that no longer exist."""
    # du is ten times as fast as Python code, and handles any depth and number of files.
    process = await asyncio.create_subprocess_exec(
        *("du", "--summarize", "--one-file-system", "--block-size=1", "--null", "--", *directories),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    sizes = (line.partition(b"\t") for line in output.split(b"\0") if line)
    return {os.fsdecode(path): int(size) for size, _, path in sizes}


async def can_make_disks(directory: Path) -> bool:
    """Whether a disk can be made and mounted here, determined by doing so."""

    def job(_: Report) -> None:
        with tempfile.TemporaryDirectory(prefix=".probe-", dir=directory, ignore_cleanup_errors=True) as probe:
            linux.unshare(linux.CLONE_NEWNS)
            make_and_mount(Path(probe, "disk.img"), Path(probe, "disk"), _MIN_BYTES)
            linux.umount(f"{probe}/disk")

    return await processes.run(job) is None
