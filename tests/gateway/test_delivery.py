"""A client that breaks off an SSE answer at any byte gets the same answer when it asks again; one that read it all and
asks again gets a new sample."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nemo_gym.gateway.live_session import SessionAnswers
from nemo_gym.http.delivery import DELIVERIES, AnswerWatch, end, untaken
from nemo_gym.http.protocol import WatchedHttpProtocol

ASK = b"POST /turn HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


Scenario = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Scenario:
    """Servers run on uvloop; how a connection ended must be seen on both."""

    def scenario(steps: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(steps)

    return scenario


class Gateway:
    """Answers every request with numbered events, cut into several writes."""

    def __init__(self) -> None:
        self.answers: SessionAnswers[int] = SessionAnswers()
        self.sampled = 0
        self.held: asyncio.Event | None = None
        """What follows the first part waits for it."""

    async def turn(self, request: Request) -> StreamingResponse:
        await request.body()
        watch = DELIVERIES.watch(request.scope["client"])

        async def sample() -> int:
            self.sampled += 1
            return self.sampled

        async def commit(number: int) -> int:
            return number

        delivery = await self.answers.once("same", sample, commit)

        async def events() -> AsyncIterator[bytes]:
            for part in range(3):
                yield f"data: answer {delivery.answer:04d} part {part}\n\n".encode()
                if self.held is not None:
                    await self.held.wait()
                    time.sleep(0.05)  # noqa: ASYNC251 - the client's end comes before this server looks again
                else:
                    await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        async def body() -> AsyncIterator[bytes]:
            async for piece in events():
                yield piece
            if watch.all_sent(delivery.undelivered):
                delivery.sent()

        return StreamingResponse(body(), media_type="text/event-stream")


@asynccontextmanager
async def served(gateway: Gateway) -> AsyncIterator[int]:
    async with serving(gateway.turn) as port:
        yield port


@asynccontextmanager
async def serving(turn: Callable[[Request], Awaitable[Response]], **tls: str) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/turn", turn, methods=["POST"])])
    config = uvicorn.Config(app, http=WatchedHttpProtocol, log_level="warning", ws="none", **tls)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve([listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def read_exactly(port: int, count: int | None) -> bytes:
    """Ask on a connection of its own, take exactly so many bytes from the kernel (all if ``None``), close it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, ASK)
        got = b""
        while (count is None and not got.endswith(b"0\r\n\r\n")) or (count is not None and len(got) < count):
            got += await loop.sock_recv(client, 65536 if count is None else count - len(got))
        return got


def test_answer_broken_off_at_any_byte_is_given_again_and_sampled_once(run: Scenario) -> None:
    async def steps() -> None:
        gateway = Gateway()
        async with served(gateway) as port:
            whole = await read_exactly(port, None)
            assert gateway.sampled == 1
            for count in range(len(whole)):
                before = gateway.sampled
                broken = await read_exactly(port, count)
                again = await read_exactly(port, None)
                # Leaving before the first byte may end the call before it is sampled: that is one sample, too.
                assert gateway.sampled == before + 1, f"sampled twice after {count} bytes"
                assert again.count(b"answer %04d" % gateway.sampled) == 3 and len(broken) == count

    run(steps())


def test_answer_whose_client_left_in_order_before_it_came_is_given_again(run: Scenario) -> None:
    async def steps() -> None:
        gateway, loop = Gateway(), asyncio.get_running_loop()
        gateway.held = asyncio.Event()
        async with served(gateway) as port:
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", port))
                await loop.sock_sendall(client, ASK)
                seen = b""
                while not seen.endswith(b"part 0\n\n\r\n"):
                    seen += await loop.sock_recv(client, 1)
                # Nothing is unread: the connection ends in order, in the same moment as the rest is written.
                gateway.held.set()
            assert b"answer 0001" in await read_exactly(port, None)
            assert gateway.sampled == 1

    run(steps())


def test_answer_read_to_its_end_is_not_repeated(run: Scenario) -> None:
    async def steps() -> None:
        gateway = Gateway()
        async with served(gateway) as port:
            for number in range(1, 6):
                assert b"answer %04d" % number in await read_exactly(port, None)

    run(steps())


def test_answer_has_not_left_while_tls_holds_what_its_client_does_not_take(run: Scenario, tmp_path: Path) -> None:
    certificate, key, size = tmp_path / "host.crt", tmp_path / "host.key", 32 << 20
    about = ["-days", "2", "-subj", "/CN=host", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run(["openssl", "req", "-x509", *kind, *about, *files], check=True, capture_output=True)
    watches: list[AnswerWatch] = []

    async def turn(request: Request) -> Response:
        watches.append(DELIVERIES.watch(request.scope["client"]))
        return Response(bytes(size))

    async def steps() -> None:
        trusting = ssl.create_default_context(cafile=certificate)
        async with serving(turn, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            try:
                writer.write(ASK)
                await reader.readuntil(b"\r\n\r\n")
                assert not watches[0].left
                await reader.readexactly(size)
                async with asyncio.timeout(60):
                    while not watches[0].left:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            finally:
                writer.transport.abort()

    run(steps())


def test_watches_end_with_their_connections(run: Scenario) -> None:
    async def steps() -> None:
        gateway = Gateway()
        async with served(gateway) as port:
            for _ in range(5):
                await read_exactly(port, None)
            for _ in range(200):
                if len(DELIVERIES) == 0:
                    break
                await asyncio.sleep(0.01)
            assert len(DELIVERIES) == 0

    run(steps())


def test_next_request_on_a_connection_proves_that_the_answer_was_read() -> None:
    undelivered: list[str] = []
    here = ("127.0.0.1", 5)
    first = DELIVERIES.watch(here)
    assert first.all_sent(lambda: undelivered.append("first"))
    second = DELIVERIES.watch(here)
    assert second.all_sent(lambda: undelivered.append("second"))
    DELIVERIES.ended(here, reset=True)
    assert undelivered == ["second"]


@pytest.mark.parametrize("reset", [True, False])
def test_answer_is_not_sent_when_its_connection_ended_before_the_last_byte(reset: bool) -> None:
    watch = DELIVERIES.watch(("127.0.0.1", 6))
    DELIVERIES.ended(("127.0.0.1", 6), reset=reset)
    assert watch.all_sent(lambda: None) is False


def test_work_that_is_ended_cleans_up_although_its_event_loop_ends_too(run: Scenario) -> None:
    ends: list[bool] = []
    both: list[asyncio.Task[None]] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

    async def ending(task: asyncio.Task[None]) -> None:
        try:
            await end(task)
        except asyncio.CancelledError:
            ends.append(task.done())
            raise

    async def steps() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        both.extend((task, asyncio.create_task(ending(task))))  # the runner cancels them
        await asyncio.sleep(0)

    run(steps())
    assert ends == [True]


class TwiceClosedTlsTransport(asyncio.Transport):
    """As asyncio's TLS transport is after a second ``close``; uvicorn calls it when the connection is lost."""

    def get_extra_info(self, name: str, default: object = None) -> object:
        raise AttributeError("'NoneType' object has no attribute '_get_extra_info'")

    def get_write_buffer_size(self) -> int:
        return 20_000_000


def test_transport_that_was_closed_twice_holds_no_bytes() -> None:
    assert not AnswerWatch(TwiceClosedTlsTransport()).holds_bytes
    assert untaken(TwiceClosedTlsTransport()) == 0
