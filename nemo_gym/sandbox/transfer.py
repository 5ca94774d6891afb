"""Single files into and out of a box, for providers that move trees as tar streams."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nemo_gym.contract.errors import SandboxArchiveError, SandboxError
from nemo_gym.sandbox.archive import pack
from nemo_gym.sandbox.archive_filters import single_file
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.tar_stream import ArchiveError


class MovesArchives(Protocol):
    """What is needed of an `nemo_gym.sandbox.base.SandboxProvider` here."""

    async def put_archive(self, handle: SandboxHandle, path: str, tar: AsyncIterator[bytes]) -> None: ...

    def get_archive(
        self, handle: SandboxHandle, path: str, *, exclude: Sequence[str] = (), max_bytes: int | None = None
    ) -> AsyncIterator[bytes]: ...


async def upload(provider: MovesArchives, handle: SandboxHandle, source: Path, target: str) -> None:
    """A file of this host (links are followed) as ``target`` in the box, with its mode, replacing what is there."""
    parent, _, name = absolute(target).rpartition("/")
    if not name:
        raise SandboxError(f"'{target}' does not name a file")
    if not await asyncio.to_thread(source.is_file):
        raise SandboxError(f"'{source}' is not a file of this host")
    await provider.put_archive(handle, parent or "/", in_thread(pack(source.resolve(), name=name)))


async def download(provider: MovesArchives, handle: SandboxHandle, source: str, target: Path) -> None:
    """A regular file of the box as ``target`` on this host: whole, or not at all.

    Raises:
        SandboxArchiveError: it is no regular file, or its stream was damaged.
        SandboxError: there is no such file.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        async with contextlib.aclosing(single_file(provider.get_archive(handle, source))) as pieces:
            await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
            with await asyncio.to_thread(partial.open, "wb") as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(partial.replace, target)
    except ArchiveError as error:
        raise SandboxArchiveError(f"downloading {source}: {error}") from error
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)


async def in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A blocking iterator as an asynchronous one."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk


def absolute(path: str) -> str:
    """``path`` with single slashes and none at its end. Raises `SandboxArchiveError` unless it is absolute."""
    if not path.startswith("/") or "\0" in path:
        raise SandboxArchiveError(f"'{path}' must be an absolute path in the box")
    return re.sub(r"/+", "/", path.rstrip("/")) or "/"
