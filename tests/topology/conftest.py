"""A local provider with an image that holds a small git repository."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.local import LocalProvider

IMAGE = "world"
COMMANDS = """
set -e
mkdir -p /repo && cd /repo
printf 'one\\n' > kept.txt
printf 'gone\\n' > dropped.txt
git init -q -b main . && git add -A
git -c user.name=t -c user.email=t@example.invalid commit -q -m first
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    local = LocalProvider(state_dir=str(tmp_path / "state"), image_dir=str(tmp_path / "images"))
    box = await local.create(SandboxSpec(image="host"))
    made = await local.exec(box, COMMANDS)
    assert made.ok, made.stderr
    await local.commit(box, IMAGE, {})
    await local.close(box)
    yield local
    await local.aclose()
