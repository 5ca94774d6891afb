"""What is behind a broker passes the same conformance suite as what is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox.conformance import SandboxConformance
from resources_servers.sandbox.tests.broker_process import BrokerProcess


def _serve(place: Path, backend: dict[str, Any]) -> Iterator[dict[str, Any]]:
    broker = BrokerProcess(place / "state", backend, on_stop="destroy")
    try:
        broker.start()
        yield broker.remote()
    finally:
        broker.close()


@pytest.fixture(scope="module")
def over_local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    place = tmp_path_factory.mktemp("broker")
    yield from _serve(place, {"local": {"state_dir": str(place / "boxes"), "linger_s": 3}})


@pytest.fixture(scope="module")
def over_docker(tmp_path_factory: pytest.TempPathFactory, docker_engine: str) -> Iterator[dict[str, Any]]:
    yield from _serve(tmp_path_factory.mktemp("broker"), {"docker": {"base_url": docker_engine}})


class TestBrokerOverLocal(SandboxConformance):
    @pytest.fixture
    def provider_config(self, over_local: dict[str, Any]) -> dict[str, Any]:
        return over_local

    @pytest.fixture
    def image(self) -> str | None:
        return None


@pytest.mark.full  # what crosses the wire is the same over any backend; the suite over Docker itself is not full
class TestBrokerOverDocker(SandboxConformance):
    @pytest.fixture
    def provider_config(self, over_docker: dict[str, Any]) -> dict[str, Any]:
        return over_docker

    @pytest.fixture
    def image(self) -> str | None:
        return None
