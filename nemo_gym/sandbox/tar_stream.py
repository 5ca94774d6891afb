"""Streaming tar: read members from chunks of any size, check them, and encode them anew.

The filters are for providers whose backend packs and unpacks by itself (Docker Engine, remote boxes). Every header is
parsed and encoded anew, so the backend's tar reader sees exactly the members that were checked here.

Standard library only; see `nemo_gym.sandbox.archive`.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator, Sequence

_MAX_META_BYTES = 1024 * 1024
_MAX_META_RECORDS = 4096
_MAX_NAME_PARTS = 1024
"""Maximum components of a path: more than `nemo_gym.sandbox.archive.pack` ever writes, and few enough that checking
every prefix of a path is cheap."""
_MAX_ID = 2**32 - 2
_MAX_NUMBER = 2**63 - 1
_SHOWN_CHARS = 200
_MAX_UNRESOLVED = 400_000
_MAX_UNRESOLVED_BYTES = 32 * 1024 * 1024
"""Maximum hard links to excluded files in one stream, and size of their names, which are kept in memory."""
_UNDERSTOOD = frozenset(["path", "linkpath", "size", "uid", "gid", "mtime"])
_SPARSE = "GNU.sparse"
_BLOCK = tarfile.BLOCKSIZE
END_OF_ARCHIVE = bytes(2 * _BLOCK)


class ArchiveError(ValueError):
    """A tar stream is damaged, leaves its target or exceeds a limit; or a path cannot be packed."""


class ArchiveTooLargeError(ArchiveError):
    """A tar stream would exceed the caller's ``max_bytes``."""


class TarParser:
    """A push parser of tar streams (ustar, GNU and pax, without sparse files)."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._content = 0
        self._padding = 0
        self._meta_type: bytes | None = None
        self._meta = bytearray()
        self._overrides: dict[str, str] = {}
        self._global: dict[str, str] = {}
        self.ended = False

    def feed(self, data: bytes) -> Iterator[tarfile.TarInfo | bytes | None]:
        """Yield the events that ``data`` completes: a member, then pieces of its content, then ``None`` at its end.

        Raises:
            ArchiveError: the stream is damaged or holds a sparse file.
        """
        view = memoryview(data)
        position = 0
        while position < len(view) and not self.ended:
            if self._content:
                piece = view[position : position + self._content]
                position += len(piece)
                self._content -= len(piece)
                if self._meta_type is None:
                    # Most chunks of a large file hold only content; they pass without a copy.
                    yield data if len(piece) == len(data) else bytes(piece)
                    if not self._content:
                        yield None
                else:
                    self._meta += piece
                    if not self._content:
                        self._end_meta()
            elif self._padding:
                skipped = min(self._padding, len(view) - position)
                position += skipped
                self._padding -= skipped
            else:
                piece = view[position : position + _BLOCK - len(self._block)]
                position += len(piece)
                self._block += piece
                if len(self._block) == _BLOCK:
                    yield from self._header(bytes(self._block))
                    self._block.clear()

    def close(self) -> None:
        """Declare the end of the input. Raises `ArchiveError` if it lacked the end of the archive."""
        if not self.ended:
            raise ArchiveError("the tar stream ends early")

    def _header(self, block: bytes) -> Iterator[tarfile.TarInfo | None]:
        if not any(block):
            self.ended = True
            return
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.TarError as error:
            raise ArchiveError(f"the tar stream is damaged: {error}") from error
        if member.size < 0:
            raise ArchiveError(f"the tar stream is damaged: '{member.name}' has a negative size")
        if member.type in (b"L", b"K", b"x", b"X", b"g"):
            if member.size > _MAX_META_BYTES:
                raise ArchiveError(f"the tar stream has an extended header of {member.size} bytes")
            self._meta_type = member.type
            self._start_content(member.size)
            return
        self._apply_overrides(member)
        if not member.isreg():
            member.size = 0
        self._start_content(member.size)
        yield member
        if not member.size:
            yield None

    def _start_content(self, size: int) -> None:
        self._content = size
        self._padding = -size % _BLOCK
        if not size and self._meta_type is not None:
            self._end_meta()

    def _end_meta(self) -> None:
        data, kind = bytes(self._meta), self._meta_type
        self._meta.clear()
        self._meta_type = None
        if kind in (b"L", b"K"):
            key = "path" if kind == b"L" else "linkpath"
            self._overrides[key] = data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
            return
        target = self._global if kind == b"g" else self._overrides
        position = records = 0
        while position < len(data):
            length, space, _ = data[position : position + len(str(_MAX_META_BYTES)) + 1].partition(b" ")
            end = position + int(length) if space and length.isdigit() else 0
            if not position + len(length) + 3 <= end <= len(data):
                raise ArchiveError("the tar stream is damaged: a pax record is malformed")
            if (records := records + 1) > _MAX_META_RECORDS:
                raise ArchiveError(f"the tar stream has an extended header of more than {_MAX_META_RECORDS} records")
            name, _, value = data[position + len(length) + 1 : end - 1].partition(b"=")
            position = end
            # Unused records are not kept, because a stream may hold any amount of them.
            key = name.decode("utf-8", "surrogateescape")
            if key in _UNDERSTOOD:
                target[key] = value.decode("utf-8", "surrogateescape")
            elif key.startswith(_SPARSE):
                target[_SPARSE] = ""

    def _apply_overrides(self, member: tarfile.TarInfo) -> None:
        values = {**self._global, **self._overrides}
        self._overrides = {}
        member.name = values.get("path", member.name)
        member.linkname = values.get("linkpath", member.linkname)
        if member.type == tarfile.GNUTYPE_SPARSE or _SPARSE in values:
            raise ArchiveError(
                f"'{shown(member.name)}' is a sparse file, which is not supported; pack it without --sparse"
            )
        try:
            member.size = int(values.get("size", member.size))
            member.uid = int(values.get("uid", member.uid))
            member.gid = int(values.get("gid", member.gid))
            member.mtime = int(float(values.get("mtime", member.mtime)))
        except (ValueError, OverflowError) as error:
            raise ArchiveError(
                f"the tar stream is damaged: '{shown(member.name)}' has an unreadable number"
            ) from error
        if not (
            0 <= member.size <= _MAX_NUMBER
            and 0 <= member.uid <= _MAX_ID
            and 0 <= member.gid <= _MAX_ID
            and -_MAX_NUMBER <= member.mtime <= _MAX_NUMBER
        ):
            raise ArchiveError(
                f"the tar stream is damaged: the size, owner or time of '{shown(member.name)}' is out of range"
            )
        if "\0" in member.name or "\0" in member.linkname:
            raise ArchiveError("the tar stream is damaged: a name contains a zero byte")
        if max(member.name.count("/"), member.linkname.count("/")) >= _MAX_NAME_PARTS:
            raise ArchiveError(f"member '{shown(member.name)}' has a path of more than {_MAX_NAME_PARTS} parts")


def shown(name: str) -> str:
    """Shorten a member's name for an error message, because an archive can contain names of any length."""
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…"


