"""Work on a box's files in short-lived children of ours: archives, files of the spec, and committing a layer.

A child enters the box's mount namespace and not its pid namespace: it sees the box's files as the box does, runs none
of its programs, and nothing in the box sees it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym._util.files import write_all
from nemo_gym.sandbox import archive, linux
from nemo_gym.sandbox.providers.local.images import copy_layer, remove_directory
from nemo_gym.sandbox.providers.local.supervisor import children, user_ids

_ENTER = linux.CLONE_NEWUSER | linux.CLONE_NEWNS


async def put_archive(init_fd: int, path: str, stream: int) -> dict[str, Any] | None:
    """Unpack the tar stream from the pipe ``stream`` below ``path`` of the box; the problem, or ``None``."""

    def job(report_fd: int) -> None:
        with _reporting(report_fd, f"unpacking into {path}"):
            _enter(init_fd)
            os.umask(0o022)
            os.makedirs(path, exist_ok=True)  # noqa: PTH103 - plain strings throughout
            archive.extract(functools.partial(os.read, stream), path)

    return await children.run(job, keep=[init_fd, stream])


async def get_archive(
    init_fd: int, path: str, stream: int, exclude: Sequence[str], max_bytes: int | None
) -> dict[str, Any] | None:
    """Pack ``path`` of the box into the pipe ``stream``; the problem, or ``None``."""

    def job(report_fd: int) -> None:
        with _reporting(report_fd, f"packing {path}"):
            _enter(init_fd)
            try:
                for chunk in archive.pack(path, exclude=exclude, max_bytes=max_bytes):
                    write_all(stream, chunk)
            except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
                # What is at the path is the box's contents: no failure of ours.
                raise archive.ArchiveError(f"there is nothing to pack at '{path}': {error.strerror}") from error

    return await children.run(job, keep=[init_fd, stream])


async def write_files(init_fd: int, files: Mapping[str, str], directory: str | None) -> dict[str, Any] | None:
    """Write the spec's files and make its working directory, in a box where nothing has run yet."""

    def job(report_fd: int) -> None:
        _enter(init_fd)
        os.umask(0o022)
        if directory is not None:
            with _reporting(report_fd, f"making the working directory {directory}"):
                os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        for name, text in files.items():
            with _reporting(report_fd, f"writing {name}"):
                os.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH103, PTH120
                with open(name, "wb") as file:  # noqa: PTH123
                    file.write(text.encode("utf-8", "surrogateescape"))

    return await children.run(job, keep=[init_fd])


async def copy_upper(monitor_fd: int, upper: Path, parts: Sequence[str], staged: Path) -> dict[str, Any] | None:
    """Copy what a box wrote into ``staged``, one directory per part; the problem, or ``None``."""

    def job(report_fd: int) -> None:
        with _reporting(report_fd, "copying the box's files"):
            # The box's disk may be mounted only where its overlays were mounted.
            linux.setns(monitor_fd, linux.CLONE_NEWNS)
            for part in parts:
                copy_layer(upper / part, staged / part)
                with contextlib.suppress(FileNotFoundError):
                    for name in ("tmp", "var/tmp"):
                        _empty(staged / part / name)
            os.sync()

    return await children.run(job, keep=[monitor_fd])


def _enter(init_fd: int) -> None:
    """Enter a box's mounts, as its user 0."""
    linux.setns(init_fd, _ENTER)
    user_ids.become_root()


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_directory(path)
        else:
            path.unlink()


class _reporting(contextlib.AbstractContextManager["_reporting"]):  # noqa: N801 - reads as a statement
    """Report an error of the block to the parent, and end the child."""

    def __init__(self, descriptor: int, step: str) -> None:
        self._descriptor = descriptor
        self._step = step

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, archive.ArchiveError):
            named = "archive_too_large" if isinstance(error, archive.ArchiveTooLargeError) else "archive"
            children.report(self._descriptor, {"step": self._step, "kind": named, "message": str(error)})
            os._exit(1)
        if isinstance(error, OSError):
            children.report_error(self._descriptor, self._step, error)
