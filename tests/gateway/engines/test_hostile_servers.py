"""Servers that frame their answers wrongly, early, endlessly or twice: each call gets its own answer or an error."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines import (
    EngineAnswerError,
    EngineAnswerTooLargeError,
    EngineConnections,
    EngineEndpoint,
    EngineFailedError,
    EngineLostError,
    EngineRefusedError,
    EngineUnreachableError,
    HttpEngine,
    Sampling,
    SglangEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.http.client import RequestHeads
from tests.gateway.engines.test_connections import JSON, WHOLE, certificate, post_json, serving
from tests.gateway.engines.test_long_bodies import BODY, HEAD

__all__ = ["certificate"]  # a fixture

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        JSON + b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n" + b'{"a":1}',
        JSON + b"Content-Length: 7\r\nContent-Length: 8\r\n\r\n" + b'{"a":1}',
        JSON + b"Content-Length: +7\r\n\r\n" + b'{"a":1}',
        JSON + b"Content-Length: 0x7\r\n\r\n" + b'{"a":1}',
        JSON + b"Content-Length: 99999999999999999999999\r\n\r\n" + b'{"a":1}',
        CHUNKED + b'\r\n-1\r\n{"a":1}\r\n0\r\n\r\n',
        CHUNKED + b'\r\n7\r\n{"a":1}X0\r\n\r\n',
        b"HTTP/1.1 099 Odd\r\nContent-Length: 5\r\n\r\nevil," + WHOLE + b'{"a":1}',
        b"HTTP/1.1 000 Odd\r\n\r\n" + WHOLE + b'{"a":1}',
    ],
)
async def test_answer_whose_end_is_in_doubt_is_none(answer: bytes, http: EngineConnections) -> None:
    async with serving(answer) as server:
        with pytest.raises(EngineAnswerError):
            await server.engine(http).post("/", {})
        assert len(server.requests) == 1


async def test_bytes_of_an_interim_answer_are_not_the_answers(http: EngineConnections) -> None:
    interim = b"HTTP/1.1 199 Odd\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n\r\nevil,"
    async with serving(interim + WHOLE + b'{"a":1}') as server:
        for _ in range(2):
            assert await post_json(server.engine(http), "/", {}) == {"a": 1}


@pytest.mark.parametrize("status", [204, 304])
async def test_status_without_a_body_leaves_the_connection_fit(status: int, http: EngineConnections) -> None:
    async with serving(b"HTTP/1.1 %d Nothing\r\nContent-Length: 7\r\n\r\n" % status) as server:
        for _ in range(3):
            with pytest.raises(EngineAnswerError, match=str(status)):
                await server.engine(http).post("/", {})
        assert (server.connections, len(server.requests)) == (1, 3)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_redirect_is_followed_nowhere(status: int, http: EngineConnections) -> None:
    async with serving(b"HTTP/1.1 %d Go\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n" % status) as server:
        with pytest.raises(EngineAnswerError, match="base URL"):
            await server.engine(http, api_key="sk-1").post("/", {})
        assert len(server.requests) == 1


async def test_chunked_answer_that_breaks_off_is_lost_however_the_word_is_written(http: EngineConnections) -> None:
    async def cut_off(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b'Transfer-Encoding: Chunked\r\n\r\n7\r\n{"a":1}\r\n')
        writer.close()

    async with serving(cut_off) as server:
        with pytest.raises(EngineLostError):
            await server.engine(http).post("/", {})


async def test_trailers_change_nothing_of_how_the_body_is_read(http: EngineConnections) -> None:
    trailers = b"Content-Encoding: gzip\r\nContent-Type: text/html\r\n"
    async with serving(CHUNKED + b'\r\n7\r\n{"a":1}\r\n0\r\n' + trailers + b"\r\n") as server:
        for _ in range(2):
            raw, headers = await server.engine(http).post("/", {})
            assert raw == b'{"a":1}' and headers["content-type"] == "application/json"
        assert server.connections == 1


async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> asyncio.Server:
    return await asyncio.start_server(serve, "127.0.0.1", 0)


def _engine(server: asyncio.Server, http: EngineConnections) -> HttpEngine:
    port = server.sockets[0].getsockname()[1]
    return HttpEngine(EngineEndpoint("e0", f"http://127.0.0.1:{port}", request_timeout_s=30.0), http)


async def test_connection_is_not_used_again_when_the_answer_came_before_all_was_sent(http: EngineConnections) -> None:
    """The next request would be taken for the rest of this one."""
    connections = 0
    refused = asyncio.Event()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await refused.wait()
        writer.transport.abort()

    async with await _listening(early) as server:
        for _ in range(2):
            with pytest.raises(EngineRefusedError, match="big"):
                await _engine(server, http).post("/", {"x": "y" * (64 << 20)})
        assert connections == 2
        refused.set()
        await asyncio.sleep(0)  # both connections are aborted


async def test_call_is_lost_at_once_when_the_server_ends_while_it_is_still_sent(http: EngineConnections) -> None:
    """It reads no more, so what is left to send would never leave."""
    held = asyncio.Event()

    async def half_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        await held.wait()
        writer.close()

    async with await _listening(half_closed) as server:
        async with asyncio.timeout(10):
            with pytest.raises(EngineLostError):
                await _engine(server, http).post("/", {"x": "y" * (64 << 20)})
        held.set()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("framing", [b"\r\n", b"Content-Length: 99999999999\r\n\r\n"])
async def test_endless_body_is_given_up(
    framing: bytes, status: int, http: EngineConnections, eventually: Eventually
) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(JSON.replace(b"200", b"%d" % status) + framing)
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
            sent += 65536

    async with serving(endless) as server:
        expected = EngineAnswerTooLargeError if status == 200 else EngineFailedError
        with pytest.raises(expected, match="more than 1048576 bytes"):
            await server.engine(http, max_answer_bytes=1 << 20).post("/", {})
        await eventually(lambda: server.open == 0)
    assert sent < 64 << 20


async def test_answer_is_given_up_that_is_longer_than_the_tokens_that_were_asked_for(http: EngineConnections) -> None:
    size = 10 << 20

    async def long(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE.replace(b"7", b"%d" % size) + b" " * (size - 7) + b'{"a":1}')

    async with serving(long) as server:
        with pytest.raises(EngineAnswerTooLargeError, match="4096 bytes per requested token"):
            await post_json(server.engine(http), "/", {}, max_tokens=1000)
        assert await post_json(server.engine(http), "/", {}, max_tokens=10_000) == {"a": 1}
        assert await post_json(server.engine(http), "/", {}) == {"a": 1}


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_endless_stream_is_given_up(
    kind: type[VllmEngine | SglangEngine], http: EngineConnections, eventually: Eventually
) -> None:
    event = b'{"choices":[]}' if kind is VllmEngine else b'{"meta_info":{"completion_tokens":0}}'

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b"\r\n")
        while True:
            writer.write(b"data: " + event + b"\n\n: still here\n\n" * 2000)
            await writer.drain()

    async with serving(endless) as server:
        engine = kind(EngineEndpoint("e0", f"http://localhost:{server.port}"), http)
        with pytest.raises(EngineAnswerTooLargeError, match="stream"):
            async for _ in engine.stream(TokenRequest("r-1", [5, 6], Sampling(100))):
                pass
        await eventually(lambda: server.open == 0)


async def test_endless_event_is_given_up(http: EngineConnections, eventually: Eventually) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b"\r\ndata: ")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()

    async with serving(endless) as server:
        with pytest.raises(EngineAnswerError, match="event"):
            async for _ in server.engine(http, max_answer_bytes=1 << 20).post_events("/", {}, max_tokens=1 << 20):
                pass
        await eventually(lambda: server.open == 0)


async def test_own_slowness_is_not_the_engines_silence(http: EngineConnections) -> None:
    size = 32 << 20

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"x" * (1 << 16))
            await writer.drain()

    async with serving(flood) as server:
        stream = server.engine(http, idle_timeout_s=0.5).post_stream("/", {}, max_tokens=1 << 20)
        read = len(await anext(stream))
        await asyncio.sleep(1.2)
        async for chunk in stream:
            read += len(chunk)
    assert read == size


async def test_calls_that_connect_while_the_connections_are_closed_are_not_begun() -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += len(await reader.read()) > 0
        writer.close()

    async with await _listening(serve) as server:
        async with EngineConnections() as http:
            calls = [asyncio.create_task(_engine(server, http).post("/", {})) for _ in range(8)]
            for _ in range(3):
                await asyncio.sleep(0)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(one, EngineLostError | EngineUnreachableError) for one in results), results
        assert asked == 0


async def test_long_bodies_behind_tls_are_whole_and_their_connection_used_again(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    answers = iter([HEAD + BODY, WHOLE + b'{"a":1}'] * 3)

    async def next_one(writer: asyncio.StreamWriter) -> None:
        answer = next(answers)
        for start in range(0, len(answer), 300_001):
            writer.write(answer[start : start + 300_001])
            await writer.drain()
            await asyncio.sleep(0.005)

    async with serving(next_one, tls=context) as server, EngineConnections() as http:
        for _ in range(3):
            assert (await server.engine(http).post("/", {}))[0] == BODY
            assert await post_json(server.engine(http), "/", {}) == {"a": 1}
        assert server.connections == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "0"},
        {"transfer-encoding": "chunked"},
        {"Expect": "100-continue"},
        {"X Y": "1"},
        {"X: 1\r\nY": "1"},
        {"": "1"},
        {"X-A": "a\x0bb"},
        {"X-A": "\ud800"},
    ],
)
def test_header_that_would_break_the_request_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="header"):
        RequestHeads("http://localhost", headers)


def test_key_that_is_no_text_is_refused_without_being_told() -> None:
    for key in ("sk-secret\r\nX: y", "sk-secret\udcff"):
        with pytest.raises(ConfigError, match="Authorization") as caught:
            HttpEngine(EngineEndpoint("e0", "http://localhost", key), EngineConnections())
        assert "secret" not in str(caught.value)
