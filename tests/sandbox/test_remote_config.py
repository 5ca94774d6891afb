"""Where the remote provider finds its broker, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from nemo_gym.config.launch import ServerLaunch, set_current_launch
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
from nemo_gym.contract.errors import ConfigError, InvalidBodyError, SandboxError
from nemo_gym.contract.sandbox import NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import SandboxCapabilities, SandboxHandle
from nemo_gym.sandbox.facade import create_provider
from nemo_gym.sandbox.providers.remote import RemoteProvider
from nemo_gym.sandbox.providers.remote.connection import Broker, BrokerConnection, RemoteOptions, encode, find_brokers
from nemo_gym.sandbox.wire.models import CreateSandbox

PLACE = {"resources_servers": {"sandbox": {"host": "127.0.0.1", "port": 4711, "url": "http://127.0.0.1:4711"}}}


def find_broker(options: RemoteOptions) -> Broker:
    brokers = find_brokers(options)
    assert brokers is not None
    (broker,) = brokers.all
    return broker


@pytest.fixture
def launched() -> Iterator[StackKeys]:
    """This process as a server of a stack that has a broker."""
    keys = StackKeys.generate()
    credentials = keys.for_server("agent", Role.AGENT, ["sandbox_broker"])
    set_current_launch(ServerLaunch("agent", {"sandbox_broker": PLACE}, credentials=credentials))
    yield keys
    set_current_launch(None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"urll": "http://x"}, "url"),
        ({"url": "broker:80"}, "http"),
        ({"url": "ftp://broker"}, "http"),
        ({"url": "http://b", "server": "sandbox_broker"}, "not both"),
        ({"server": {}}, "server"),
        ({"patience_s": 0}, "patience_s"),
        ({"request_timeout_s": "soon"}, "request_timeout_s"),
    ],
)
def test_wrong_setting_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_provider({"remote": settings})


@pytest.mark.parametrize("server", ["sandbox_broker", {"type": "resources_servers", "name": "sandbox_broker"}])
def test_broker_of_the_stack_is_found_with_the_credential_for_it(server: Any, launched: StackKeys) -> None:
    broker = find_broker(RemoteOptions(server=server))
    assert broker.url == "http://127.0.0.1:4711"
    assert broker.headers == {CREDENTIAL_HEADER: launched.caller(Role.AGENT, "agent", "sandbox_broker")}
    assert launched.caller(Role.AGENT, "agent", "sandbox_broker") not in repr(broker)


def test_unknown_broker_of_the_stack_is_refused_with_the_nearest_name(launched: StackKeys) -> None:
    with pytest.raises(ConfigError, match="sandbox_broker"):
        find_broker(RemoteOptions(server="sandbox_brokr"))


def test_token_goes_to_the_configured_broker_and_is_not_shown() -> None:
    options = RemoteOptions(url="http://broker:80/", token="of-the-caller")
    broker = find_broker(options)
    assert (broker.url, broker.headers) == ("http://broker:80", {"Authorization": "Bearer of-the-caller"})
    assert "of-the-caller" not in repr(broker) + repr(options)


async def test_provider_without_a_broker_can_only_borrow() -> None:
    provider = RemoteProvider()
    for asked in (provider.create(SandboxSpec()), provider.list(), provider.image_labels("x")):
        with pytest.raises(ConfigError, match="'url' or 'server'"):
            await asked
    with pytest.raises(SandboxError, match="not a handle of the remote provider"):
        await provider.status(SandboxHandle("x", "local", None))
    await provider.aclose()


def test_text_that_has_no_json_form_is_refused_by_name() -> None:
    for spec in (SandboxSpec(files={"/f": "\udcff"}), SandboxSpec(provider_options={"o": object()})):
        with pytest.raises(InvalidBodyError, match="CreateSandbox"):
            encode(CreateSandbox.of(spec))


@pytest.mark.parametrize(
    "changes", [{"ttl_s": 0}, {"ttl_s": float("inf")}, {"metadata": {str(n): "" for n in range(99)}}]
)
async def test_absurd_box_is_refused_before_it_is_asked_for(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = RemoteProvider(url="http://127.0.0.1:9", patience_s=0.1)
    monkeypatch.setattr(provider._configured(), "abilities", SandboxCapabilities(frozenset(NetworkPolicy)))
    with pytest.raises(InvalidBodyError, match=next(iter(changes)).replace("metadata", "labels")):
        await provider.create(SandboxSpec(**changes))
    await provider.aclose()


def test_connections_to_a_broker_are_closed_with_the_loop_that_made_them() -> None:
    async def use() -> list[aiohttp.ClientSession]:
        connection = BrokerConnection(request_timeout_s=1, patience_s=1)
        return [connection._session(fresh=fresh) for fresh in (False, True)]

    assert all(session.closed for session in asyncio.run(use()))
