"""Transfer of files as tar streams. The engine packs and unpacks them; no program in the box is involved."""

from __future__ import annotations

import base64
import contextlib
import json
import posixpath
import tarfile
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

from nemo_gym.contract.errors import SandboxArchiveError, SandboxArchiveTooLargeError
from nemo_gym.sandbox.archive import (
    END_OF_ARCHIVE,
    ArchiveError,
    ArchiveTooLargeError,
    TarParser,
    check_member,
    encode_header,
    pack_bytes,
)
from nemo_gym.sandbox.base import absolute
from nemo_gym.sandbox.providers.docker.engine import Engine, explain, is_missing_path, sdk_errors, status_of, translate
from nemo_gym.sandbox.tar_stream import TarFilter, filtered

_IN_MEMORY_BYTES = 32 * 1024 * 1024
_CHUNK_BYTES = 4 * 1024 * 1024
_GO_MODE_DIR = 1 << 31
_GO_MODE_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
"""Devices, pipes, sockets, and files of no known kind."""
_ACCOUNT_FILES = ("/etc/passwd", "/etc/group")
_MAX_ACCOUNT_BYTES = 64 * 1024 * 1024
_CAUSED_BY_THE_BOX = (
    *("too many links", "too many levels of symbolic links"),  # as older and newer engines say
    *("not a directory", "file name too long", "cannot overwrite"),
)
"""What the engine calls a failure of its own although it is the box's contents that cause it."""
MAX_IMPLIED_DIRECTORIES = 20_000
"""Maximum number of parent directories that an archive may leave out. Each of them costs a request to the engine."""


class Upload:
    """A tar stream on its way into a box. It is checked as it arrives, stored until it is complete, then sent.

    The engine unpacks members as they arrive, so a bad member at the end would leave the earlier ones in the box.
    """

    def __init__(self, path: str) -> None:
        self.path = posixpath.normpath(absolute(path))
        self._filter = TarFilter()
        # Closed by `close`; it outlives this function.
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        self._parser = TarParser()
        self._size = 0
        self._named: set[tuple[str, ...]] = set()
        self.implied: set[tuple[str, ...]] = set()
        """Directories that members lie in although the archive does not contain them."""

    def feed(self, data: bytes | None) -> None:
        """Check and store a chunk of the stream, or its end (``None``). Raises `SandboxArchiveError` if a member would
        leave the target, or the stream ended early."""
        try:
            self._write(self._filter.finish() if data is None else self._filter.feed(data))
        except ArchiveError as error:
            raise SandboxArchiveError(f"the archive for '{self.path}' is refused: {error}") from error

    def _write(self, out: bytes) -> None:
        for event in self._parser.feed(out):
            if isinstance(event, tarfile.TarInfo):
                parts = check_member(event)
                if event.isdir():
                    self._named.add(tuple(parts))
                for n in range(len(parts) - 1, 0, -1):
                    above = tuple(parts[:n])
                    if above in self.implied or above in self._named:
                        break  # so are all of its parents
                    self.implied.add(above)
                if len(self.implied) > MAX_IMPLIED_DIRECTORIES:
                    raise ArchiveError(
                        f"its members lie in more than {MAX_IMPLIED_DIRECTORIES} directories that it does not contain;"
                        " pack the directories too, each before what is in it"
                    )
        self._size += self._spool.write(out)

    def send(self, engine: Engine, container_id: str) -> None:
        """Send the stream to the engine; blocks.

        Raises:
            SandboxArchiveError: the target is not a directory, or the box has a link or file in place of a directory.
            SandboxLostError: the box is gone.
        """
        try:
            for parts in sorted(self.implied - self._named):
                entry = stat(engine, container_id, posixpath.join(self.path, *parts))
                if entry is not None and not entry["mode"] & _GO_MODE_DIR:
                    raise SandboxArchiveError(
                        f"the archive for '{self.path}' is refused: '{'/'.join(parts)}' is a link or a file in the box"
                    )
            for attempt in range(2):
                self._spool.seek(0)
                # Send an archive that fits in memory in one piece; a file object would go out in blocks of 16 KiB.
                data = self._spool.read() if self._size <= _IN_MEMORY_BYTES else self._spool
                try:
                    _put(engine, container_id, self.path, data)
                    return
                except sdk_errors() as error:
                    if not is_missing_path(error) or attempt:
                        raise
                make_directories(engine, container_id, self.path)
        except sdk_errors() as error:
            if _is_caused_by_the_box(error):
                raise SandboxArchiveError(f"cannot unpack at '{self.path}' in the box: {explain(error)}") from error
            raise translate(error, f"unpacking an archive at '{self.path}'") from error

    def close(self) -> None:
        self._spool.close()


