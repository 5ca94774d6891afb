"""Bodies of several hundred KiB, however they arrive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from nemo_gym.gateway.engines import EngineAnswerTooLargeError, EngineConnections, EngineLostError, EngineTimeoutError
from tests.gateway.engines.test_connections import serving

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
BODY = random.Random(1).randbytes((1536 << 10) + 123)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.mark.parametrize(
    "cuts",
    [
        [],
        [len(HEAD)],
        [len(HEAD) - 1],
        [len(HEAD) + 1, len(HEAD) + 2],
        [len(HEAD), len(HEAD) + len(BODY) - 1],
        [len(HEAD) + len(BODY) // 2],
        [5, len(HEAD) + 5000, len(HEAD) + len(BODY) - 70_000],
    ],
)
async def test_body_is_whole_wherever_it_is_cut_and_its_connection_used_again(
    http: EngineConnections, cuts: list[int]
) -> None:
    answer = HEAD + BODY

    async def in_pieces(writer: asyncio.StreamWriter) -> None:
        for start, end in pairwise([0, *cuts, len(answer)]):
            writer.write(answer[start:end])
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(in_pieces) as server:
        engine = server.engine(http)
        for _ in range(3):
            body, headers = await engine.post("/", {})
            assert body == BODY and headers["content-length"] == str(len(BODY))
        assert server.connections == 1


async def test_short_and_chunked_bodies_follow_long_ones_on_the_same_connection(http: EngineConnections) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    answers = [HEAD + BODY, b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", HEAD + BODY, chunked, HEAD + BODY]
    left = iter(answers)

    async def next_one(writer: asyncio.StreamWriter) -> None:
        writer.write(next(left))

    async with serving(next_one) as server:
        engine = server.engine(http)
        bodies = [(await engine.post("/", {}))[0] for _ in answers]
        assert server.connections == 1
    assert bodies == [BODY, b"abc", BODY, BODY, BODY]


@pytest.mark.parametrize("sent", [len(HEAD) + 1, len(HEAD) + len(BODY) // 2, len(HEAD) + len(BODY) - 1])
async def test_body_that_breaks_off_is_a_lost_engine(http: EngineConnections, sent: int) -> None:
    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write((HEAD + BODY)[:sent])
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()

    async with serving(broken) as server:
        with pytest.raises(EngineLostError):
            await server.engine(http).post("/", {})


async def test_bytes_behind_a_body_end_its_connection(http: EngineConnections) -> None:
    async with serving(HEAD + BODY + b"HTTP/1.1 200 OK\r\n") as server:
        engine = server.engine(http)
        for _ in range(2):
            body, _ = await engine.post("/", {})
            assert body == BODY
            await asyncio.sleep(0.05)
        assert server.connections == 2


async def test_server_that_closes_behind_its_answer_is_not_asked_again(http: EngineConnections) -> None:
    async with serving(HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + BODY) as server:
        engine = server.engine(http)
        for _ in range(2):
            body, _ = await engine.post("/", {})
            assert body == BODY
        assert server.connections == 2


async def test_silence_amid_a_body_ends_the_call_in_time(http: EngineConnections) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write((HEAD + BODY)[: len(BODY) // 2])
        await asyncio.Event().wait()

    for patience in ({"idle_timeout_s": 0.1}, {"request_timeout_s": 0.3}):
        async with serving(silent) as server:
            with pytest.raises(EngineTimeoutError):
                await server.engine(http, **patience).post("/", {})


async def test_slow_body_is_no_silence(http: EngineConnections) -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for start in range(0, len(BODY), len(BODY) // 12):
            await asyncio.sleep(0.1)
            writer.write(BODY[start : start + len(BODY) // 12])

    async with serving(slowly) as server:
        body, _ = await server.engine(http, idle_timeout_s=0.9).post("/", {})
    assert body == BODY


async def test_cancelled_call_ends_its_connection_amid_a_body(http: EngineConnections, eventually: Eventually) -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write((HEAD + BODY)[: len(BODY) // 2])
        await asyncio.Event().wait()

    async with serving(half) as server:
        call = asyncio.create_task(server.engine(http).post("/", {}))
        await eventually(lambda: server.open == 1)
        await asyncio.sleep(0.02)
        call.cancel()
        await eventually(lambda: server.open == 0)
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_length_beyond_belief_is_refused_before_its_body_is_read(http: EngineConnections) -> None:
    async def liar(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n" + BODY)
        await writer.drain()
        writer.close()

    async with serving(liar) as server:
        with pytest.raises(EngineAnswerTooLargeError):
            await server.engine(http).post("/", {})
