"""What an engine's end of a connection can do, and what becomes of the exchange on it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines import (
    EngineAnswerError,
    EngineConnections,
    EngineEndpoint,
    EngineFailedError,
    EngineLostError,
    EngineTimeoutError,
    EngineUnreachableError,
    HttpEngine,
)
from nemo_gym.http.client import RequestHeads
from nemo_gym.http.connections import NotConnectedError, Origin, Patience

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = JSON + b"Content-Length: 7\r\n\r\n"


class Server:
    """Answers each request with what ``script`` writes for it."""

    def __init__(self, script: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._script = script
        self.connections = 0
        self.open = 0
        self.requests: list[bytes] = []
        self.port = 0
        self.tls = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                await asyncio.wait(
                    {asyncio.ensure_future(self._script(writer)), asyncio.ensure_future(_gone(reader))},
                    return_when=asyncio.FIRST_COMPLETED,
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def engine(self, http: EngineConnections, **options: object) -> HttpEngine:
        scheme = "https" if self.tls else "http"
        url = f"{scheme}://localhost:{self.port}/base"
        return HttpEngine(EngineEndpoint("e0", url, **options), http)  # type: ignore[arg-type]


async def _gone(reader: asyncio.StreamReader) -> None:
    # A caller that leaves before it has read everything resets the connection, and a reader never ends then.
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110 - tells of its end only to who reads
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    script: Callable[[asyncio.StreamWriter], Awaitable[None]] | bytes, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """``script`` may be the answer itself."""

    async def say(writer: asyncio.StreamWriter) -> None:
        assert isinstance(script, bytes)
        writer.write(script)

    server = Server(say if isinstance(script, bytes) else script)
    listening = await asyncio.start_server(server.serve, "localhost", 0, ssl=tls)
    server.port, server.tls = listening.sockets[0].getsockname()[1], tls is not None
    async with listening:
        yield server


async def post_json(engine: HttpEngine, route: str, body: dict[str, Any], **limits: int) -> dict[str, Any]:
    raw, _ = await engine.post(route, body, **limits)
    return engine.parsed(raw)


async def test_connection_is_used_again_when_its_answer_was_read(http: EngineConnections) -> None:
    async with serving(WHOLE + b'{"a":1}') as server:
        engine = server.engine(http)
        for _ in range(5):
            assert await post_json(engine, "/route", {"x": 1}) == {"a": 1}
    assert (server.connections, len(server.requests)) == (1, 5)
    assert server.requests[0].startswith(b"POST /base/route HTTP/1.1\r\n") and server.requests[0].endswith(b'{"x":1}')


async def test_connection_of_a_500_is_not_used_again(http: EngineConnections) -> None:
    """Some servers end it behind such an answer: the next call there would be lost."""
    answers = [b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops", WHOLE + b'{"a":1}']

    async def next_one(writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async with serving(next_one) as server:
        engine = server.engine(http)
        with pytest.raises(EngineFailedError):
            await post_json(engine, "/route", {})
        assert await post_json(engine, "/route", {}) == {"a": 1}
    assert server.connections == 2


async def test_calls_at_the_same_time_have_a_connection_each(http: EngineConnections) -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(WHOLE + b'{"a":1}')

    async with serving(slowly) as server:
        engine = server.engine(http)
        await asyncio.gather(*(post_json(engine, "/", {}) for _ in range(8)))
        await asyncio.gather(*(post_json(engine, "/", {}) for _ in range(8)))
    assert server.connections == 8 and len(server.requests) == 16


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        WHOLE + b'{"a":1}',
        JSON + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;x=y\r\n":1}\r\n0\r\nTrailer: t\r\n\r\n',
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE + b'{"a":1}',
        JSON + b"Connection: close\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}',
    ],
)
async def test_answer_is_read_however_it_is_framed_and_cut(answer: bytes, step: int, http: EngineConnections) -> None:
    async def in_steps(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(answer), step):
            writer.write(answer[at : at + step])
            await asyncio.sleep(0)

    async with serving(in_steps) as server:
        engine = server.engine(http)
        for _ in range(2):
            raw, headers = await engine.post("/", {})
            assert raw == b'{"a":1}' and headers["content-type"] == "application/json" and "link" not in headers
    assert server.connections == (2 if b"Connection: close" in answer else 1)


async def test_answer_without_a_length_ends_with_its_connection(http: EngineConnections) -> None:
    async def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(JSON + b'\r\n{"a"')
        await asyncio.sleep(0.01)
        writer.write(b":1}")
        writer.close()

    async with serving(until_closed) as server:
        for _ in range(2):
            assert await post_json(server.engine(http), "/", {}) == {"a": 1}
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 O",
        WHOLE,
        WHOLE + b'{"a":',
        JSON + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n',
        JSON + b'Transfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n0\r\n',
    ],
)
async def test_call_is_lost_when_the_connection_ends_within_the_answer(answer: bytes, http: EngineConnections) -> None:
    async def cut_off(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with serving(cut_off) as server:
        with pytest.raises(EngineLostError):
            await server.engine(http).post("/", {})
    assert len(server.requests) == 1, "a request is never sent twice"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nPRI",
        JSON + b"X: " + b"y" * (1 << 17),
        JSON + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
        JSON + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
async def test_call_fails_when_the_answer_is_something_else(answer: bytes, http: EngineConnections) -> None:
    async with serving(answer) as server:
        with pytest.raises(EngineAnswerError) as caught:
            await server.engine(http).post("/", {})
    assert caught.value.retryable and len(server.requests) == 1


@pytest.mark.parametrize("more", [b"H", b"\0", b"\r\n\r\nx", WHOLE + b'{"b":2}'])
async def test_bytes_behind_an_answer_are_never_taken_for_the_next(more: bytes, http: EngineConnections) -> None:
    async with serving(WHOLE + b'{"a":1}' + more) as server:
        engine = server.engine(http)
        for _ in range(3):
            assert await post_json(engine, "/", {}) == {"a": 1}
    assert server.connections == 3


async def test_connection_that_speaks_unasked_is_not_used_again(
    http: EngineConnections, eventually: Eventually
) -> None:
    async def twice(writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE + b'{"a":1}')
        await asyncio.sleep(0.02)
        writer.write(WHOLE + b'{"b":2}')

    async with serving(twice) as server:
        engine = server.engine(http)
        assert await post_json(engine, "/", {}) == {"a": 1}
        await eventually(lambda: server.open == 0)
        assert await post_json(engine, "/", {}) == {"a": 1}
    assert server.connections == 2


async def _never(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _half(writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE + b'{"a"')
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [_never, _half])
async def test_connection_is_cut_when_a_call_is_cancelled(
    script: Callable[[asyncio.StreamWriter], Awaitable[None]], http: EngineConnections, eventually: Eventually
) -> None:
    async with serving(script) as server:
        call = asyncio.create_task(server.engine(http).post("/", {}))
        await eventually(lambda: len(server.requests) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize(
    ("script", "limit"), [(_never, {"request_timeout_s": 0.05}), (_half, {"idle_timeout_s": 0.05})]
)
async def test_call_ends_with_a_timeout_when_nothing_more_comes(
    script: Callable[[asyncio.StreamWriter], Awaitable[None]],
    limit: dict[str, float],
    http: EngineConnections,
    eventually: Eventually,
) -> None:
    async with serving(script) as server:
        with pytest.raises(EngineTimeoutError):
            await server.engine(http, **limit).post("/", {})
        await eventually(lambda: server.open == 0)


async def test_silence_is_counted_from_the_last_byte(http: EngineConnections) -> None:
    async def drop_by_drop(writer: asyncio.StreamWriter) -> None:
        for byte in WHOLE + b'{"a":1}':
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    async with serving(drop_by_drop) as server:
        assert await post_json(server.engine(http, idle_timeout_s=1.0), "/", {}) == {"a": 1}


async def test_calls_that_run_are_lost_when_the_connections_are_closed(eventually: Eventually) -> None:
    async with serving(_never) as server:
        async with EngineConnections() as http:
            call = asyncio.create_task(server.engine(http).post("/", {}))
            await eventually(lambda: len(server.requests) == 1)
        with pytest.raises(EngineLostError):
            await call
        await eventually(lambda: server.open == 0)
        with pytest.raises(RuntimeError, match="closed"):
            await server.engine(http).post("/", {})


async def test_unused_connection_is_ended_after_its_time(eventually: Eventually) -> None:
    async with serving(WHOLE + b'{"a":1}') as server, EngineConnections(keepalive_s=0.05) as http:
        await server.engine(http).post("/", {})
        await eventually(lambda: server.open == 0)
        assert await post_json(server.engine(http), "/", {}) == {"a": 1}
    assert server.connections == 2


async def test_engine_waits_when_a_stream_is_not_read(http: EngineConnections, eventually: Eventually) -> None:
    size, written = 64 << 20, 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal written
        written = 0
        writer.write(JSON + b"Content-Length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(b"x" * (1 << 16))
            written += 1 << 16
            await writer.drain()

    async with serving(flood) as server:
        stream = server.engine(http).post_stream("/", {}, max_tokens=1 << 20)
        read = len(await anext(stream))
        before = -1
        while before != written:  # until it stands still
            before = written
            await asyncio.sleep(0.1)
        assert written < size
        async for chunk in stream:
            read += len(chunk)
        assert read == size
        await server.engine(http).post("/", {})
    assert server.connections == 1


async def test_large_request_and_answer_pass_whole(http: EngineConnections) -> None:
    body = b'{"a":"%b"}' % (b"z" * (5 << 20))
    async with serving(JSON + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)) as server:
        sent = "y" * (5 << 20)
        assert await post_json(server.engine(http), "/", {"x": sent}) == {"a": "z" * (5 << 20)}
    assert server.requests[0].endswith(b'{"x":"%b"}' % sent.encode())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost -keyout {tmp_path}/key -out {tmp_path}/cert"
    subprocess.run(words.split(), check=True, capture_output=True)
    return tmp_path / "cert"


async def test_engine_behind_tls_answers_when_its_certificate_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key"))
    async with serving(WHOLE + b'{"a":1}', tls=context) as server:
        async with EngineConnections() as http:
            with pytest.raises(EngineUnreachableError, match="certificate"):
                await server.engine(http).post("/", {})
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with EngineConnections() as http:
            for _ in range(3):
                assert await post_json(server.engine(http), "/", {}) == {"a": 1}
    assert len(server.requests) == 3


@pytest.mark.parametrize("url", ["http://nobody.invalid:8000", "http://127.0.0.1:1"])
async def test_nothing_was_begun_when_no_connection_came_about(url: str, http: EngineConnections) -> None:
    with pytest.raises(EngineUnreachableError, match="cannot be reached") as caught:
        await HttpEngine(EngineEndpoint("e0", url), http).post("/", {})
    assert caught.value.details["engine"] == "e0" and caught.value.retryable


async def test_connecting_has_a_time_of_its_own(http: EngineConnections) -> None:
    """Connections that a full backlog does not take are never answered."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        origin = Origin("127.0.0.1", deaf.getsockname()[1], False)
        calls = [
            asyncio.ensure_future(http.send(origin, b"GET / HTTP/1.1\r\n\r\n", b"", Patience(0.2, 30.0)))
            for _ in range(4)
        ]
        with pytest.raises(NotConnectedError):
            await asyncio.gather(*calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)