def member_parts(name: str) -> list[str]:
    """Return the components of a member's name. Raises `ArchiveError` if it is absolute or contains ``..``."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise ArchiveError(f"member '{shown(name)}' leaves the target directory")
    return parts


def check_member(member: tarfile.TarInfo) -> list[str]:
    """Check a member's header, and return the components of its name.

    A symbolic link's target may begin with as many ``..`` as the link has parent directories in the archive, and may
    contain none later: after a component that is itself a link, ``..`` would lead elsewhere than the text suggests.

    Raises:
        ArchiveError: the name or the link leaves the target, or the type is neither file, directory nor link.
    """
    parts = member_parts(member.name)
    if member.issym():
        target = [part for part in member.linkname.split("/") if part not in ("", ".")]
        climbs = next((i for i, part in enumerate(target) if part != ".."), len(target))
        outside = member.linkname.startswith("/") or not member.linkname or climbs > len(parts) - 1
        if outside or ".." in target[climbs:]:
            raise ArchiveError(
                f"symbolic link '{shown(member.name)}' -> '{shown(member.linkname)}' leaves the target directory"
            )
    elif member.islnk():
        if not member_parts(member.linkname):
            raise ArchiveError(f"hard link '{shown(member.name)}' -> '{shown(member.linkname)}' does not name a file")
    elif not (member.isreg() or member.isdir()):
        raise ArchiveError(f"member '{shown(member.name)}' is neither a file, a directory nor a link")
    if not parts and not member.isdir():
        raise ArchiveError(f"member '{shown(member.name)}' has no name")
    return parts


def encode_header(member: tarfile.TarInfo) -> bytes:
    """Return the member's header blocks in GNU format; names keep bytes that are not UTF-8."""
    member.pax_headers = {}
    member.uname = member.gname = ""
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def pack_bytes(name: str, data: bytes) -> bytes:
    """Return a complete archive that holds one file."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    return encode_header(member) + data + bytes(-len(data) % _BLOCK) + END_OF_ARCHIVE


class Excludes:
    """Paths to leave out of an archive: relative paths with everything below them, and ``**/name`` at every depth. A
    pattern that ends with ``/`` matches directories only."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._names: set[str] = set()
        self._paths: set[str] = set()
        self._directory_names: set[str] = set()
        self._directory_paths: set[str] = set()
        for pattern in patterns:
            names, paths = self._names, self._paths
            if pattern.endswith("/"):
                names, paths = self._directory_names, self._directory_paths
            parts = member_parts(pattern)
            if not parts or (parts[0] == "**" and len(parts) != 2):
                raise ArchiveError(f"exclude '{pattern}' is neither a relative path nor '**/name'")
            if parts[0] == "**":
                names.add(parts[1])
            else:
                paths.add("/".join(parts))

    def match(self, parts: Sequence[str], *, is_directory: bool) -> bool:
        """Return whether the entry at ``parts`` (relative to the packed path) or a directory above it is excluded."""
        directories = parts if is_directory else parts[:-1]
        return self._holds(self._names, self._paths, parts) or self._holds(
            self._directory_names, self._directory_paths, directories
        )

    @staticmethod
    def _holds(names: set[str], paths: set[str], parts: Sequence[str]) -> bool:
        if not names.isdisjoint(parts):
            return True
        return bool(paths) and any("/".join(parts[: i + 1]) in paths for i in range(len(parts)))