def _is_caused_by_the_box(error: Exception) -> bool:
    return is_missing_path(error) or any(text in explain(error) for text in _CAUSED_BY_THE_BOX)


def _put(engine: Engine, container_id: str, path: str, data: bytes | IO[bytes]) -> None:
    # The SDK's own call lets the engine replace a directory, with everything in it, by a file or a link.
    client = engine.client
    params = {"path": path, "noOverwriteDirNonDir": "true"}
    response = client.put(_archive_url(client, container_id), params=params, data=data, timeout=client.timeout)
    _raise_for_status(response)


def stat(engine: Engine, container_id: str, path: str) -> dict[str, Any] | None:
    """Return the engine's data on a path in a box, without following a final link; ``None`` if the path is missing."""
    client = engine.client
    response = client.head(_archive_url(client, container_id), params={"path": path}, timeout=client.timeout)
    if response.status_code == 404:
        # A HEAD response has no body that tells a missing path from a missing box; this raises if the box is missing.
        client.inspect_container(container_id)
        return None
    response.raise_for_status()
    return _decoded_stat(response)


def make_directories(engine: Engine, container_id: str, path: str) -> None:
    """Create a directory and its missing parents. Existing directories stay unchanged."""
    missing: list[str] = []
    existing = path
    while existing != "/" and stat(engine, container_id, existing) is None:
        missing.insert(0, posixpath.basename(existing))
        existing = posixpath.dirname(existing)
    if not missing:
        return
    data = b""
    for count in range(1, len(missing) + 1):
        member = tarfile.TarInfo("/".join(missing[:count]))
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        data += encode_header(member)
    engine.client.put_archive(container_id, existing, data + END_OF_ARCHIVE)


def files_archive(files: Mapping[str, str]) -> bytes:
    """Pack the spec's files into one archive, to be unpacked at ``/``."""
    members = (
        pack_bytes(posixpath.normpath(absolute(path)).lstrip("/"), text.encode("utf-8", "surrogateescape"))
        for path, text in files.items()
    )
    return b"".join(member.removesuffix(END_OF_ARCHIVE) for member in members) + END_OF_ARCHIVE


def download(
    engine: Engine, container_id: str, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
) -> Generator[bytes, None, None]:
    """Yield the file or tree at ``path`` (a final link is followed) as a tar stream, after the engine has sent it all.

    The engine locks a container while it packs, so a slow reader would keep everyone from inspecting or removing the
    box. This function therefore reads the engine's stream at full speed into memory or a temporary file first.

    Raises:
        SandboxArchiveTooLargeError: the stream would exceed ``max_bytes``. Without that limit the stream may fill the
            disk for temporary files: a sparse file is sent with all its holes.
        SandboxArchiveError: there is nothing at ``path``.
        SandboxLostError: the box is gone.
    """
    path = posixpath.normpath(absolute(path))
    # The engine names members of "/" with a leading slash, and those of "/." without.
    source = path if path != "/" else "/."
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        try:
            _require_account_files(engine, container_id)
            with _reading(engine, container_id, source) as (chunks, target):
                if not target:
                    strip = 0 if path == "/" else 1
                    again = partial(_read_again, engine, container_id, source)
                    _spool(filtered(chunks, again=again, exclude=exclude, max_bytes=max_bytes, strip=strip), spool)
            if target:
                with _reading(engine, container_id, target) as (chunks, _):
                    again = partial(_read_again, engine, container_id, target)
                    members = filtered(chunks, again=again, exclude=exclude, max_bytes=max_bytes)
                    _spool(_renamed(members, posixpath.basename(path)), spool)
        except ArchiveTooLargeError as error:
            raise SandboxArchiveTooLargeError(f"'{path}' cannot be packed: {error}", max_bytes=max_bytes) from error
        except ArchiveError as error:
            raise SandboxArchiveError(f"'{path}' cannot be packed: {error}") from error
        except sdk_errors() as error:
            if _is_caused_by_the_box(error):
                raise SandboxArchiveError(f"there is nothing at '{path}' in the box", path=path) from error
            raise translate(error, f"packing '{path}'") from error
        spool.seek(0)
        while chunk := spool.read(_CHUNK_BYTES):
            yield chunk