def test_header_with_a_line_break_is_refused() -> None:
    for options in ({"api_key": "sk-1\n"}, {"headers": {"X-A": "1\r\nX-B: 2"}}):
        with pytest.raises(ConfigError, match="line break"):
            HttpEngine(EngineEndpoint("e0", "http://localhost", **options), EngineConnections())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://localhost:8000", b"POST /v1/x HTTP/1.1", b"localhost:8000"),
        ("https://api.example.com/a b/%20/ü", b"POST /a%20b/%20/%C3%BC/v1/x HTTP/1.1", b"api.example.com"),
        ("http://[::1]:9/", b"POST /v1/x HTTP/1.1", b"[::1]:9"),
        ("http://bücher.example", b"POST /v1/x HTTP/1.1", b"xn--bcher-kva.example"),
    ],
)
def test_head_names_path_and_host_as_servers_expect_them(url: str, line: bytes, host: bytes) -> None:
    head = RequestHeads(url.rstrip("/"), {"accept": "x", "Authorization": "Bearer k"}).of("POST", "/v1/x", 12)
    lines = head.split(b"\r\n")
    assert lines[0] == line and b"Host: " + host in lines and lines[-3:] == [b"Content-Length: 12", b"", b""]
    assert b"accept: x" in lines and not any(one.startswith(b"Accept:") for one in lines)
