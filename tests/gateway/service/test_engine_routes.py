"""The trainer's door to the engines, over HTTP and behind credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from pydantic import PrivateAttr
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role
from nemo_gym.gateway.engines import Sampling, TokenRequest
from nemo_gym.gateway.engines.pool import EnginePool
from nemo_gym.gateway.routes import engine_routes
from nemo_gym.http.requests import JsonResponse, require_role
from nemo_gym_testing.gateway import FakeVllmEngine
from tests.servers.stack import Stack, running_stack

NAME = "policy_model"


class PoolServer(SimpleResponsesAPIModel):
    """A pool and its routes; ``/sample`` makes one call."""

    config: BaseResponsesAPIModelConfig
    _pool: EnginePool = PrivateAttr(default_factory=lambda: EnginePool(kind="token"))

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.router.routes.extend(engine_routes(self._pool, require_role))
        app.router.routes.append(Route("/sample", self._sample, methods=["POST"]))
        return app

    async def startup(self) -> None:
        await self._pool.start()

    async def shutdown(self) -> None:
        await self._pool.aclose()

    async def _sample(self, request: Request) -> Response:
        answer = await self._pool.token_calls.generate(None, TokenRequest("r", [1, 2], Sampling(4)))
        return JsonResponse({"engine": answer.engine, "weights": answer.weights.last})


class Caller:
    """A client of the server in some role."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self._stack, self._http = stack, http

    async def __call__(
        self, method: str, path: str, body: Any = None, role: Role = Role.PIPELINE
    ) -> tuple[int, dict[str, Any]]:
        headers = {CREDENTIAL_HEADER: self._stack.keys.caller(role, "someone", NAME)}
        url = self._stack.url(NAME) + path
        async with self._http.request(method, url, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        running.add(NAME, PoolServer, Role.MODEL)
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def call(stack: Stack, http: aiohttp.ClientSession) -> Caller:
    return Caller(stack, http)


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllmEngine]:
    async with FakeVllmEngine() as engine:
        yield engine


def engine(fake: FakeVllmEngine, name: str = "a", **options: Any) -> dict[str, Any]:
    return {"type": "vllm", "base_url": fake.url, "name": name, **options}


async def test_added_engine_serves_until_it_is_deleted(call: Caller, fake: FakeVllmEngine) -> None:
    assert await call("GET", "/engines") == (
        200,
        {"kind": "token", "engines": [], "waiting": 0, "retries_saved": 20.0},
    )
    status, added = await call("POST", "/engines", engine(fake, weight=2.0, api_key="sk-secret"))
    assert status == 201 and added["name"] == "a" and added["state"] == "up" and added["weight"] == 2.0
    assert (await call("POST", "/sample"))[1]["engine"] == "a"
    assert fake.calls[0].headers["Authorization"] == "Bearer sk-secret"
    listed = await call("GET", "/engines")
    assert listed[1]["engines"][0]["placed"] == 1 and "sk-secret" not in str(listed)
    assert await call("DELETE", "/engines/a?drain_timeout_s=5") == (200, {"name": "a", "removed": True})
    assert (await call("GET", "/engines"))[1]["engines"] == []


async def test_name_in_use_is_a_conflict(call: Caller, fake: FakeVllmEngine) -> None:
    await call("POST", "/engines", engine(fake))
    status, problem = await call("POST", "/engines", engine(fake))
    assert status == 409 and problem["code"] == "engine_name_taken" and "'a'" in problem["detail"]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"type": "vlm"}, "type"),
        ({"type": None}, "type"),
        ({"base_url": "nowhere"}, "base_url"),
        ({"base_url": None}, "base_url"),
        ({"weight": 0}, "weight"),
        ({"weight": "NaN"}, "weight"),
        ({"logprobs": True}, "logprobs"),
        ({"api_key": ["sk-secret"]}, "api_key"),
        ({"headers": {"x": 1}}, "headers.x"),
        ({"type": "openai"}, "type"),
    ],
)
async def test_wrong_engine_is_refused_by_field(
    wrong: dict[str, Any], field: str, call: Caller, fake: FakeVllmEngine
) -> None:
    status, problem = await call("POST", "/engines", engine(fake) | wrong)
    assert status == 422 and problem["param"] == field and "sk-secret" not in str(problem), problem
    assert (await call("GET", "/engines"))[1]["engines"] == []


