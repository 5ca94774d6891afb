"""Shared by the tests of the sandbox seam."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_gym.config import sandbox_blocks
from tests.docker_engine import docker_engine
from tests.sandbox.docker_boxes import box, boxes

__all__ = ["box", "boxes", "docker_engine"]


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten again."""
    monkeypatch.setattr(sandbox_blocks, "registered_providers", {})
    yield