def _require_account_files(engine: Engine, container_id: str) -> None:
    """Raise `SandboxArchiveError` if the engine could not read the box's accounts. It looks up the names of owners in
    these files, and waits for a pipe there forever, during which the box can be neither packed nor removed."""
    for path in _ACCOUNT_FILES:
        try:
            entry = stat(engine, container_id, path)
            if entry is not None and entry.get("linkTarget"):
                entry = stat(engine, container_id, entry["linkTarget"])
        except sdk_errors() as error:
            if status_of(error) == 500:
                continue  # nobody can open it, the engine neither: a loop of links, say
            raise
        if entry is not None and (entry["mode"] & _GO_MODE_SPECIAL or entry["size"] > _MAX_ACCOUNT_BYTES):
            raise SandboxArchiveError(f"nothing can be packed: the box has replaced its {path}", path=path)


def _spool(chunks: Iterator[bytes], spool: IO[bytes]) -> None:
    # Not `SpooledTemporaryFile.writelines`: it keeps everything in memory and moves to the disk only at its end.
    for chunk in chunks:
        spool.write(chunk)


@contextlib.contextmanager
def _reading(engine: Engine, container_id: str, path: str) -> Iterator[tuple[Iterator[bytes], str]]:
    """The engine's stream of a path, and the path's target if it is a link (else an empty string).

    The SDK's own call leaves its connection open until garbage collection. Until then the engine keeps the container
    locked, so the container could not even be removed.
    """
    client = engine.client
    response = client.get(
        _archive_url(client, container_id),
        params={"path": path},
        headers={"Accept-Encoding": "identity"},
        stream=True,
        timeout=client.timeout,
    )
    try:
        _raise_for_status(response)
        yield response.iter_content(_CHUNK_BYTES), str(_decoded_stat(response).get("linkTarget") or "")
    finally:
        response.close()


def _read_again(engine: Engine, container_id: str, path: str) -> Iterator[bytes]:
    with _reading(engine, container_id, path) as (chunks, _):
        yield from chunks


def _archive_url(client: Any, container_id: str) -> str:
    return f"{client.base_url}/v{client.api_version}/containers/{container_id}/archive"


def _raise_for_status(response: Any) -> None:
    """Raise the SDK's error, with the engine's message, for a response with an error status."""
    from docker.errors import create_api_error_from_http_exception
    from requests import HTTPError

    try:
        response.raise_for_status()
    except HTTPError as error:
        create_api_error_from_http_exception(error)


def _decoded_stat(response: Any) -> dict[str, Any]:
    return dict(json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"])))


def _renamed(chunks: Iterator[bytes], first_component: str) -> Iterator[bytes]:
    """Replace the first component of every member's name by ``first_component``."""
    parser = TarParser()
    padding = 0
    for chunk in chunks:
        out = bytearray()
        for event in parser.feed(chunk):
            if isinstance(event, tarfile.TarInfo):
                padding = -event.size % tarfile.BLOCKSIZE
                event.name = "/".join([first_component, *event.name.split("/")[1:]])
                if event.islnk():
                    event.linkname = "/".join([first_component, *event.linkname.split("/")[1:]])
                out += encode_header(event)
            else:
                out += bytes(padding) if event is None else event
        if out:
            yield bytes(out)
    yield END_OF_ARCHIVE