def _normal(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


MAX_LEFT_OUT_BYTES = 32 << 30
"""Limit on the size of excluded files in a stream with ``max_bytes``. Their content is sent all the same, and a sparse
file may have terabytes."""


class TarFilter:
    """Reads a tar stream and writes it again with every header encoded anew.

    With ``strict`` (for streams into a box), it refuses what `check_member` refuses, and members below a symbolic link
    of the same stream. Otherwise (for streams from a backend's own packer), such members pass, and pipes, sockets and
    devices are left out.

    A hard link to an excluded file has no content in its stream. It is refused, unless ``resolves`` says that the
    caller will `resolve` what is `unresolved`: add such links with the content from a second stream of the same tree.
    """

    def __init__(
        self,
        *,
        exclude: Sequence[str] = (),
        max_bytes: int | None = None,
        strict: bool = True,
        strip: int = 1,
        resolves: bool = False,
    ) -> None:
        self._parser = TarParser()
        self._excludes = Excludes(exclude)
        self._max_bytes = max_bytes
        self._strict = strict
        self._strip = strip
        self._total = self._left_out = 0
        self._keep = False
        self._padding = 0
        self._links: set[str] = set()
        self._unresolved: dict[str, list[str]] = {}
        """Excluded file → its other names, which are not excluded."""
        self._resolves = resolves
        self._unresolved_count = self._unresolved_bytes = 0

    @property
    def unresolved(self) -> bool:
        return bool(self._unresolved)

    def feed(self, data: bytes) -> bytes:
        """Return the part of the output that ``data`` completes; may be empty."""
        out: list[bytes] = []
        for event in self._parser.feed(data):
            if isinstance(event, tarfile.TarInfo):
                self._keep = self._accept(event)
                self._padding = -event.size % tarfile.BLOCKSIZE
                if self._keep:
                    # Refuse it before its content arrives: a sparse file may declare a petabyte.
                    self._check(event.size)
                    out.append(encode_header(event))
                elif self._max_bytes is not None:
                    self._left_out += event.size
                    if self._left_out > MAX_LEFT_OUT_BYTES:
                        raise ArchiveTooLargeError(f"what is excluded is larger than {MAX_LEFT_OUT_BYTES} bytes")
            elif self._keep:
                out.append(bytes(self._padding) if event is None else event)
        joined = b"".join(out)  # does not copy a single piece
        self._count(len(joined))
        return joined

    def resolve(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the files that hard links to excluded files stand for. A file none of whose names is left is omitted.

        Raises:
            ArchiveError: the names share their content in another way by now, so the content of one is unknown.
        """
        groups, self._unresolved = self._unresolved, {}
        targets = {name: target for target, names in groups.items() for name in names}
        sources: dict[str, str] = {}  # excluded file → the name that its content came with
        parser, padding = TarParser(), 0
        names: list[str] = []
        for event in (event for chunk in chunks for event in parser.feed(chunk)):
            if isinstance(event, tarfile.TarInfo):
                name, names = _normal(event.name), []
                target = name if name in groups else targets.get(name)
                if target is None:
                    continue
                if (_normal(event.linkname) != sources.get(target)) if event.islnk() else (target in sources):
                    raise ArchiveError(f"'{shown(name)}', which has a hard link, changed while it was read")
                if event.islnk():
                    continue
                sources[target] = name
                if event.isreg() or event.issym():
                    names = groups[target]
                    padding = -event.size % tarfile.BLOCKSIZE
                    self._check(event.size)
                    event.name = names[0]
                    yield self._counted(encode_header(event))
            elif names and event is not None:
                yield self._counted(event)
            elif names:
                yield self._counted(bytes(padding))
                for name in names[1:]:
                    link = tarfile.TarInfo(name)
                    link.type, link.linkname = tarfile.LNKTYPE, names[0]
                    yield self._counted(encode_header(link))
        parser.close()

    def finish(self) -> bytes:
        """Return the end of the output. Raises `ArchiveError` if the input ended early."""
        self._parser.close()
        self._count(len(END_OF_ARCHIVE))
        return END_OF_ARCHIVE

    def _count(self, size: int) -> None:
        self._check(size)
        self._total += size

    def _counted(self, piece: bytes) -> bytes:
        self._count(len(piece))
        return piece

    def _check(self, size: int) -> None:
        if self._max_bytes is not None and self._total + size > self._max_bytes:
            raise ArchiveTooLargeError(f"the archive is larger than max_bytes={self._max_bytes}")

    def _accept(self, member: tarfile.TarInfo) -> bool:
        if self._strict:
            parts = check_member(member)
            if member.issym():
                self._links.add("/".join(parts))
            else:
                self._links.discard("/".join(parts))
            for path in (parts, member_parts(member.linkname)) if member.islnk() else (parts,):
                if self._links and any("/".join(path[:n]) in self._links for n in range(1, len(path))):
                    raise ArchiveError(
                        f"member '{shown(member.name)}' leads through a symbolic link of the same archive"
                    )
        else:
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                return False
        member.name = "/".join(parts) or "."
        if self._is_excluded(member.name, member.isdir()):
            return False
        if member.islnk() and self._is_excluded(member.linkname):
            if not self._resolves:
                raise ArchiveError(
                    f"'{shown(member.name)}' is a hard link to '{shown(member.linkname)}', which is excluded"
                )
            self._unresolved_count += 1
            self._unresolved_bytes += len(member.name) + len(member.linkname)
            if self._unresolved_count > _MAX_UNRESOLVED or self._unresolved_bytes > _MAX_UNRESOLVED_BYTES:
                raise ArchiveError(
                    f"more than {_MAX_UNRESOLVED} hard links lead to excluded files, or their names take more than"
                    f" {_MAX_UNRESOLVED_BYTES} bytes"
                )
            self._unresolved.setdefault(_normal(member.linkname), []).append(member.name)
            return False
        return True

    def _is_excluded(self, name: str, is_directory: bool = False) -> bool:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return self._excludes.match(parts[self._strip :], is_directory=is_directory)


def filtered(
    chunks: Iterable[bytes],
    *,
    again: Callable[[], Iterable[bytes]],
    exclude: Sequence[str] = (),
    max_bytes: int | None = None,
    strip: int = 1,
) -> Iterator[bytes]:
    """Filter the excluded paths out of a stream from a backend's packer, so that it looks like one from `pack`.

    Args:
        again: returns a second stream of the same tree, for the content of hard links to excluded files.
        strip: number of leading components of member names that ``exclude`` ignores; 1 for the packed path's own name.
    """
    tar_filter = TarFilter(exclude=exclude, max_bytes=max_bytes, strict=False, strip=strip, resolves=True)
    for chunk in chunks:
        if out := tar_filter.feed(chunk):
            yield out
    if tar_filter.unresolved:
        yield from tar_filter.resolve(again())
    yield tar_filter.finish()


async def single_file(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the content of the stream's first member. Raises `ArchiveError` unless that is a regular file."""
    parser = TarParser()
    done = False
    async for chunk in chunks:
        for event in parser.feed(chunk):
            if isinstance(event, tarfile.TarInfo) and not done and not event.isreg():
                raise ArchiveError(f"'{shown(event.name)}' is not a regular file")
            if isinstance(event, bytes) and not done:
                yield event
            done = done or event is None
    parser.close()
    if not done:  # pipes, sockets and devices are left out of archives
        raise ArchiveError("it is not a regular file")
