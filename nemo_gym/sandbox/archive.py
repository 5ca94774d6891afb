"""Pack and unpack the tar streams of boxes without touching anything outside the target directory.

This module imports only the standard library and modules of this suite that do the same: a provider also runs it in
an isolated interpreter inside a box's namespaces. Callers map `ArchiveError` to the suite's own error.

The design has three parts. A push parser (`TarParser`) reads members from chunks of any size. Every header written
here is encoded anew from the parsed fields, so that no other tar reader can interpret it differently. Files are opened
one path component at a time from an open directory (``O_NOFOLLOW``), so that neither a link in the archive nor a
concurrent process in the box can redirect a write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from nemo_gym._util.files import write_all
from nemo_gym.sandbox.tar_stream import (
    END_OF_ARCHIVE,
    ArchiveError,
    ArchiveTooLargeError,
    Excludes,
    TarParser,
    check_member,
    encode_header,
    member_parts,
    pack_bytes,
    shown,
)

__all__ = [
    "END_OF_ARCHIVE",
    "ArchiveError",
    "ArchiveTooLargeError",
    "Excludes",
    "TarParser",
    "check_member",
    "encode_header",
    "extract",
    "member_parts",
    "pack",
    "pack_bytes",
]

CHUNK_BYTES = 256 * 1024
MAX_DEPTH = 400
"""How many nested directories `pack` descends into; each level costs an open descriptor."""
_BLOCK = tarfile.BLOCKSIZE
_HOST_ERRORS = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
"""Read errors that the host causes. They never become an `ArchiveError`, which blames the file that is read."""
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def pack(
    path: str | os.PathLike[str],
    *,
    exclude: Sequence[str] = (),
    max_bytes: int | None = None,
    name: str | None = None,
    owner: int | None = None,
) -> Iterator[bytes]:
    """Yield the file, directory or symbolic link at ``path`` as a tar stream.

    Modes, owners, times (whole seconds), symbolic and hard links are kept. Sockets, pipes and devices are left out,
    and so are entries that vanish before they are read. A file that shrinks while it is read is padded with zeros. A
    mount point is packed as an empty directory, without the contents of the mounted file system.

    Args:
        exclude: see `Excludes`.
        max_bytes: maximum length of the stream; ``None`` for no limit.
        name: name of the first member; ``None`` is the last part of ``path`` (``.`` for the root directory).
        owner: user and group id of all members; ``None`` keeps those of the files.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ArchiveTooLargeError: the stream would exceed ``max_bytes``.
        ArchiveError: an entry cannot be read, or directories are nested more than `MAX_DEPTH` deep.
        OSError: this host has run out of memory or descriptors, or its disk fails.
    """
    return _Packer(Excludes(exclude), max_bytes, owner).run(os.fspath(path), name)


class _Packer:
    def __init__(self, excludes: Excludes, max_bytes: int | None, owner: int | None) -> None:
        self._excludes = excludes
        self._max_bytes = max_bytes
        self._owner = owner
        self._buffer = bytearray()
        self._total = 0
        self._inodes: dict[tuple[int, int], str] = {}

    def run(self, path: str, name: str | None) -> Iterator[bytes]:
        path = path.rstrip("/") or "/"
        member_name = name or os.path.basename(path) or "."  # noqa: PTH119  a path in the box, kept as it is
        parent = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: PTH120
        try:
            entry = os.path.basename(path) or "."  # noqa: PTH119
            info = os.stat(entry, dir_fd=parent, follow_symlinks=False)
            yield from self._entry(parent, entry, [member_name], info, info.st_dev)
        finally:
            os.close(parent)
        self._add(END_OF_ARCHIVE)
        yield bytes(self._buffer)

    def _entry(self, parent: int, entry: str, parts: list[str], info: os.stat_result, device: int) -> Iterator[bytes]:
        name = "/".join(parts)
        member = tarfile.TarInfo(name)
        member.mode, member.mtime = stat.S_IMODE(info.st_mode), int(info.st_mtime)
        member.uid, member.gid = (info.st_uid, info.st_gid) if self._owner is None else (self._owner, self._owner)
        try:
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
                self._add(encode_header(member))
                if info.st_dev == device:
                    yield from self._directory(parent, entry, parts, device)
            elif stat.S_ISLNK(info.st_mode):
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(entry, dir_fd=parent)
                self._add(encode_header(member))
            elif stat.S_ISREG(info.st_mode):
                first_path = self._inodes.get((info.st_dev, info.st_ino)) if info.st_nlink > 1 else None
                if first_path is not None:
                    member.type, member.linkname = tarfile.LNKTYPE, first_path
                    self._add(encode_header(member))
                else:
                    yield from self._file(parent, entry, member)
        except FileNotFoundError:
            return  # the entry vanished after it was listed
        except OSError as error:
            if error.errno in _HOST_ERRORS:
                raise
            raise ArchiveError(f"cannot read '{shown(name)}': {error.strerror}") from error
        if len(self._buffer) >= CHUNK_BYTES:
            yield bytes(self._buffer)
            self._buffer.clear()

    def _directory(self, parent: int, entry: str, parts: list[str], device: int) -> Iterator[bytes]:
        if len(parts) > MAX_DEPTH:
            raise ArchiveError(f"'{'/'.join(parts)[:200]}…' is more than {MAX_DEPTH} directories deep")
        directory = os.open(entry, _DIR_FLAGS, dir_fd=parent)
        try:
            with os.scandir(directory) as scan:
                children = sorted((found.name, found.is_dir(follow_symlinks=False)) for found in scan)
            for child, is_directory in children:
                child_parts = [*parts, child]
                if self._excludes.match(child_parts[1:], is_directory=is_directory):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(child, dir_fd=directory, follow_symlinks=False)
                    yield from self._entry(directory, child, child_parts, info, device)
        finally:
            os.close(directory)

    def _file(self, parent: int, entry: str, member: tarfile.TarInfo) -> Iterator[bytes]:
        # O_NONBLOCK: opening must not block if a pipe has just replaced the file.
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                return
            if info.st_nlink > 1:
                self._inodes[info.st_dev, info.st_ino] = member.name
            data = os.read(descriptor, CHUNK_BYTES)
            # A short first read is the whole file, so its exact size is known before the header is written.
            member.size = len(data) if len(data) < CHUNK_BYTES else max(info.st_size, len(data))
            if self._max_bytes is not None and self._total + member.size > self._max_bytes:
                self._too_large()
            self._add(encode_header(member))
            remaining = member.size
            while remaining:
                data = data[:remaining] or bytes(min(remaining, CHUNK_BYTES))
                self._add(data)
                remaining -= len(data)
                if len(self._buffer) >= CHUNK_BYTES:
                    yield bytes(self._buffer)
                    self._buffer.clear()
                data = os.read(descriptor, CHUNK_BYTES) if remaining else b""
            self._add(bytes(-member.size % _BLOCK))
        finally:
            os.close(descriptor)

    def _add(self, data: bytes) -> None:
        self._total += len(data)
        if self._max_bytes is not None and self._total > self._max_bytes:
            self._too_large()
        self._buffer += data

    def _too_large(self) -> None:
        raise ArchiveTooLargeError(f"the archive is larger than max_bytes={self._max_bytes}")


def extract(read: Callable[[int], bytes], dest: str | os.PathLike[str] | int) -> None:
    """Unpack a tar stream below an existing directory, and change nothing outside it.

    Modes, times, symbolic and hard links are kept, set-user-id bits and owners are not. An existing file or link is
    replaced in one atomic step and never written through, so several archives can be unpacked into one
    directory at once. After an error, the members before the bad one are in place, and no part of the bad one is.

    Args:
        read: returns up to the given number of bytes, and ``b""`` at the end.
        dest: the directory, or an open descriptor of it (which stays open).

    Raises:
        ArchiveError: see `check_member`; also if the stream is damaged, or a directory exists where a file belongs.
    """
    root = os.dup(dest) if isinstance(dest, int) else os.open(dest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.closing(_Extractor(root)) as extractor:
        parser = TarParser()
        while data := read(CHUNK_BYTES):
            for event in parser.feed(data):
                extractor.on(event)
        parser.close()
        extractor.finish()


class _Extractor:
    _OPEN_DIRECTORIES = 64

    def __init__(self, root: int) -> None:
        self._root = root
        self._file = -1
        self._member: tarfile.TarInfo | None = None
        self._unplaced: tuple[int, str] | None = None
        """Directory and final name of the current member, which has a temporary name until it is complete."""
        self._temporary = f".unpacking-{secrets.token_hex(8)}"
        self._directories: list[tuple[list[str], tarfile.TarInfo]] = []
        self._open: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def on(self, event: tarfile.TarInfo | bytes | None) -> None:
        try:
            if isinstance(event, tarfile.TarInfo):
                self._start(event)
            elif event is not None:
                write_all(self._file, event)
            elif self._file >= 0 and self._member is not None:
                self._apply(self._file, self._member)
                os.close(self._file)
                self._file = -1
                self._place(self._member)
        except OSError as error:
            name = self._member.name if self._member else "?"
            raise ArchiveError(f"cannot unpack '{shown(name)}': {error.strerror}") from error

    def finish(self) -> None:
        """Set the modes and times of directories. This comes last because a directory may be read-only, and adding
        entries changes its times."""
        for parts, member in reversed(self._directories):
            try:
                self._apply(self._directory(parts), member)
            except OSError as error:
                raise ArchiveError(f"cannot unpack '{shown(member.name)}': {error.strerror}") from error

    def close(self) -> None:
        self._drop_unplaced()
        for descriptor in [self._root, *self._open.values(), *([self._file] if self._file >= 0 else [])]:
            os.close(descriptor)
        self._open.clear()

    def _start(self, member: tarfile.TarInfo) -> None:
        self._member = member
        parts = check_member(member)
        if member.isdir():
            self._directory(parts)
            self._directories.append((parts, member))
            return
        parent = self._directory(parts[:-1])
        if member.issym():
            os.symlink(member.linkname, self._temporary, dir_fd=parent)
            self._unplaced = (parent, parts[-1])
            self._place(member)
        elif member.islnk():
            target = member_parts(member.linkname)
            source = self._directory(target[:-1], create=False)
            os.link(target[-1], self._temporary, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            self._unplaced = (parent, parts[-1])
            self._place(member)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._temporary, flags, 0o600, dir_fd=parent)
            self._unplaced = (parent, parts[-1])

    def _place(self, member: tarfile.TarInfo) -> None:
        """Rename the completed member to its final name."""
        assert self._unplaced is not None
        parent, name = self._unplaced
        try:
            os.rename(self._temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except IsADirectoryError as error:
            raise ArchiveError(f"a directory is in the place of '{shown(member.name)}'") from error
        if member.islnk():
            self._drop_unplaced()  # renaming one hard link over another of the same file leaves both names
        self._unplaced = None

    def _drop_unplaced(self) -> None:
        if self._unplaced is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._unplaced[0])
            self._unplaced = None

    def _directory(self, parts: Sequence[str], *, create: bool = True) -> int:
        """Return a descriptor of a directory below the root. Every component must be a real directory, not a link."""
        key = tuple(parts)
        if not key:
            return self._root
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        open_depth = next((n for n in range(len(key) - 1, 0, -1) if key[:n] in self._open), 0)
        current, opened = (self._open[key[:open_depth]] if open_depth else self._root), []
        try:
            for part in key[open_depth:]:
                current = self._step(current, part, create)
                opened.append(current)
        except NotADirectoryError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise ArchiveError(f"'{shown('/'.join(key))}' leads through a link or a file") from error
        for descriptor in opened[:-1]:
            os.close(descriptor)
        self._open[key] = current
        if len(self._open) > self._OPEN_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1])
        return current

    @staticmethod
    def _step(parent: int, name: str, create: bool) -> int:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=parent)
        return os.open(name, _DIR_FLAGS, dir_fd=parent)

    @staticmethod
    def _apply(descriptor: int, member: tarfile.TarInfo) -> None:
        os.fchmod(descriptor, member.mode & 0o1777)
        with contextlib.suppress(OverflowError):
            os.utime(descriptor, (member.mtime, member.mtime))
