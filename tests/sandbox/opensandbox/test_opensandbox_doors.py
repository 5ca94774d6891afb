"""Doors of boxes that nothing but the backend's own interface reaches: a relay in the box, and what befalls it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.contract.errors import SandboxCreateError, SandboxError
from nemo_gym.contract.sandbox import Door, NetworkPolicy, SandboxSpec
from nemo_gym.sandbox.base import ExecOutput, ExecRequest, SandboxHandle
from nemo_gym.sandbox.conformance.base import eventually
from nemo_gym.sandbox.providers.opensandbox import OpenSandboxProvider
from nemo_gym.sandbox.providers.opensandbox.doors import CREDIT, DATA, FINISH, WINDOW_BYTES, Message, _Stream
from tests.sandbox.opensandbox.double import API_KEY

ASK = """
import json, sys, urllib.request
def ask(path, size, port=8000):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=b"q" * size)
    try:
        with urllib.request.urlopen(request, timeout=40) as answer: return answer.read()
    except OSError as error: return None
"""
ALLOWED = ("POST /echo", "POST /large", "POST /wait")
LARGE = 5 * 1024 * 1024


@dataclass
class Target:
    url: str
    sizes: list[int] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        found.sizes.append(len(body))
        return web.Response(body=hashlib.sha256(body).hexdigest())

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(range(256)) * (LARGE // 256))

    async def wait(_: web.Request) -> web.Response:
        found.waiting.set()
        await asyncio.sleep(600)
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/echo", echo), web.post("/large", large), web.post("/wait", wait)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found = Target(f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield found
    await runner.cleanup()


@pytest.fixture
async def provider(double_url: str) -> AsyncIterator[OpenSandboxProvider]:
    provider = OpenSandboxProvider(url=double_url, api_key=API_KEY, default_image="host", egress_policy=True)
    yield provider
    await provider.aclose()


@pytest.fixture
async def box(provider: OpenSandboxProvider, target: Target) -> AsyncIterator[SandboxHandle]:
    handle = await provider.create(spec(door(target)))
    yield handle
    await provider.close(handle)


def spec(*doors: Door) -> SandboxSpec:
    return SandboxSpec(ttl_s=300, network=NetworkPolicy.NONE, doors=doors)


def door(target: Target, name: str = "model", port: int = 8000) -> Door:
    return Door(name, port, target.url, ALLOWED)


async def python(provider: OpenSandboxProvider, box: SandboxHandle, code: str) -> Any:
    result = await provider.exec(box, ["python3", "-c", f"{ASK}\n{code}"], timeout_s=100)
    assert result.ok, result
    return json.loads(result.stdout or "null")


async def test_bodies_larger_than_what_may_be_under_way_pass_whole_in_both_directions(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target
) -> None:
    code = (
        "import hashlib\n"
        f"said = ask('/echo', {LARGE}).decode()\n"
        f"print(json.dumps([said == hashlib.sha256(b'q' * {LARGE}).hexdigest(),\n"
        f"  ask('/large', 1) == bytes(range(256)) * {LARGE // 256}]))"
    )
    assert await python(provider, box, code) == [True, True]
    assert target.sizes == [LARGE]
    assert provider.door_statistics(box)["model"].answered == 2


async def test_open_door_has_no_file_that_would_stay_if_its_process_were_killed(
    provider: OpenSandboxProvider, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    box = await provider.create(spec(door(target)))
    try:
        assert [path.name for path in tmp_path.glob("nemo-gym-door-*")] == []
        assert await python(provider, box, "print(json.dumps(ask('/echo', 5) is not None))") is True
    finally:
        await provider.close(box)


async def test_many_connections_at_once_get_their_own_answers(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target
) -> None:
    code = (
        "import hashlib\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(16) as pool: said = list(pool.map(lambda n: ask('/echo', n), range(1, 101)))\n"
        "print(json.dumps([s.decode() == hashlib.sha256(b'q' * n).hexdigest() for n, s in enumerate(said, 1)]))"
    )
    assert await python(provider, box, code) == [True] * 100
    assert sorted(target.sizes) == [*range(1, 101)]


async def test_door_that_nobody_reads_from_does_not_hold_up_others(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target
) -> None:
    code = (
        "import socket\n"
        "slow = socket.create_connection(('127.0.0.1', 8000))\n"
        "for _ in range(4): slow.sendall(b'POST /large HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n')\n"
        "slow.recv(1)\n"
        "print(json.dumps([ask('/echo', 3) is not None for _ in range(3)]))"
    )
    assert await python(provider, box, code) == [True] * 3


async def test_relay_that_is_killed_breaks_its_connections_and_is_replaced(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target
) -> None:
    waiting = asyncio.create_task(python(provider, box, "print(json.dumps(ask('/wait', 1)))"))
    async with asyncio.timeout(60):
        await target.waiting.wait()
        # Found by its command line, as the box may have no pkill; not this search itself.
        kill = (
            "import glob, os\n"
            "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
            "    try: line = open(path, 'rb').read().split(b'\\0')\n"
            "    except OSError: continue\n"
            "    if line[1:2] == [b'relay']: os.kill(int(path.split('/')[2]), 9)\n"
            "print('null')"
        )
        await python(provider, box, kill)
        assert await waiting is None

    async def back() -> bool:
        return await python(provider, box, "print(json.dumps(ask('/echo', 5) is not None))") is True

    await eventually(back, "the door is open again")
    assert target.sizes[-1] == 5


async def test_door_is_served_by_the_process_that_opened_it_last(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target, double_url: str
) -> None:
    other = OpenSandboxProvider(url=double_url, api_key=API_KEY, default_image="host", egress_policy=True)
    try:
        descriptor = await provider.serialize_handle(box, scope="operate")
        again = await other.connect(descriptor)
        await other.open_door(again, door(target))
        assert await python(provider, box, "print(json.dumps(ask('/echo', 7) is not None))") is True
        assert other.door_statistics(again)["model"].answered == 1
        assert provider.door_statistics(box)["model"].answered == 0
    finally:
        await other.aclose()


async def test_port_that_a_process_of_the_box_has_is_told(
    provider: OpenSandboxProvider, box: SandboxHandle, target: Target
) -> None:
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 8100)); print('up', flush=True)"
    process = await provider.start_exec(box, ExecRequest(["python3", "-c", f"{listen}; time.sleep(60)"]))
    async with contextlib.aclosing(process.events()) as events:  # a command that nobody listens to is killed
        assert isinstance(await anext(events), ExecOutput)
        with pytest.raises(SandboxError, match=r"port 8100 of the box: .*in use"):
            await provider.open_door(box, door(target, "late", 8100))
    assert set(provider.door_statistics(box)) == {"model"}


async def test_two_doors_on_one_port_are_no_box(provider: OpenSandboxProvider, target: Target) -> None:
    with pytest.raises(SandboxCreateError, match="door 'model' is there"):
        await provider.create(spec(door(target), door(target, "other")))
    assert await provider.list({"nemo_gym.managed": "true"}) == []


async def test_door_of_a_box_that_ended_elsewhere_gives_up(
    provider: OpenSandboxProvider, target: Target, double_url: str
) -> None:
    handle = await provider.create(spec(door(target)))
    (relayed,) = provider._doors
    assert relayed._socket_fd >= 0
    other = OpenSandboxProvider(url=double_url, api_key=API_KEY, default_image="host", egress_policy=True)
    await other.close(await other.connect(await provider.serialize_handle(handle, scope="owner")))
    await other.aclose()
    task = relayed._task
    assert task is not None
    async with asyncio.timeout(60):
        await asyncio.wait({task})
    assert relayed._socket_fd == -1
    await provider.close(handle)


async def test_box_that_grants_more_than_the_window_is_sent_no_more_at_once(tmp_path: Path) -> None:
    class Sent:
        """The relay's side that goes into the box, and the door that owns the stream."""

        def __init__(self) -> None:
            self.bytes = 0
            self.finished = False

        def send(self, kind: bytes, number: int, data: bytes = b"") -> None:
            self.bytes += len(data) if kind == DATA else 0
            self.finished |= kind == FINISH

        def forget(self, stream: _Stream) -> None: ...

    async def large(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(3 * WINDOW_BYTES))
        await writer.drain()
        writer.close()

    async def reached(count: int) -> bool:
        return sent.bytes >= count

    sent: Any = Sent()
    server = await asyncio.start_unix_server(large, tmp_path / "door")
    async with server:
        stream = _Stream(sent, sent, 1, tmp_path / "door")
        try:
            stream.take(Message(CREDIT, 1, b"\xff\xff\xff\xff"))
            for window in (1, 2, 3):
                await eventually(partial(reached, window * WINDOW_BYTES), "a window's bytes are sent")
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert sent.bytes == window * WINDOW_BYTES
                stream.take(Message(CREDIT, 1, WINDOW_BYTES.to_bytes(4, "big")))
            async with asyncio.timeout(60):
                while not sent.finished:  # noqa: ASYNC110 - the recorder has no event for it
                    await asyncio.sleep(0.01)
        finally:
            await stream.aclose()
