"""One artifact for each thing that a descriptor asks to harvest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.contract.session import Artifact, FilesHarvest, GitDiffHarvest, HarvestItem
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider
from nemo_gym.sandbox.harvest.files import harvest_command, harvest_files
from nemo_gym.sandbox.harvest.git_diff import harvest_git_diff


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
