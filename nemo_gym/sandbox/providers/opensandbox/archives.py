"""Trees in and out of a box as tar streams.

Packing and unpacking are the helper program's, so no program of the box is needed. What goes in is judged here first,
whole: a member that would leave its target is refused before anything of the archive is in the box.
"""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from nemo_gym.contract.errors import SandboxArchiveError, SandboxArchiveTooLargeError
from nemo_gym.sandbox.archive_filters import TarFilter
from nemo_gym.sandbox.providers.opensandbox.box import OpenSandboxBox
from nemo_gym.sandbox.providers.opensandbox.connection import Connection
from nemo_gym.sandbox.providers.opensandbox.frames import END, STDOUT
from nemo_gym.sandbox.providers.opensandbox.tool import ToolRun, ending, order, put_file, request_argument
from nemo_gym.sandbox.tar_stream import ArchiveError, ArchiveTooLargeError
from nemo_gym.sandbox.transfer import absolute

_IN_MEMORY_BYTES = 32 * 1024 * 1024


async def put(connection: Connection, box: OpenSandboxBox, path: str, tar: AsyncIterator[bytes]) -> None:
    """See `SandboxProvider.put_archive`."""
    path = absolute(path)
    through = TarFilter()
    # The backend takes files of a known length only; what does not fit in memory waits in a file of this machine.
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
        try:
            async for chunk in tar:
                await asyncio.to_thread(spool.write, through.feed(chunk))
            spool.write(through.finish())
        except ArchiveError as error:
            raise SandboxArchiveError(f"the archive for '{path}' is refused: {error}") from error
        spool.seek(0)
        inside = await put_file(connection, box, spool, f"{uuid.uuid4().hex}.tar")
    argument = await request_argument(connection, box, {"path": path, "tar": inside})
    found = await order(connection, box, "unpack", argument)
    if found["outcome"] == "error":
        raise SandboxArchiveError(f"the archive for '{path}' is refused: {found.get('error')}", path=path)


async def get(
    connection: Connection, box: OpenSandboxBox, path: str, *, exclude: Sequence[str], max_bytes: int | None
) -> AsyncGenerator[bytes, None]:
    """See `SandboxProvider.get_archive`."""
    path = absolute(path)
    strip = 0 if posixpath.basename(path) == "" else 1
    try:
        # What the box sends is filtered like what any backend packs: headers are encoded anew, the cap is kept here.
        through = TarFilter(exclude=exclude, max_bytes=max_bytes, strict=False, strip=strip)
    except ArchiveError as error:
        raise SandboxArchiveError(str(error)) from error
    argument = await request_argument(connection, box, {"path": path, "exclude": list(exclude)})
    running = ToolRun(connection, box, "pack", argument)
    running.begin()
    try:
        while (frame := await running.next()).kind != END:
            if frame.kind == STDOUT and (out := through.feed(frame.data)):
                yield out
        found = ending(frame)
        if found["outcome"] == "error":
            if found.get("kind") == "missing":
                raise SandboxArchiveError(f"there is nothing at '{path}' in the box", path=path)
            raise SandboxArchiveError(f"'{path}' cannot be packed: {found.get('error')}", path=path)
        yield through.finish()
        await running.settle()
    except ArchiveTooLargeError as error:
        raise SandboxArchiveTooLargeError(f"'{path}' cannot be packed: {error}", max_bytes=max_bytes) from error
    except ArchiveError as error:
        raise SandboxArchiveError(f"'{path}' cannot be packed: {error}") from error
    finally:
        await running.close()
