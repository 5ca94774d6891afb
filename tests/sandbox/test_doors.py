"""A door forwards what it allows, exactly and unbuffered, and nothing else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from nemo_gym.contract.errors import ConfigError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.doors import (
    INFERENCE_ROUTES,
    MCP_ROUTES,
    DoorServer,
    RouteMatcher,
    door_server,
    normalize_path,
)


def listener() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


class Target:
    """A real upstream that records what reaches it."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.handler is not None:
            return await self.handler(request)
        body = await request.read()
        self.requests.append(
            {"method": request.method, "path": request.raw_path, "headers": request.headers.copy(), "body": body}
        )
        return web.json_response({"sha": hashlib.sha256(body).hexdigest(), "size": len(body)})


@asynccontextmanager
async def serving(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    sock = listener()
    # As it came: what the door does to a compressed body would not be seen through a server that inflates it.
    server = web.Server(handler, handler_cancellation=True, auto_decompress=False)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def door_to(target: str, *, limits: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[str]:
    sock = listener()
    port = sock.getsockname()[1]
    door = Door(name="model", port=port, target=target, **{"allow": INFERENCE_ROUTES, **changes})
    server = DoorServer(door, sock, **(limits or {}))
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.aclose()


@pytest.fixture
async def target() -> AsyncIterator[tuple[Target, str]]:
    recorder = Target()
    async with serving(recorder.handle) as url:
        yield recorder, url


async def raw(url: str, data: bytes) -> bytes:
    """Send bytes exactly as given, and read until the peer closes or pauses."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    got = b""
    with suppress(TimeoutError):
        while piece := await asyncio.wait_for(reader.read(65536), 1.0):
            got += piece
            if b"\r\n\r\n" in got and got.endswith((b"}", b"0\r\n\r\n")):
                break
    writer.close()
    return got


async def test_allowed_route_is_forwarded_with_query_body_and_door_headers(target: tuple[Target, str]) -> None:
    recorder, url = target
    async with (
        door_to(url + "/sessions/abc", headers={"Authorization": "Bearer real", "X-Session": "s1"}) as door,
        aiohttp.ClientSession() as http,
    ):
        answer = await http.post(
            door + "/v1/messages?beta=true&x=%20",
            data=b"body",
            headers={
                "Authorization": "Bearer box",
                "X-Api-Key": "box-key",
                "Cookie": "a=b",
                "x-session": "forged",
                "Connection": "keep-alive, X-Hop",
                "X-Hop": "1",
                "X-Forwarded-For": "6.6.6.6",
                "Idempotency-Key": "k1",
                "anthropic-version": "2023-06-01",
                "Content-Type": "application/json",
            },
        )
        assert answer.status == 200
        assert (await answer.json())["size"] == 4
    (seen,) = recorder.requests
    assert (seen["method"], seen["path"]) == ("POST", "/sessions/abc/v1/messages?beta=true&x=%20")
    headers = seen["headers"]
    assert headers.getall("Authorization") == ["Bearer real"]
    assert headers.getall("X-Session") == ["s1"]
    assert headers["Idempotency-Key"] == "k1"
    assert headers["anthropic-version"] == "2023-06-01"
    assert headers["Content-Type"] == "application/json"
    assert headers["Host"] == url.removeprefix("http://")
    assert not {"X-Api-Key", "Cookie", "X-Hop", "X-Forwarded-For"} & set(headers)


SMUGGLED = [
    "/admin",
    "/v1/responses/../../admin",
    "/v1/responses/..%2f..%2fadmin",
    "/v1/%2e%2e/admin",
    "/v1/responses%2f..%2fadmin",
    "/v1/models/..%252fadmin",
    "/v1/models/..\\admin",
    "/v1/models/x%5c..%5cadmin",
    "/v1/models/%00",
    "/v1/models/a/b",
    "/v1/models/x%0d%0aGET",
    "//evil.example/v1/models/",
    "/v1/responses/x",
    "/v1",
    "/",
    "/..",
    "http://127.0.0.1:1/v1/models",
    "*",
]


@pytest.mark.parametrize("path", SMUGGLED)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_other_routes_get_403_and_never_reach_the_target(
    method: str, path: str, target: tuple[Target, str]
) -> None:
    recorder, url = target
    async with door_to(url) as door:
        got = await raw(door, f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
    assert recorder.requests == []
    status = got.split(b" ", 2)[1]
    assert status in (b"400", b"403"), got
    if status == b"403":
        problem = json.loads(got.split(b"\r\n\r\n", 1)[1])
        assert (problem["code"], problem["retryable"], problem["started"]) == ("door_route", False, "no")


@pytest.mark.parametrize(
    ("given", "reads_as"),
    [
        ("/v1//responses", "/v1/responses"),
        ("//v1/./responses/", "/v1/responses"),
        ("/a/%2E%2e/v1/models", "/v1/models"),
        ("/v1/models/org%3Aname", "/v1/models/org%3Aname"),
        ("/v1/models/ü", "/v1/models/ü"),
        ("/a%2Fb", None),
        ("/%2e%2e/x", None),
        ("x", None),
        ("/a b", None),
        ("/a%7f", None),
    ],
)
def test_normalize_path_gives_one_reading_or_none(given: str, reads_as: str | None) -> None:
    assert normalize_path(given) == reads_as


def test_route_matcher_knows_stars_and_rests() -> None:
    routes = RouteMatcher(["GET /a/*/c", "POST /rest/**", "GET /"])
    assert routes.allows("GET", "/a/b/c")
    assert routes.allows("POST", "/rest/x/y")
    assert routes.allows("GET", "/")
    assert not routes.allows("GET", "/a/b/b/c")
    assert not routes.allows("POST", "/a/b/c")
    assert not routes.allows("POST", "/restx")
    assert not routes.allows("GET", "/a//c")
    assert RouteMatcher(MCP_ROUTES).allows("DELETE", "/mcp")
    for bad in ("/v1", "GET v1", "GET /**/x", ""):
        with pytest.raises(ConfigError, match="allow pattern"):
            RouteMatcher([bad])


async def test_events_arrive_one_by_one_before_the_stream_ends(target: tuple[Target, str]) -> None:
    recorder, url = target

    async def events(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        await recorder.go_on.wait()
        await response.write(b"data: two\n\n")
        return response

    recorder.handler = events
    async with door_to(url) as door, aiohttp.ClientSession() as http:
        async with http.post(door + "/v1/responses", json={}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert await asyncio.wait_for(answer.content.readany(), 10) == b"data: one\n\n"
            recorder.go_on.set()
            assert await asyncio.wait_for(answer.content.read(), 10) == b"data: two\n\n"


async def test_request_body_streams_through_before_it_is_complete(target: tuple[Target, str]) -> None:
    recorder, url = target
    first_seen = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        first = await request.content.readany()
        first_seen.set()
        return web.Response(body=first + await request.read())

    recorder.handler = handler

    async def body() -> AsyncIterator[bytes]:
        yield b"first,"
        await asyncio.wait_for(first_seen.wait(), 10)
        yield b"second"

    async with door_to(url) as door, aiohttp.ClientSession() as http:
        answer = await http.post(door + "/v1/responses", data=body())
        assert await answer.read() == b"first,second"


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_pass_unchanged_both_ways(chunked: bool, target: tuple[Target, str]) -> None:
    recorder, url = target
    payload = os.urandom(5_000_000)

    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        data = await request.content.read()
        assert ("Content-Length" in request.headers) != chunked
        return web.Response(body=data)

    recorder.handler = echo

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(payload), 100_000):
            yield payload[start : start + 100_000]

    async with door_to(url) as door, aiohttp.ClientSession() as http:
        answer = await http.post(door + "/v1/responses", data=pieces() if chunked else payload)
        assert await answer.read() == payload


async def test_box_that_hangs_up_cancels_the_call_behind_the_door(target: tuple[Target, str]) -> None:
    recorder, url = target
    started = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            recorder.cancelled.set()
            raise
        return web.Response()

    recorder.handler = slow
    async with door_to(url) as door, aiohttp.ClientSession() as http:
        call = asyncio.ensure_future(http.post(door + "/v1/responses", json={}))
        await asyncio.wait_for(started.wait(), 10)
        call.cancel()
        await asyncio.wait_for(recorder.cancelled.wait(), 10)


async def test_box_sees_a_broken_body_when_the_target_breaks_off(target: tuple[Target, str]) -> None:
    recorder, url = target

    async def breaks(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response

    recorder.handler = breaks
    async with door_to(url) as door, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            answer = await http.post(door + "/v1/responses", json={})
            await answer.read()


async def test_502_says_whether_the_request_started_when_the_target_is_gone() -> None:
    closed = listener()
    unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    async with door_to(unreachable) as door, aiohttp.ClientSession() as http:
        answer = await http.post(door + "/v1/responses", json={})
        problem = await answer.json(content_type="application/problem+json")
        assert (answer.status, problem["code"], problem["started"]) == (502, "door_unreachable", "no")
        assert problem["retryable"] is True
        assert unreachable not in problem["detail"]
    closed.close()

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    async with door_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as door:
        async with aiohttp.ClientSession() as http:
            answer = await http.post(door + "/v1/responses", json={})
            problem = await answer.json(content_type="application/problem+json")
            assert (answer.status, problem["code"], problem["started"]) == (502, "door_failed", "unknown")
    server.close()


async def test_connection_is_kept_and_reused_on_both_sides(target: tuple[Target, str]) -> None:
    recorder, url = target
    peers: set[Any] = set()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=await request.read())

    recorder.handler = handler
    async with door_to(url) as door, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        for _ in range(20):
            answer = await http.post(door + "/v1/responses", data=b"x")
            assert await answer.read() == b"x"
        (connection,) = http.connector._conns.values()  # type: ignore[union-attr]
        assert len(connection) == 1
    assert len(peers) == 1


async def test_expect_continue_is_answered_by_the_door(target: tuple[Target, str]) -> None:
    recorder, url = target
    async with door_to(url) as door:
        host, port = door.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        writer.write(head.encode())
        assert b"100 Continue" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.write(b"abc")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.close()
    assert recorder.requests[0]["body"] == b"abc"
    assert "Expect" not in recorder.requests[0]["headers"]


@pytest.mark.parametrize("status", [204, 304, 404, 429, 500])
async def test_status_and_headers_of_the_answer_pass_without_cookies(status: int, target: tuple[Target, str]) -> None:
    recorder, url = target

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, headers={"Retry-After": "7", "Set-Cookie": "a=b", "X-Request-Id": "r"})

    recorder.handler = handler
    async with door_to(url) as door, aiohttp.ClientSession() as http:
        for _ in range(2):
            answer = await http.post(door + "/v1/responses", json={})
            await answer.read()
            assert answer.status == status
            assert (answer.headers["Retry-After"], answer.headers["X-Request-Id"]) == ("7", "r")
            assert "Set-Cookie" not in answer.headers


async def test_compressed_answer_passes_as_it_is(target: tuple[Target, str]) -> None:
    recorder, url = target

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.Response(text="x" * 10_000)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    recorder.handler = handler
    async with door_to(url) as door, aiohttp.ClientSession() as http:
        answer = await http.post(door + "/v1/responses", json={})
        assert answer.headers["Content-Encoding"] == "gzip"
        assert await answer.text() == "x" * 10_000


@pytest.mark.parametrize("chunked", [False, True])
async def test_compressed_request_reaches_the_target_byte_for_byte(chunked: bool, target: tuple[Target, str]) -> None:
    recorder, url = target
    bomb = gzip.compress(bytes(32 * 1024 * 1024))

    async def pieces() -> AsyncIterator[bytes]:
        yield bomb[:1000]
        yield bomb[1000:]

    async with door_to(url) as door, aiohttp.ClientSession() as http:
        answer = await http.post(
            door + "/v1/responses", data=pieces() if chunked else bomb, headers={"Content-Encoding": "gzip"}
        )
        assert (await answer.json())["size"] == len(bomb)
    (seen,) = recorder.requests
    assert seen["body"] == bomb
    assert seen["headers"]["Content-Encoding"] == "gzip"
    assert seen["headers"].get("Content-Length") == (None if chunked else str(len(bomb)))


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_gets_413_and_is_no_request_of_the_target(
    chunked: bool, target: tuple[Target, str]
) -> None:
    recorder, url = target

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield bytes(100)

    async with door_to(url, limits={"max_body_bytes": 1000}) as door, aiohttp.ClientSession() as http:
        answer = await http.post(door + "/v1/responses", data=pieces() if chunked else bytes(1100))
        assert (answer.status, (await answer.json())["code"]) == (413, "door_body")
        answer = await http.post(door + "/v1/responses", data=bytes(1000))
        assert answer.status == 200
    assert [len(seen["body"]) for seen in recorder.requests] == [1000]


HALF_SENT = {
    "nothing": b"",
    "head": b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "body": b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345",
    "chunk": b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n123",
}


@pytest.mark.parametrize("sent", HALF_SENT.values(), ids=HALF_SENT)
async def test_request_that_stays_half_sent_loses_its_connection(sent: bytes, target: tuple[Target, str]) -> None:
    recorder, url = target
    async with door_to(url, limits={"patience_s": 0.2}) as door:
        host, port = door.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        async with aiohttp.ClientSession() as http:
            assert (await http.post(door + "/v1/responses", data=b"whole")).status == 200
    if b"\r\n\r\n" in sent:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"door_slow"' in answer
    else:
        assert answer == b""
    assert [seen["body"] for seen in recorder.requests] == [b"whole"]


async def test_body_that_drips_in_is_given_up_although_it_never_pauses_for_long(target: tuple[Target, str]) -> None:
    recorder, url = target
    async with door_to(url, limits={"patience_s": 0.4}) as door:
        host, port = door.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")

        async def drip() -> None:
            with suppress(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)  # the drip itself

        dripping = asyncio.create_task(drip())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        writer.close()
    assert recorder.requests == []


async def test_head_with_too_many_or_too_long_lines_gets_400(target: tuple[Target, str]) -> None:
    recorder, url = target
    async with door_to(url) as door:
        many = b"".join(b"X-%d: 1\r\n" % number for number in range(1000))
        for lines in (many, b"X-Long: " + b"a" * 100_000 + b"\r\n"):
            answer = await raw(door, b"POST /v1/responses HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
            assert answer.partition(b"\r\n")[0] == b"HTTP/1.0 400 Bad Request"
    assert recorder.requests == []


async def test_connections_beyond_the_limit_are_closed_and_the_door_serves_on(target: tuple[Target, str]) -> None:
    _, url = target
    async with door_to(url, limits={"max_connections": 3}) as door:
        host, port = door.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for reader, writer in held:
            # Answered, so accepted: the fourth is one too many, whatever the order they are accepted in.
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        for _, writer in held:
            writer.close()
        async with aiohttp.ClientSession() as http:
            while True:
                with suppress(aiohttp.ClientError):
                    assert (await http.get(door + "/v1/models")).status == 200
                    break


async def test_200_requests_at_once_all_pass(target: tuple[Target, str]) -> None:
    _, url = target
    async with door_to(url) as door, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(n: int) -> int:
            async with http.post(door + "/v1/responses", data=b"x" * n) as answer:
                return int((await answer.json())["size"])

        assert await asyncio.gather(*(one(n) for n in range(200))) == list(range(200))


async def test_aclose_ends_calls_in_flight_and_frees_the_port(target: tuple[Target, str]) -> None:
    recorder, url = target
    started = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(3600)
        return web.Response()

    recorder.handler = slow
    sock = listener()
    port = sock.getsockname()[1]
    server = DoorServer(Door("model", port, url, INFERENCE_ROUTES), sock)
    await server.start()
    async with aiohttp.ClientSession() as http:
        call = asyncio.ensure_future(http.post(f"http://127.0.0.1:{port}/v1/responses", json={}))
        await asyncio.wait_for(started.wait(), 10)
        await asyncio.wait_for(server.aclose(), 10)
        await server.aclose()
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(call, 10)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


def test_repr_of_a_door_hides_its_headers() -> None:
    assert "secret" not in repr(Door("m", 1, "http://x", (), headers={"Authorization": "secret"}))


@pytest.mark.parametrize(
    "door",
    [
        Door("model", 1, "http://127.0.0.1:9", INFERENCE_ROUTES),
        Door("egress", 1, "", ("pypi.org",), kind="proxy"),
    ],
    ids=["forward", "proxy"],
)
async def test_start_that_is_cancelled_at_any_moment_leaves_no_listener(door: Door) -> None:
    cancelled = 0
    for steps in range(12):
        sock = listener()
        address, descriptor = sock.getsockname(), sock.fileno()
        server = door_server(door, sock)
        starting = asyncio.create_task(server.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled():
            await server.aclose()
        elif steps:  # before its first step it is not even begun, and the socket still the caller's
            cancelled += 1
        else:
            sock.close()
        assert not asyncio.get_running_loop().remove_reader(descriptor), "the loop still listens"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
    assert cancelled
