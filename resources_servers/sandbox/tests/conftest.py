"""Shared by the broker's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resources_servers.sandbox.tests.api import Api, calling
from resources_servers.sandbox.tests.broker_process import BrokerProcess
from tests.docker_engine import docker_engine

__all__ = ["docker_engine"]

StartBroker = Callable[..., BrokerProcess]
FailingBroker = tuple[BrokerProcess, Path]
KILLING_PROGRAM = str(Path(__file__).with_name("killing_broker.py"))


@pytest.fixture(scope="session")
def local_backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The local provider with a supervisor of these tests' own."""
    return {"local": {"state_dir": str(tmp_path_factory.mktemp("boxes")), "linger_s": 2}}


@pytest.fixture
def start_broker(tmp_path: Path, local_backend: dict[str, Any]) -> Iterator[StartBroker]:
    """Starts brokers, over the local provider unless another is given; they end with the test, boxes included."""
    started: list[BrokerProcess] = []

    def start(provider: dict[str, Any] | None = None, **settings: Any) -> BrokerProcess:
        state_dir = tmp_path / f"broker-{len(started)}"
        settings.setdefault("on_stop", "destroy")
        broker = BrokerProcess(state_dir, provider or local_backend, **settings)
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        broker.close()


@pytest.fixture
def failing_broker(start_broker: StartBroker, tmp_path: Path) -> FailingBroker:
    """A broker, and the file that says which call of its backend fails; see `killing_broker`."""
    fail = tmp_path / "fail"
    env = {"KILL_LOG": str(tmp_path / "boundaries"), "FAIL_FILE": str(fail)}
    return start_broker(program=(KILLING_PROGRAM,), env=env), fail


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, local_backend: dict[str, Any]) -> Iterator[BrokerProcess]:
    """One broker for all tests of a module that leave it as it is."""
    served = BrokerProcess(tmp_path_factory.mktemp("broker") / "state", local_backend, on_stop="destroy")
    try:
        served.start()
        yield served
    finally:
        served.close()


@pytest.fixture
async def api(broker: BrokerProcess) -> AsyncIterator[Api]:
    async with calling(broker) as caller:
        yield caller
