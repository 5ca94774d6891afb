"""Harvest tests run on every built-in provider, with an image that holds a small repository."""

from __future__ import annotations

import subprocess
import tarfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest

from nemo_gym.contract.sandbox import NetworkPolicy, SandboxRole, SandboxSpec
from nemo_gym.contract.session import Artifact, GitDiffHarvest, HarvestItem
from nemo_gym.sandbox.base import SandboxHandle, SandboxProvider, SupportsSnapshot, box_labels
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.harvest import harvest_all
from tests.docker_engine import docker_engine
from tests.sandbox.local_boxes import config_below

__all__ = ["docker_engine"]

REPOSITORY = r"""
set -e
git init -q -b main && git config user.email a@example.org && git config user.name a
printf 'one\ntwo\n' > a.txt; printf 'crlf\r\n' > crlf.txt; printf '\0\1binary' > data.bin
mkdir pkg && echo 'x = 1' > pkg/m.py && ln -s a.txt link && ln -P link twin
echo gone > gone.txt; echo run > run.sh
printf 'odd\n' > "$(printf 'we"ird\nname')"
echo icon > "$(printf 'Icon\r')"; echo icon > "$(printf 'pkg/Icon\r')"
printf 'build/\n*.egg-info\nnode_modules\n/target/\n*.log\n!notes.log\nout\n!/web/out\n' > .gitignore
printf 'zout/*\n!zout/*.py\n' >> .gitignore
mkdir web && echo /dist > web/.gitignore
git add -A && git commit -qm base
mkdir build logs zout && echo product > build/p && echo built > generated.txt && echo run > logs/run.log
echo run > zout/run.txt
"""


def _testbed_archive(directory: Path) -> bytes:
    testbed = directory / "testbed"
    testbed.mkdir()
    subprocess.run(["bash", "-c", REPOSITORY], cwd=testbed, check=True)
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(testbed, "testbed")
    return buffer.getvalue()


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


@dataclass
class Bench:
    """A provider and an image of the repository on it."""

    provider: SandboxProvider
    image: str
    run_id: str

    @property
    def spec(self) -> SandboxSpec:
        labels = box_labels(run=self.run_id, rollout="r", attempt=1, role=SandboxRole.WORK)
        return SandboxSpec(
            image=self.image, ttl_s=120, workdir="/testbed", network=NetworkPolicy.NONE, metadata=labels
        )

    async def sh(self, box: SandboxHandle, script: str) -> None:
        result = await self.provider.exec(box, ["bash", "-ec", script], cwd="/testbed", timeout_s=60)
        assert result.ok, result.stderr

    async def harvest(self, box: SandboxHandle, *items: HarvestItem) -> list[Artifact]:
        wanted = items or (GitDiffHarvest(path="/testbed"),)
        return await harvest_all(self.provider, box, self.spec, wanted, self.spec.metadata)

    async def patch_after(self, script: str) -> Artifact:
        """What is harvested from a fresh box in which ``script`` ran."""
        box = await self.provider.create(self.spec)
        try:
            await self.sh(box, script)
            (artifact,) = await self.harvest(box)
        finally:
            await self.provider.close(box)
        return artifact

    async def differences(self, patch: bytes, script: str) -> str:
        """What ``diff -r`` says of a pristine tree with ``patch`` and one in which ``script`` ran."""
        box = await self.provider.create(self.spec)
        try:
            await self.sh(box, "cp -a /testbed /expected; cd /expected; " + script)
            applied = await self.provider.exec(box, ["git", "apply", "-"], cwd="/testbed", stdin=patch)
            assert applied.ok, applied.stderr
            diff = "diff -r --no-dereference -x .git -x build -x __pycache__ /testbed /expected"
            return (await self.provider.exec(box, diff, cwd="/")).stdout or ""
        finally:
            await self.provider.close(box)


@pytest.fixture(params=["local", "docker"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    """A provider with a prepared image; afterwards no box and no image of the test is left."""
    settings: dict[str, Any] = {}
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    else:
        settings = config_below(tmp_path / "boxes")
    provider = create_provider(request.param, **settings)
    run_id = f"harvest-{uuid.uuid4().hex[:8]}"
    image = f"ng-test-{run_id}"
    snapshots = cast(SupportsSnapshot, provider)
    labels = box_labels(run=run_id, rollout="build", attempt=1, role=SandboxRole.BUILD)
    box = await provider.create(SandboxSpec(ttl_s=120, network=NetworkPolicy.NONE, metadata=labels))
    try:
        await provider.put_archive(box, "/", _once(_testbed_archive(tmp_path)))
        await snapshots.commit(box, image, {})
    finally:
        await provider.close(box)
    try:
        yield Bench(provider, image, run_id)
        assert await provider.list({"nemo_gym.run": run_id}) == []
    finally:
        await provider.reap({"nemo_gym.run": run_id})
        await snapshots.remove_image(image)
        await provider.aclose()
