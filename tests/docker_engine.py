"""A real Docker Engine for tests: one that already runs, or the private one that ``scripts/dockerd`` starts.

A conftest takes the fixture by importing it: ``from tests.docker_engine import docker_engine``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "dockerd"


def start_engine() -> str:
    """Return the URL of a running engine. Fail the test with the script's stderr if none runs or can be started."""
    done = subprocess.run([str(SCRIPT), "start"], capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        pytest.fail(f"these tests need a Docker Engine, and scripts/dockerd start says: {done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1].removeprefix("DOCKER_HOST=")


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The URL of a Docker Engine; also in ``DOCKER_HOST`` while tests run."""
    url = start_engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", url)
        yield url
