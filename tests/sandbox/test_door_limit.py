"""A door that forwards so many answers and no more, counted where the box cannot reach."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.doors import GENERATION_ROUTES, INFERENCE_ROUTES, DoorServer


@dataclass
class Model:
    """Answers with the status it is asked for, once it may."""

    url: str = ""
    asked: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.json() if request.can_read_body else {}
        if body.get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b": still thinking\n\n")
            await self.may_answer.wait()
            return response
        await self.may_answer.wait()
        return web.json_response({}, status=body.get("status", 200))


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    model = Model()
    model.may_answer.set()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", model.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield model
    await runner.cleanup()


@dataclass
class Box:
    url: str
    door: DoorServer
    http: aiohttp.ClientSession

    async def ask(self, path: str = "/v1/responses", method: str = "POST", **body: object) -> int:
        sent = json.dumps(body).encode() if method == "POST" else None
        async with self.http.request(method, self.url + path, data=sent) as reply:
            await reply.read()
            return reply.status


@asynccontextmanager
async def limited(model: Model, limit: int) -> AsyncIterator[Box]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    door = Door("model", 1, model.url, INFERENCE_ROUTES, counted=GENERATION_ROUTES, max_answers=limit)
    server = DoorServer(door, sock)
    await server.start()
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        yield Box(f"http://127.0.0.1:{sock.getsockname()[1]}", server, http)
    await server.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_answers_in_every_dialect_are_forwarded_up_to_the_limit(model: Model) -> None:
    async with limited(model, 3) as box:
        paths = ["/v1/responses", "/v1/messages", "/v1/chat/completions", "/v1/messages?beta=true", "/v1//responses"]
        assert [await box.ask(path) for path in paths] == [200, 200, 200, 403, 403]
        assert (box.door.statistics.turns, box.door.statistics.over_limit, model.asked) == (3, 2, 3)
        assert box.door.statistics.as_dict()["turns"] == 3


async def test_other_routes_and_failed_requests_are_no_turns(model: Model) -> None:
    async with limited(model, 1) as box:
        for status in (400, 429, 500):
            assert await box.ask(status=status) == status
        assert await box.ask("/v1/messages/count_tokens") == 200
        assert await box.ask("/v1/models", "GET") == 200
        seen = box.door.statistics
        assert (seen.turns, seen.answered, seen.failures_since_answer) == (0, 2, 2), "listing models is no answer"
        assert [await box.ask(), await box.ask()] == [200, 403]
        assert (seen.turns, seen.over_limit, seen.failures_since_answer) == (1, 1, 0)


async def test_requests_at_once_never_get_more_answers_than_the_limit(model: Model) -> None:
    model.may_answer.clear()
    async with limited(model, 3) as box:
        asking = [asyncio.create_task(box.ask()) for _ in range(8)]
        await until(lambda: model.asked == 3)
        model.may_answer.set()
        assert sorted(await asyncio.gather(*asking)) == [200] * 3 + [403] * 5
        assert model.asked == 3


async def test_request_that_waits_for_another_is_admitted_when_that_fails(model: Model) -> None:
    model.may_answer.clear()
    async with limited(model, 1) as box:
        failing = asyncio.create_task(box.ask(status=500))
        await until(lambda: model.asked == 1)
        waiting = asyncio.create_task(box.ask())
        model.may_answer.set()
        assert [await failing, await waiting, await box.ask()] == [500, 200, 403]


async def test_answer_that_the_box_hangs_up_on_is_a_turn(model: Model) -> None:
    model.may_answer.clear()
    async with limited(model, 1) as box:
        async with box.http.post(f"{box.url}/v1/responses", json={"stream": True}) as reply:
            await reply.content.readany()
        await until(lambda: box.door.statistics.turns == 1)
        assert await box.ask() == 403


@pytest.mark.parametrize("fields", [{"max_answers": 3}, {"max_answers": 0, "counted": GENERATION_ROUTES}])
async def test_limit_that_could_not_hold_is_refused(fields: dict[str, object]) -> None:
    with socket.socket() as sock, pytest.raises(ConfigError, match="max_answers"):
        DoorServer(Door("model", 1, "http://127.0.0.1:9", INFERENCE_ROUTES, **fields), sock)  # type: ignore[arg-type]
