"""Requests to a server that runs several times: one rollout, one replica; the next one where one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from nemo_gym.http import client as exchange_module
from nemo_gym.http.middleware import RolloutMiddleware
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.http.telemetry import (
    REPLICAS_HEADER,
    Chooser,
    current_replicas,
    decode_replicas,
    encode_replicas,
    replica_context,
)
from nemo_gym.rollout_correlation import rollout_context
from nemo_gym.server_utils import ServerClient, ServerUnreachableError, close_global_aiohttp_client


class Replica:
    """Answers with its number; notes the header that requests come with."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.told: list[str | None] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.told.append(request.headers.get(REPLICAS_HEADER))
        return web.json_response({"replica": self.number})


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "FIRST_BACKOFF_S", 0.002)


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        made = [Replica(number) for number in range(3)]
        for each in made:
            await each.start()
            stack.push_async_callback(each.stop)
        stack.push_async_callback(close_global_aiohttp_client)
        yield made


def client_of(replicas: list[Replica]) -> ServerClient:
    block = {"host": "127.0.0.1", "port": 1, "url": replicas[0].url, "urls": [each.url for each in replicas]}
    return ServerClient(global_config_dict={"math": {"resources_servers": {"math": block}}})


async def asked(client: ServerClient) -> int:
    reply = await client.post("math", "/x", json={})
    return int((await reply.json())["replica"])


async def test_rollout_stays_with_one_replica_and_rollouts_are_spread(replicas: list[Replica]) -> None:
    client, found = client_of(replicas), []
    for number in range(30):
        with rollout_context(f"r{number}"):
            first = await asked(client)
            assert {await asked(client) for _ in range(3)} == {first}
            # Another process finds the same one.
            assert await asked(client_of(replicas)) == first
        found.append(first)
    assert {*found} == {0, 1, 2}


async def test_replica_that_cannot_be_reached_is_left_out(replicas: list[Replica]) -> None:
    client = client_of(replicas)
    await replicas[1].stop()
    assert {await asked(client) for _ in range(12)} == {0, 2}


async def test_replica_of_a_rollout_is_not_replaced_when_it_is_gone(replicas: list[Replica]) -> None:
    client = client_of(replicas)
    await replicas[1].stop()
    with replica_context({"math": 1}), pytest.raises(ServerUnreachableError):
        await asked(client)


async def test_attempt_stays_where_its_first_request_was_answered(replicas: list[Replica]) -> None:
    peers, number = Peers(client_of(replicas)), []
    for _ in range(6):
        chosen: dict[str, int] = {}
        own = peers.of_attempt(chosen)
        first = (await own.post("math", "/seed_session", {})).json()["replica"]
        assert chosen == {"math": first}
        assert (await own.post("math", "/verify", {})).json()["replica"] == first
        assert replicas[first].told[-1] == f"math={first}"
        number.append(first)
    assert {*number} == {0, 1, 2}, "idle replicas take turns"


async def test_attempt_begins_elsewhere_and_does_not_move_when_a_replica_is_gone(replicas: list[Replica]) -> None:
    client = client_of(replicas)
    await replicas[0].stop()
    for _ in range(4):
        chosen: dict[str, int] = {}
        await Peers(client).of_attempt(chosen).post("math", "/seed_session", {})
        assert chosen["math"] in (1, 2)
    lost = Peers(client, connect_patience_s=0.01).of_attempt({"math": 0})
    with pytest.raises(PeerError) as caught:
        await lost.post("math", "/verify", {})
    assert caught.value.status == 0


async def test_attempt_goes_on_with_its_replica_when_that_comes_back(replicas: list[Replica]) -> None:
    port = int(replicas[2].url.rpartition(":")[2])
    await replicas[2].stop()
    own = Peers(client_of(replicas)).of_attempt({"math": 2})
    verifying = asyncio.create_task(own.post("math", "/verify", {}))
    await asyncio.sleep(0.1)
    await replicas[2].start(port)
    assert (await verifying).json() == {"replica": 2}


async def test_server_goes_on_with_the_replicas_that_its_caller_chose() -> None:
    seen = {}

    async def app(scope: object, receive: object, send: object) -> None:
        seen.update(current_replicas())

    headers = [(REPLICAS_HEADER.lower().encode(), b"math=2,policy%20model=0,bad,worse=x")]
    await RolloutMiddleware(app)({"type": "http", "path": "/run", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == {"math": 2, "policy model": 0}
    assert current_replicas() == {}


async def test_replica_that_is_not_configured_is_not_called(replicas: list[Replica]) -> None:
    with replica_context({"math": 7}):
        assert await asked(client_of(replicas)) in (0, 1, 2)


def test_header_survives_names_of_any_kind() -> None:
    replicas = {"math": 0, "a b=c,d": 12, "ä": 3}
    assert decode_replicas(encode_replicas(replicas)) == replicas


def test_busy_replica_is_asked_last() -> None:
    chooser, urls = Chooser(), ("a", "b")
    with chooser.busy("a"):
        assert [chooser.order(urls)[0] for _ in range(4)] == [1] * 4
        with chooser.busy("b"), chooser.busy("b"):
            assert [chooser.order(urls)[0] for _ in range(4)] == [0] * 4
    chooser.unreachable("b")
    assert [chooser.order(urls, key) for key in "xyz"] == [[0, 1]] * 3