async def test_drained_engine_gets_no_call_until_it_is_undrained(call: Caller, fake: FakeVllmEngine) -> None:
    async with FakeVllmEngine() as other:
        await call("POST", "/engines", engine(fake, "a"))
        await call("POST", "/engines", engine(other, "b"))
        status, drained = await call("POST", "/engines/a/drain", {"timeout_s": 5})
        assert status == 200 and drained["draining"] and drained["in_flight"] == 0
        assert {(await call("POST", "/sample"))[1]["engine"] for _ in range(6)} == {"b"}
        status, back = await call("POST", "/engines/a/undrain")
        assert status == 200 and not back["draining"]
        assert {(await call("POST", "/sample"))[1]["engine"] for _ in range(6)} == {"a", "b"}


async def test_weight_changes_the_share(call: Caller, fake: FakeVllmEngine) -> None:
    for name in ("a", "b"):
        await call("POST", "/engines", engine(fake, name))
    assert (await call("POST", "/engines/b/weight", {"weight": 3}))[1]["weight"] == 3.0
    placed = [(await call("POST", "/sample"))[1]["engine"] for _ in range(16)]
    assert (placed.count("a"), placed.count("b")) == (4, 12)
    status, problem = await call("POST", "/engines/b/weight", {"weight": -1})
    assert status == 422 and problem["param"] == "weight"


async def test_weights_version_is_set_for_all_or_for_some(call: Caller, fake: FakeVllmEngine) -> None:
    for name in ("a", "b"):
        await call("POST", "/engines", engine(fake, name))
    assert await call("POST", "/weights", {"version": "7"}) == (200, {"version": "7", "engines": ["a", "b"]})
    assert (await call("POST", "/sample"))[1]["weights"] == "7"
    assert (await call("POST", "/weights", {"version": "8", "engines": ["b"]}))[0] == 200
    assert (await call("POST", "/weights", {"version": "9", "engines": ["b", "c"]}))[0] == 404
    versions = [one["weights_version"] for one in (await call("GET", "/engines"))[1]["engines"]]
    assert versions == ["7", "8"]
    status, problem = await call("POST", "/weights", {"version": 7})
    assert status == 422 and problem["param"] == "version"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/engines/ghost"),
        ("POST", "/engines/ghost/drain"),
        ("POST", "/engines/ghost/undrain"),
        ("POST", "/engines/ghost/weight"),
    ],
)
async def test_unknown_engine_is_not_found(method: str, path: str, call: Caller) -> None:
    status, problem = await call(method, path, {"weight": 1} if "weight" in path else None)
    assert status == 404 and problem["code"] == "unknown_engine" and "ghost" in problem["detail"]


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan", "1e9"])
async def test_wrong_drain_timeout_is_refused_and_removes_nothing(
    value: str, call: Caller, fake: FakeVllmEngine
) -> None:
    await call("POST", "/engines", engine(fake))
    status, problem = await call("DELETE", f"/engines/a?drain_timeout_s={value}")
    assert status == 422 and "timeout_s" in problem["param"]
    assert len((await call("GET", "/engines"))[1]["engines"]) == 1


@pytest.mark.parametrize("role", [Role.AGENT, Role.ENVIRONMENT])
async def test_engines_are_for_the_pipeline_and_operators_only(
    role: Role, call: Caller, stack: Stack, http: aiohttp.ClientSession, fake: FakeVllmEngine
) -> None:
    for method, path in [
        ("GET", "/engines"),
        ("POST", "/engines"),
        ("DELETE", "/engines/a"),
        ("POST", "/engines/a/drain"),
        ("POST", "/engines/a/undrain"),
        ("POST", "/engines/a/weight"),
        ("POST", "/weights"),
    ]:
        assert (await call(method, path, {}, role))[0] == 403
        async with http.request(method, stack.url(NAME) + path, json={}) as reply:
            assert reply.status == 401
    assert (await call("POST", "/engines", engine(fake), Role.OPERATOR))[0] == 201
