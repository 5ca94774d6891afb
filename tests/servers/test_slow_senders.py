"""Callers that send a request slowly, or never to its end, over raw sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from pydantic import Field

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role
from tests.servers.stack import Stack

TIMEOUT_S = 1.0
PATIENCE_S = 60.0
"""For what takes a second or two on an idle machine."""


class UploadEnvironment(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    reading: Any = Field(default_factory=threading.Event)
    """The route reads when this is set."""

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/upload")(self.upload)
        return app

    async def upload(self, request: Request) -> dict[str, int]:
        await asyncio.to_thread(self.reading.wait)
        return {"bytes": len(await request.body())}


@pytest.fixture
def uploads(stack: Stack) -> Iterator[Stack]:
    stack.add("uploads", UploadEnvironment, Role.ENVIRONMENT, slow_request_timeout_s=TIMEOUT_S)
    yield stack
    environment: Any = stack.servers["uploads"]
    environment.reading.set()


def head(stack: Stack, length: int) -> bytes:
    credential = stack.keys.caller(Role.PIPELINE, "collector", "uploads")
    return (
        f"POST /upload HTTP/1.1\r\nHost: x\r\n{CREDENTIAL_HEADER}: {credential}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(stack.url("uploads").rpartition(":")[2]))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection."""
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    "begun",
    ["nothing", "half a head", "empty lines", "half a body", "a body of one byte", "a body for nobody", "chunks"],
)
async def test_request_that_stands_still_is_ended(uploads: Stack, begun: str) -> None:
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    whole = head(uploads, 100_000)
    sent = {
        "nothing": b"",
        "half a head": whole[:40],
        "empty lines": b"\r\n\r\n",
        "half a body": whole + b"x" * 50_000,
        "a body of one byte": whole + b"x",
        "a body for nobody": whole.replace(b"ngc1", b"ngc0") + b"x" * 10,  # answered with 401 before it is here
        "chunks": whole.replace(b"Content-Length: 100000", b"Transfer-Encoding: chunked") + b"5\r\nabc",
    }[begun]
    reader, writer = await connect(uploads)
    writer.write(sent)
    answer = await ended(reader)
    assert answer.split(b" ")[1:2] == ([b"401"] if "nobody" in begun else [b"408"])
    writer.close()


async def test_trickle_of_single_bytes_is_no_progress(uploads: Stack) -> None:
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    reader, writer = await connect(uploads)
    writer.write(head(uploads, 100_000))

    async def trickle() -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    assert b" 408 " in await ended(reader)
    trickling.cancel()
    writer.close()


async def test_upload_that_goes_on_may_take_longer_than_the_timeout(uploads: Stack) -> None:
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    reader, writer = await connect(uploads)
    writer.write(head(uploads, 40 * 2048))
    for _ in range(40):  # 2 KiB in a twentieth of the time that 1 KiB may take, for twice that time in all
        writer.write(b"x" * 2048)
        await asyncio.sleep(TIMEOUT_S / 20)
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 " in await reader.readline()
    writer.close()


async def test_upload_that_the_server_itself_does_not_read_is_not_ended(uploads: Stack) -> None:
    size = 8 << 20
    reader, writer = await connect(uploads)
    writer.write(head(uploads, size) + b"x" * size)
    sending = asyncio.create_task(writer.drain())
    for _ in range(2):  # others' whole timeouts pass meanwhile
        other, closing = await connect(uploads)
        assert b" 408 " in await ended(other)
        closing.close()
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    await sending
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 " in await reader.readline()
    writer.close()


async def test_connection_is_kept_between_requests(uploads: Stack) -> None:
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    reader, writer = await connect(uploads)
    for number in range(2):
        writer.write(head(uploads, 5) + b"12345")
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b'{"bytes":5}')
        if number == 0:
            other, closing = await connect(uploads)
            await ended(other)
            closing.close()
    writer.close()


async def test_answer_may_take_longer_than_the_timeout(uploads: Stack) -> None:
    reader, writer = await connect(uploads)
    writer.write(head(uploads, 5) + b"12345")
    other, closing = await connect(uploads)
    await ended(other)
    closing.close()
    environment: Any = uploads.servers["uploads"]
    environment.reading.set()
    async with asyncio.timeout(PATIENCE_S):
        assert b" 200 " in await reader.readline()
    writer.close()
