"""Servers for the tests of the opensandbox provider."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docker_engine import docker_engine
from tests.sandbox.opensandbox.double import double_server
from tests.sandbox.opensandbox.server import Server, opensandbox_server

__all__ = ["docker_engine"]


@pytest.fixture(scope="session")
def real_server(docker_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real ``opensandbox-server``."""
    with opensandbox_server(tmp_path_factory.mktemp("opensandbox"), docker_engine) as server:
        yield server


@pytest.fixture(scope="session")
def double_url() -> Iterator[str]:
    """The URL of the double of a server, in a process of its own."""
    with double_server() as url:
        yield url
