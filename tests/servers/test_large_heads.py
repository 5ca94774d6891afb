"""Requests whose head, or what stands in a head's place, is larger than any client's, over raw sockets."""

from __future__ import annotations

import asyncio
import time
import urllib.request

import pytest

from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.contract.credentials import Role
from tests.servers.stack import Stack

MB = 1_000_000
LAST_HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


async def said(stack: Stack, *pieces: bytes) -> bytes:
    """What is answered to the pieces, until nothing comes for a while or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url("server").rpartition(":")[2]))
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(5):
            while data := await reader.read(65536):
                answer += data
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return answer


def health_s(stack: Stack) -> float:
    began = time.monotonic()
    urllib.request.urlopen(f"{stack.url('server')}/health", timeout=60).read()
    return time.monotonic() - began


@pytest.mark.parametrize("shape", ["a header", "headers", "a path", "a trailer", "a chunk's extension"])
async def test_head_without_an_end_holds_nobody_up(stack: Stack, shape: str) -> None:
    stack.add("server", SimpleResourcesServer, Role.ENVIRONMENT)
    line = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    chunked = line + b"Transfer-Encoding: chunked\r\n\r\n"
    begun = {
        "a header": line + b"x: ",
        "headers": line,
        "a path": b"GET /",
        "a trailer": chunked + b"0\r\nx: ",
        "a chunk's extension": chunked + b"1;x=",
    }[shape]
    more = (b"a: b\r\n" if shape == "headers" else b"aaaaaa") * (MB // 6)
    talking = asyncio.create_task(said(stack, begun, *[more] * 60))
    worst = 0.0
    while not talking.done():
        worst = max(worst, await asyncio.to_thread(health_s, stack))
        await asyncio.sleep(0.02)
    assert worst < 1.5
    # The refusal may be lost with what was sent behind it.
    assert (await talking).split(b"\r\n")[0] in (
        b"",
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"HTTP/1.1 200 OK",
    )


async def test_large_head_is_refused_by_its_size_and_a_usual_one_is_not(stack: Stack) -> None:
    stack.add("server", SimpleResourcesServer, Role.ENVIRONMENT)
    for size, status in ((100_000, b"200"), (140_000, b"431")):
        answer = await said(stack, LAST_HEAD + b"x: " + b"a" * size + b"\r\n\r\n")
        assert answer.split()[1] == status
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000  # 360 kB of small heads
    assert (await said(stack, many, LAST_HEAD + b"\r\n")).count(b"HTTP/1.1 200") > 500
