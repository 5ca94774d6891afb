"""A directory tree as git would store it, read from a tar stream: path → mode and blob id, nothing unpacked.

Everything happens on the stream, so no name or link that an agent chose ever reaches a file system of ours.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from nemo_gym.sandbox.archive import ArchiveError, TarParser

REGULAR, EXECUTABLE, SYMLINK = "100644", "100755", "120000"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file as a git tree holds it."""

    mode: str
    oid: str
    """Blob id (hex)."""


@dataclass
class Tree:
    """What a stream held."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    """By path below the root, as bytes."""
    is_directory: bool = False
    """Whether the stream's root was one; a work tree that became a file or a link has no entries."""
    skipped: list[str] = field(default_factory=list)
    """Paths that no patch may name (a component spelled like ``.git``); at most `MAX_NAMED_SKIPS`."""
    skipped_count: int = 0


class TreeTooLargeError(Exception):
    """The stream passed a cap; the message says which."""


MAX_NAMED_SKIPS = 20
MAX_PATH_BYTES = 256 * 1024 * 1024
"""Of all paths together, which are kept in memory: one more file at the end of hundreds of directories costs a box
next to nothing. The paths of the largest public repositories take some tens of MB."""
Content = tuple[bytes, Entry, bytes]
"""Path, entry and content of one file."""


class TreeReader:
    """Reads one tar stream whose first member is the tree's root; `tree` is whole when `contents` has ended."""

    def __init__(
        self, *, algorithm: str = "sha1", max_bytes: int, max_files: int, max_content_bytes: int = -1
    ) -> None:
        """
        Args:
            algorithm: hash of the repository's object ids, ``sha1`` or ``sha256``.
            max_bytes, max_files: caps of the whole stream.
            max_content_bytes: of the files that `contents` gives; by default none.
        """
        self.tree = Tree()
        self._algorithm = algorithm
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._max_content_bytes = max_content_bytes
        self._path_bytes_left = MAX_PATH_BYTES
        self._root: str | None = None
        self._path: bytes | None = None
        self._mode = REGULAR
        self._hash = hashlib.new(algorithm)
        self._content: bytearray | None = None

    async def contents(self, stream: AsyncIterator[bytes]) -> AsyncIterator[Content]:
        """Read the stream, and give every file and link that is small enough as it comes by.

        Raises:
            TreeTooLargeError: a cap was passed.
            ArchiveError: the stream is damaged.
        """
        parser, received = TarParser(), 0
        async for chunk in stream:
            received += len(chunk)
            if received > self._max_bytes:
                raise TreeTooLargeError(f"the tree is larger than {self._max_bytes} bytes")
            for event in parser.feed(chunk):
                if (content := self._take(event)) is not None:
                    yield content
        parser.close()

    def _take(self, event: tarfile.TarInfo | bytes | None) -> Content | None:
        """One event of the stream; what it completes."""
        if isinstance(event, tarfile.TarInfo):
            return self._start(event)
        if self._path is None:
            return None
        if event is None:
            return self._finish()
        self._hash.update(event)
        if self._content is not None:
            self._content += event
        return None

    def _start(self, member: tarfile.TarInfo) -> Content | None:
        self._path = None
        if self._root is None:
            self._root = member.name.strip("/")
            self.tree.is_directory = member.isdir()
            return None
        path = self._below_root(member.name)
        if path is None or member.isdir():
            return None
        if any(part.lower() == b".git" for part in path.split(b"/")):
            self._skip(path)
            return None
        if len(self.tree.entries) >= self._max_files:
            raise TreeTooLargeError(f"the tree has more than {self._max_files} files")
        self._path_bytes_left -= len(path)
        if self._path_bytes_left < 0:
            raise TreeTooLargeError(f"the paths of the tree's files take more than {MAX_PATH_BYTES} bytes")
        if member.islnk():
            self._link(path, member.linkname)
        elif member.issym():
            self._begin(path, SYMLINK, member.linkname.encode("utf-8", "surrogateescape"))
            return self._finish()
        elif member.isreg():
            self._begin(path, EXECUTABLE if member.mode & 0o100 else REGULAR, b"", member.size)
        return None

    def _below_root(self, name: str) -> bytes | None:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ArchiveError(f"member '{name}' leaves the tree")
        if self._root not in ("", ".", None):
            parts = parts[1:]
        return "/".join(parts).encode("utf-8", "surrogateescape") if parts else None

    def _begin(self, path: bytes, mode: str, content: bytes, size: int | None = None) -> None:
        length = len(content) if size is None else size
        self._path, self._mode = path, mode
        self._hash = hashlib.new(self._algorithm)
        self._hash.update(b"blob %d\0" % length + content)
        self._content = bytearray(content) if length <= self._max_content_bytes else None

    def _finish(self) -> Content | None:
        path, content = self._path, self._content
        assert path is not None
        self._path, self._content = None, None
        entry = self.tree.entries[path] = Entry(self._mode, self._hash.hexdigest())
        return None if content is None else (path, entry, bytes(content))

    def _link(self, path: bytes, target: str) -> None:
        """A hard link is one more name of a file already seen."""
        source = self._below_root(target)
        entry = self.tree.entries.get(source) if source else None
        if entry is None:
            self._skip(path)
            return
        self.tree.entries[path] = entry

    def _skip(self, path: bytes) -> None:
        self.tree.skipped_count += 1
        if len(self.tree.skipped) < MAX_NAMED_SKIPS:
            self.tree.skipped.append(path.decode("utf-8", "replace"))
