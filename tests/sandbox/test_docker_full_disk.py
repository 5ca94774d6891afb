from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.contract.errors import SandboxCreateError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.docker import DockerProvider

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dockerd"


@pytest.fixture
def small_engine() -> Iterator[str]:
    """An engine whose disk holds 64 MiB."""
    state = tempfile.mkdtemp(prefix="ngd")
    env = {**os.environ, "NEMO_GYM_DOCKER_DIR": state}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", state], check=True)
    try:
        subprocess.run([str(SCRIPT), "start", "--private"], env=env, check=True, timeout=120)
        yield f"unix://{state}/engine.sock"
    finally:
        subprocess.run([str(SCRIPT), "stop"], env=env, check=True, timeout=120)
        subprocess.run(["umount", "-l", state], check=True)
        shutil.rmtree(state)


@pytest.mark.full
async def test_docker_create_says_that_the_disk_is_full_and_leaves_nothing(small_engine: str) -> None:
    provider = DockerProvider(base_url=small_engine, watchdog=False)
    with pytest.raises(SandboxCreateError, match=r"disk is full while building the image 'host'; free space"):
        await provider.create(SandboxSpec())
    assert await provider.list() == []
    await provider.aclose()
