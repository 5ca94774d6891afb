"""Filters over tar streams, for providers whose backend packs and unpacks by itself (Docker Engine, remote boxes).

What passes is parsed and encoded anew, so the backend's tar reader sees exactly the members that were judged here.
"""

from __future__ import annotations

import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence

from nemo_gym.sandbox.tar_stream import (
    END_OF_ARCHIVE,
    ArchiveError,
    ArchiveTooLargeError,
    Excludes,
    TarParser,
    check_member,
    encode_header,
    member_parts,
    shown,
)


class TarFilter:
    """Reads a tar stream and writes it again with every header encoded anew.

    ``strict`` refuses what `check_member` refuses, and members below a symbolic link of the same stream (for streams
    going into a box). Otherwise such members pass, and pipes, sockets and devices are left out (for streams that come
    from a backend's own packer).
    """

    def __init__(
        self, *, exclude: Sequence[str] = (), max_bytes: int | None = None, strict: bool = True, strip: int = 1
    ) -> None:
        self._parser = TarParser()
        self._excludes = Excludes(exclude)
        self._max_bytes = max_bytes
        self._strict = strict
        self._strip = strip
        self._total = 0
        self._keep = False
        self._padding = 0
        self._links: set[str] = set()

    def feed(self, data: bytes) -> bytes:
        """The part of the output that ``data`` completes; may be empty."""
        out: list[bytes] = []
        for event in self._parser.feed(data):
            if isinstance(event, tarfile.TarInfo):
                self._keep = self._accept(event)
                self._padding = -event.size % tarfile.BLOCKSIZE
                if self._keep:
                    # Refused before its content comes: a sparse file may declare a petabyte.
                    self._check(event.size)
                    out.append(encode_header(event))
            elif self._keep:
                out.append(bytes(self._padding) if event is None else event)
        joined = b"".join(out)  # one piece is not copied
        self._count(len(joined))
        return joined

    def finish(self) -> bytes:
        """The end of the output. Raises `ArchiveError` when the input ended early."""
        self._parser.close()
        self._count(len(END_OF_ARCHIVE))
        return END_OF_ARCHIVE

    def _count(self, size: int) -> None:
        self._check(size)
        self._total += size

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
        if member.islnk() and self._left_out(member.linkname) and not self._left_out(member.name):
            raise ArchiveError(
                f"'{shown(member.name)}' is a hard link to '{shown(member.linkname)}', which is excluded"
            )
        return not self._left_out(member.name)

    def _left_out(self, name: str) -> bool:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return self._excludes.match(parts[self._strip :])


def validated(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A stream on its way into a box; raises `ArchiveError` at the first member that would leave the target."""
    return _filter(chunks, TarFilter())


def filtered(
    chunks: Iterable[bytes], *, exclude: Sequence[str] = (), max_bytes: int | None = None, strip: int = 1
) -> Iterator[bytes]:
    """A stream from a backend's packer without the excluded paths, as `pack` would have made it.

    Args:
        strip: leading components of member names that ``exclude`` does not count; 1 for the packed path's own name.
    """
    return _filter(chunks, TarFilter(exclude=exclude, max_bytes=max_bytes, strict=False, strip=strip))


def _filter(chunks: Iterable[bytes], through: TarFilter) -> Iterator[bytes]:
    for chunk in chunks:
        if out := through.feed(chunk):
            yield out
    yield through.finish()


async def single_file(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The content of the stream's first member. Raises `ArchiveError` unless that is a regular file."""
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
