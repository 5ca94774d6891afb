"""A remote provider over several brokers of one name, each with boxes of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nemo_gym.config.launch import ServerLaunch, set_current_launch
from nemo_gym.contract.credentials import Role
from nemo_gym.contract.errors import SandboxError
from nemo_gym.contract.sandbox import SandboxSpec
from nemo_gym.sandbox.providers.remote import RemoteProvider
from nemo_gym.sandbox.providers.remote.connection import box_of
from resources_servers.sandbox.tests.broker_process import INSTANCE, BrokerProcess


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    made: list[BrokerProcess] = []
    try:
        for number in range(2):
            directory: Path = tmp_path_factory.mktemp(f"broker{number}")
            backend = {"local": {"state_dir": str(directory / "boxes"), "linger_s": 1}}
            broker = BrokerProcess(directory / "broker", backend, on_stop="destroy")
            broker.keys = made[0].keys if made else broker.keys
            made.append(broker)
            broker.start()
        yield made
    finally:
        for broker in made:
            broker.close()


@pytest.fixture
async def remote(brokers: list[BrokerProcess]) -> AsyncIterator[RemoteProvider]:
    block = {"url": brokers[0].url, "urls": [broker.url for broker in brokers]}
    config = {INSTANCE: {"resources_servers": {"sandbox": block}}}
    credentials = brokers[0].keys.for_server("agent", Role.AGENT, [INSTANCE])
    set_current_launch(ServerLaunch("agent", config, credentials=credentials))
    provider = RemoteProvider(server=INSTANCE, patience_s=20)
    yield provider
    set_current_launch(None)
    await provider.aclose()


async def test_boxes_are_spread_and_are_found_wherever_they_are(
    remote: RemoteProvider, brokers: list[BrokerProcess]
) -> None:
    label = {"x.test": "spread"}
    handles = [await remote.create(SandboxSpec(ttl_s=300, metadata=label)) for _ in range(4)]
    assert {box_of(handle).broker_url for handle in handles} == {broker.url for broker in brokers}
    for number, handle in enumerate(handles):
        assert (await remote.exec(handle, f"echo {number}")).stdout == f"{number}\n"
    assert {info.sandbox_id for info in await remote.list(label)} == {handle.sandbox_id for handle in handles}
    for handle in handles:
        borrowed = await remote.connect(await remote.serialize_handle(handle, scope="operate"))
        assert (await remote.exec(borrowed, "echo lent")).stdout == "lent\n"
    assert {*await remote.reap(label)} == {handle.sandbox_id for handle in handles}
    assert await remote.list(label) == []


async def test_same_key_finds_the_same_box(remote: RemoteProvider) -> None:
    specs = [SandboxSpec(ttl_s=300, idempotency_key=f"key-{number}") for number in range(4)]
    first = [await remote.create(spec) for spec in specs]
    again = [await remote.create(spec) for spec in specs]
    assert [box.sandbox_id for box in again] == [box.sandbox_id for box in first]
    for handle in first:
        await remote.close(handle)


async def test_lease_goes_to_no_broker_that_is_not_configured(remote: RemoteProvider) -> None:
    handle = await remote.create(SandboxSpec(ttl_s=300))
    lent = {**await remote.serialize_handle(handle, scope="operate"), "broker_url": "http://127.0.0.1:9"}
    with pytest.raises(SandboxError, match="not one of those configured"):
        await remote.connect(lent)
    await remote.close(handle)


async def test_box_is_made_elsewhere_when_a_broker_is_gone(
    remote: RemoteProvider, brokers: list[BrokerProcess]
) -> None:
    """Last of this file: the broker stays stopped."""
    brokers[0].close()
    for _ in range(3):
        handle = await remote.create(SandboxSpec(ttl_s=300))
        assert box_of(handle).broker_url == brokers[1].url
        await remote.close(handle)
    assert await remote.image_labels("no-such-image") is None, "the one that can be asked has none"
