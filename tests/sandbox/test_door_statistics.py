"""A door knows, from outside of the box, whether its target served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from nemo_gym.contract.sandbox import Door
from nemo_gym.gateway.backend import SessionBusyError, SessionShare
from nemo_gym.gateway.dialects import Dialect
from nemo_gym.gateway.dialects.errors import error_body
from nemo_gym.sandbox.doors import INFERENCE_ROUTES, DoorServer

OVERFLOW = {"error": {"type": "invalid_request_error", "code": "context_length_exceeded", "message": "too long"}}


async def model(request: web.Request) -> web.StreamResponse:
    """Answers as the body asks it to."""
    asked = await request.json()
    if "status" in asked:
        return web.json_response({"error": {"message": "as asked"}}, status=asked["status"])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in asked["events"]:
        await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
    if asked.get("hang"):
        await asyncio.sleep(60)
    if asked.get("break"):
        assert request.transport is not None
        request.transport.abort()
    return response


@pytest.fixture
async def target() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/messages", model)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


class Asker:
    def __init__(self, url: str, server: DoorServer) -> None:
        self.url, self.seen = url, server.statistics

    async def ask(self, path: str = "/v1/messages", timeout_s: float = 20, **body: object) -> None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            try:
                async with http.post(self.url + path, json=body) as reply:
                    await reply.read()
            except (aiohttp.ClientError, TimeoutError):
                pass


async def opened(target: str) -> AsyncIterator[Asker]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = DoorServer(Door(name="model", port=1, target=target, allow=INFERENCE_ROUTES), sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await server.start()
    yield Asker(url, server)
    await server.aclose()


@pytest.fixture
async def door(target: str) -> AsyncIterator[Asker]:
    async for asker in opened(target):
        yield asker


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503, 529])
async def test_target_that_does_not_serve_is_failing_until_it_answers(door: Asker, status: int) -> None:
    await door.ask(status=status)
    await door.ask(status=status)
    assert (door.seen.failed, door.seen.failures_since_answer, door.seen.failing) == (2, 2, True)
    assert "as asked" in (door.seen.last_error or "")
    await door.ask(events=[{"type": "message_stop"}])
    assert (door.seen.answered, door.seen.failing) == (1, False)
    assert door.seen.statuses == {status: 2, 200: 1}


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_request_that_the_box_got_wrong_is_no_failure_of_the_target(door: Asker, status: int) -> None:
    await door.ask(status=status)
    assert (door.seen.refused, door.seen.failing) == (1, False)


@pytest.mark.parametrize(("sent", "failing"), [(b"{", False), (b"{}", True)], ids=["half a body", "all of it"])
async def test_408_is_the_doing_of_a_box_that_keeps_the_rest_of_its_body(sent: bytes, failing: bool) -> None:
    async def gives_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(sent)
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(gives_up, "127.0.0.1", 0) as server:
        async for door in opened(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"):
            host, port = door.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n" + sent)
            assert b" 408 " in await reader.readline()
            writer.close()
            assert (door.seen.statuses, door.seen.failing) == ({408: 1}, failing)


@pytest.mark.parametrize("dialect", Dialect)
async def test_429_for_the_calls_that_a_box_holds_open_is_no_failure_of_the_target(dialect: Dialect) -> None:
    share = SessionShare()
    with share.claimed(5, 8), pytest.raises(SessionBusyError) as busy, share.claimed(5, 8):
        pass
    app = web.Application()

    async def refuses(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    status, body = error_body(dialect, busy.value)
    app.router.add_post("/v1/messages", refuses)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async for door in opened(f"http://127.0.0.1:{runner.addresses[0][1]}"):
        await door.ask()
        assert (door.seen.statuses, door.seen.refused, door.seen.failing) == ({429: 1}, 1, False)
    await runner.cleanup()


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "error": {"type": "overloaded_error"}},
        {"type": "response.failed", "response": {}},
        {"error": {"message": "no engine"}},
    ],
)
async def test_stream_that_ends_in_an_error_is_a_failure(door: Asker, event: dict[str, object]) -> None:
    await door.ask(events=[{"type": "ping"}, event])
    await door.ask(events=[{"type": "ping"}, event, "[DONE]"])
    assert (door.seen.failed, door.seen.answered) == (2, 0)


async def test_stream_that_ends_for_its_context_is_refused(door: Asker) -> None:
    await door.ask(events=[OVERFLOW])
    assert (door.seen.refused, door.seen.failing) == (1, False)


async def test_words_about_errors_in_an_answer_are_an_answer(door: Asker) -> None:
    await door.ask(events=[{"choices": [{"delta": {"content": '"error": "response.failed"'}}], "error": None}])
    assert (door.seen.answered, door.seen.failing) == (1, False)


async def test_target_that_breaks_off_is_failing(door: Asker) -> None:
    await door.ask(events=[{"type": "ping"}], **{"break": True})
    assert (door.seen.broken, door.seen.failing) == (1, True)


async def test_box_that_hangs_up_has_abandoned_its_request(door: Asker) -> None:
    await door.ask(events=[{"type": "ping"}], hang=True, timeout_s=0.5)
    deadline = asyncio.get_running_loop().time() + 20
    while door.seen.open:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert (door.seen.abandoned, door.seen.failing) == (1, False)


async def test_route_outside_of_the_allow_list_is_not_forwarded(door: Asker) -> None:
    await door.ask("/v1/files")
    assert (door.seen.forbidden, door.seen.requests) == (1, 0)


async def test_target_that_is_not_there_is_unreachable() -> None:
    async for door in opened("http://127.0.0.1:9"):
        await door.ask(events=[])
        assert (door.seen.unreachable, door.seen.failing) == (1, True)
        assert "cannot be reached" in (door.seen.last_error or "")
