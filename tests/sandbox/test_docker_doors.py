from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from nemo_gym.contract.errors import SandboxCapabilityError, SandboxError
from nemo_gym.contract.sandbox import Door
from nemo_gym.sandbox.base import SandboxHandle
from nemo_gym.sandbox.providers.docker import DockerProvider
from nemo_gym.sandbox.providers.docker.engine import Engine
from tests.sandbox.docker_boxes import Boxes


@pytest_asyncio.fixture
async def target() -> AsyncIterator[str]:
    """A server on this host's loopback that tells what it was asked, and with which credential."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.path} {request.headers.get('Authorization')}")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


def model_door(target: str) -> Door:
    return Door("model", 8000, target, ("POST /v1/*",), {"Authorization": "Bearer secret"})


async def test_docker_door_is_the_only_way_out_of_the_box(boxes: Boxes, target: str) -> None:
    handle = await boxes.create(doors=[model_door(target)])
    through = await boxes.provider.exec(handle, "curl -sS -X POST http://127.0.0.1:8000/v1/responses", timeout_s=20)
    assert through.stdout == "POST /v1/responses Bearer secret"
    other = await boxes.provider.exec(
        handle, "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/admin", timeout_s=20
    )
    assert (other.stdout or "").startswith("4")
    direct = await boxes.provider.exec(handle, f"curl -sS --max-time 5 {target}/v1/responses", timeout_s=20)
    assert direct.return_code == 7


async def test_docker_door_opens_and_closes_on_a_running_box(boxes: Boxes, box: SandboxHandle, target: str) -> None:
    await boxes.provider.open_door(box, model_door(target))
    with pytest.raises(SandboxError, match="already has a door named 'model'"):
        await boxes.provider.open_door(box, model_door(target))
    ask = "curl -sS -X POST http://127.0.0.1:8000/v1/x"
    assert (await boxes.provider.exec(box, ask, timeout_s=20)).return_code == 0
    await boxes.provider.close_door(box, "model")
    assert (await boxes.provider.exec(box, ask, timeout_s=20)).return_code == 7


async def test_docker_doors_of_two_boxes_share_a_port_without_meeting(boxes: Boxes, target: str) -> None:
    one, two = await asyncio.gather(
        boxes.create(doors=[model_door(target)]),
        boxes.create(doors=[Door("model", 8000, target, ("GET /two",), {"Authorization": "two"})]),
    )
    first = await boxes.provider.exec(one, "curl -sS -X POST http://127.0.0.1:8000/v1/one", timeout_s=20)
    second = await boxes.provider.exec(two, "curl -sS http://127.0.0.1:8000/two", timeout_s=20)
    assert (first.stdout, second.stdout) == ("POST /v1/one Bearer secret", "GET /two two")


async def test_docker_create_leaves_nothing_when_a_door_cannot_open(boxes: Boxes, target: str) -> None:
    doors = [model_door(target), Door("other", 8000, target, ("GET /x",))]
    with pytest.raises(SandboxError, match="door 'other' could not be opened on port 8000"):
        await boxes.create(doors=doors)
    assert await boxes.ids() == []


async def test_docker_create_refuses_doors_when_namespaces_cannot_be_entered(
    docker_engine: str, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(Engine, "is_local", lambda self: False)
    provider = DockerProvider(base_url=docker_engine)
    spec = Boxes(provider, {}).spec(doors=[model_door(target)])
    with pytest.raises(SandboxCapabilityError, match=r"loopback_door: .*cannot be entered from here"):
        await provider.create(spec)
    await provider.aclose()
