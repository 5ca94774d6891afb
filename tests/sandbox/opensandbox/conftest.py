"""Servers for the tests of the opensandbox provider."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.docker_engine import docker_engine
from tests.sandbox.opensandbox.server import API_KEY, Server, opensandbox_server

__all__ = ["docker_engine"]


@pytest.fixture(scope="session")
def real_server(docker_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real ``opensandbox-server``."""
    with opensandbox_server(tmp_path_factory.mktemp("opensandbox"), docker_engine) as server:
        yield server


@pytest.fixture(scope="session")
def double_server() -> Iterator[str]:
    """The URL of the double over local boxes, in a process of its own."""
    argv = [sys.executable, "-m", "nemo_gym.sandbox.testing.opensandbox", "--api-key", API_KEY]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
