"""Collects what harvest rules name: files of a box as one tar stream, and what a command prints in it."""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Mapping, Sequence

from nemo_gym.contract.errors import ContractError, SandboxArchiveError, SandboxArchiveTooLargeError, SandboxLostError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import Artifact, CommandHarvest, FilesHarvest, GitDiffHarvest, HarvestItem
from nemo_gym.sandbox.archive import END_OF_ARCHIVE, ArchiveError, TarParser, encode_header, member_parts
from nemo_gym.sandbox.base import ExecOutcome, SandboxHandle, SandboxProvider
from nemo_gym.sandbox.harvest.git_diff import harvest_git_diff


class _TooLarge(Exception):
    pass


async def harvest_files(provider: SandboxProvider, handle: SandboxHandle, item: FilesHarvest) -> Artifact:
    """All of ``item.paths`` as one tar archive whose members are named by their path in the box without the leading
    slash. One path that cannot be read spoils the artifact: it says which, and holds nothing."""
    out = io.BytesIO()
    try:
        for path in item.paths:
            await _append(provider, handle, path, item, out)
    except (_TooLarge, SandboxArchiveTooLargeError):
        size = out.tell()
        return Artifact.of(item.name, "files", b"", truncated=True, size=size, error=_cap_message(item.max_bytes))
    except (SandboxArchiveError, ArchiveError) as error:
        return Artifact.of(item.name, "files", b"", error=f"cannot harvest '{path}': {error}")
    out.write(END_OF_ARCHIVE)
    return Artifact.of(item.name, "files", out.getvalue(), facts={"paths": list(item.paths)})


async def _append(
    provider: SandboxProvider, handle: SandboxHandle, path: str, item: FilesHarvest, out: io.BytesIO
) -> None:
    parent = member_parts(posixpath.dirname(posixpath.normpath(path)).lstrip("/"))
    parser, padding = TarParser(), 0
    # What fits into the artifact fits into the provider's stream, whose names are shorter.
    cap = item.max_bytes + len(END_OF_ARCHIVE)
    async for chunk in provider.get_archive(handle, path, exclude=item.exclude, max_bytes=cap):
        for event in parser.feed(chunk):
            if isinstance(event, tarfile.TarInfo):
                event.name = "/".join([*parent, event.name])
                if event.islnk():
                    event.linkname = "/".join([*parent, event.linkname])
                padding = -event.size % tarfile.BLOCKSIZE
                out.write(encode_header(event))
            elif event is not None:
                out.write(event)
            else:
                out.write(bytes(padding))
            if out.tell() > item.max_bytes:
                raise _TooLarge
    parser.close()


def harvested_file(artifacts: Sequence[Artifact], name: str, path: str) -> bytes | None:
    """What the file at ``path`` in the box held, of the artifact of that name; ``None`` where there is no such file.

    The archive may come from an agent server: whatever is odd about it is no file either, and no error.
    """
    artifact = next((found for found in artifacts if found.name == name), None)
    if artifact is None or artifact.error or artifact.truncated:
        return None
    wanted, content = member_parts(posixpath.normpath(path).lstrip("/")), None
    parser, inside = TarParser(), False
    try:
        for event in parser.feed(artifact.content()):
            if isinstance(event, tarfile.TarInfo):
                inside = event.isreg() and member_parts(event.name) == wanted
                if inside:
                    content = b""
            elif inside and event is not None:
                content = (content or b"") + event
        parser.close()
    except (ArchiveError, ContractError):
        return None
    return content


async def harvest_command(provider: SandboxProvider, handle: SandboxHandle, item: CommandHarvest) -> Artifact:
    """What ``item.command`` writes, standard error included; the box's own word."""
    command = item.command if isinstance(item.command, str) else list(item.command)
    result = await provider.exec(
        handle,
        command,
        cwd=item.cwd,
        timeout_s=item.timeout_s,
        merge_stderr=True,
        max_output_bytes=item.max_bytes,
    )
    if result.outcome is ExecOutcome.LOST:
        raise SandboxLostError(f"box {handle.sandbox_id} was lost during harvest", retryable=True)
    error = None if result.outcome is ExecOutcome.EXITED else f"the command ended by '{result.outcome}'"
    return Artifact.of(
        item.name,
        "command",
        result.stdout_bytes,
        truncated=result.stdout_truncated,
        return_code=result.return_code,
        error=error,
    )


def _cap_message(max_bytes: int) -> str:
    return f"more than the cap of {max_bytes} bytes"


async def harvest_all(
    provider: SandboxProvider,
    handle: SandboxHandle,
    spec: SandboxSpec,
    items: Sequence[HarvestItem],
    labels: Mapping[str, str],
) -> list[Artifact]:
    """Collect ``items`` from a box, in their order.

    What the box's contents can cause (a missing directory, too much data, a command that hangs) is an artifact with
    ``error`` or ``truncated``.

    Args:
        spec: what the box was created from; its image is where a patch's pristine side comes from.
        labels: of the attempt; boxes made for harvesting carry them with the role ``harvest``.

    Raises:
        SandboxError: the provider failed, or a box was lost.
    """
    artifacts = []
    for item in items:
        if isinstance(item, GitDiffHarvest):
            artifacts.append(await harvest_git_diff(provider, handle, spec, item, labels))
        elif isinstance(item, FilesHarvest):
            artifacts.append(await harvest_files(provider, handle, item))
        else:
            artifacts.append(await harvest_command(provider, handle, item))
    return artifacts
