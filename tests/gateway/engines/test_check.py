"""What engines say before the first rollout: key, model name, context."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.gateway.engines import EngineConnections, EngineEndpoint, HttpEngine, OpenAIEngine, VllmEngine

Serve = Callable[..., Awaitable[str]]
NAME = "my-model"
UNKNOWN = {"error": {"message": "The model `my-modl` does not exist."}}


@pytest.fixture
async def http() -> AsyncIterator[EngineConnections]:
    connections = EngineConnections()
    yield connections
    await connections.aclose()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """An endpoint that lists ``cards`` (``None``: has no such route) and answers each completion with ``answer``."""
    runners: list[web.AppRunner] = []

    async def start(
        cards: list[dict[str, Any]] | None, *, answer: tuple[int, Any] = (200, {}), key: str | None = None
    ) -> str:
        def taken(request: web.Request) -> bool:
            return key is None or request.headers.get("Authorization") == f"Bearer {key}"

        async def models(request: web.Request) -> web.Response:
            if not taken(request):
                return web.json_response({"error": {"message": f"wrong key {request.headers}"}}, status=401)
            return web.json_response({"data": cards}) if cards is not None else web.json_response({}, status=404)

        async def complete(request: web.Request) -> web.Response:
            assert (await request.json())["max_tokens"] == 1
            return web.json_response(answer[1], status=answer[0] if taken(request) else 401)

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def openai(url: str, http: EngineConnections, model: str | None = NAME, key: str | None = None) -> HttpEngine:
    return OpenAIEngine(EngineEndpoint("e0", f"{url}/v1", model=model, api_key=key), http)


def vllm(url: str, http: EngineConnections, model: str | None = NAME, key: str | None = None) -> HttpEngine:
    return VllmEngine(EngineEndpoint("e0", url, model=model, api_key=key), http)


Make = Callable[..., HttpEngine]
BOTH = pytest.mark.parametrize("make", [openai, vllm])


@BOTH
async def test_engine_tells_its_context_when_it_lists_the_model(
    http: EngineConnections, serve: Serve, make: Make
) -> None:
    check = await make(await serve([{"id": NAME, "max_model_len": 4096}]), http).check()
    assert (check.problem, check.unreachable, check.context_tokens) == (None, None, 4096)


@BOTH
@pytest.mark.parametrize(("listed", "context"), [([], None), ([NAME], 4096), ([NAME, "a-lora"], None)])
async def test_engine_without_a_chosen_model_may_list_any_number(
    http: EngineConnections, serve: Serve, make: Make, listed: list[str], context: int | None
) -> None:
    cards = [{"id": name, "max_model_len": 4096} for name in listed]
    check = await make(await serve(cards), http, model=None).check()
    assert (check.problem, check.unreachable, check.context_tokens) == (None, None, context)


@BOTH
async def test_key_is_the_problem_when_it_is_refused_and_is_not_quoted(
    http: EngineConnections, serve: Serve, make: Make
) -> None:
    check = await make(await serve([{"id": NAME}], key="right"), http, key="secret-but-wrong").check()
    assert "refused its API key (401)" in (check.problem or "")
    assert "secret-but-wrong" not in (check.problem or "")


@BOTH
async def test_model_is_the_problem_when_the_engine_has_it_not(
    http: EngineConnections, serve: Serve, make: Make
) -> None:
    check = await make(await serve([{"id": NAME}], answer=(404, UNKNOWN)), http, model="my-modl").check()
    assert "has no model 'my-modl' (did you mean 'my-model'?); it serves my-model" in (check.problem or "")


@pytest.mark.parametrize(
    ("cards", "answer"),
    [
        ([{"id": "another"}], (200, {})),
        (None, (200, {})),
        ([], (400, {"error": {"message": "max_tokens is not supported with this model"}})),
        ([{"id": "another"}], (503, {})),
    ],
    ids=["unlisted name works", "no list", "request refused", "busy"],
)
async def test_what_cannot_be_found_out_is_no_problem(
    http: EngineConnections, serve: Serve, cards: Any, answer: tuple[int, Any]
) -> None:
    check = await openai(await serve(cards, answer=answer), http).check()
    assert (check.problem, check.unreachable, check.warning) == (None, None, None)


async def test_base_url_without_the_route_is_warned_about(http: EngineConnections, serve: Serve) -> None:
    check = await openai(await serve(None, answer=(404, {"detail": "Not Found"})), http).check()
    assert check.problem is None and "(404); are its base URL and policy_model_name" in (check.warning or "")


async def test_key_is_the_problem_when_only_completions_want_it(http: EngineConnections, serve: Serve) -> None:
    check = await openai(await serve([], answer=(401, {})), http).check()
    assert "refused its API key" in (check.problem or "")


@BOTH
async def test_engine_that_is_not_there_is_unreachable_and_no_problem(http: EngineConnections, make: Make) -> None:
    check = await make("http://127.0.0.1:9", http).check()
    assert check.problem is None and "cannot be reached" in (check.unreachable or "")
