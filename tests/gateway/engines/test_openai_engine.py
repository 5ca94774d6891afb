from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from nemo_gym.gateway.engines import (
    EngineConfig,
    EngineConnections,
    EngineCredentialError,
    EngineEndpoint,
    EngineFailedError,
    EngineLostError,
    EngineRefusedError,
    OpenAIEngine,
    TextEngine,
    TokenEngine,
    sampled_text,
)
from nemo_gym_testing.gateway import CutOff, FakeOpenAIEngine, Status

BODY = {"model": "asked", "messages": [{"role": "user", "content": "hi"}], "x_unknown": 1}
ROUTE = "/chat/completions"
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def engine(fake: FakeOpenAIEngine, http: EngineConnections, **options: bool) -> OpenAIEngine:
    return OpenAIEngine(EngineEndpoint("e0", fake.url, model="served"), http, **options)


async def test_reply_passes_untouched_and_the_model_name_is_the_engines(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        reply = await engine(fake, http).complete(ROUTE, BODY)
    sent = fake.calls[0].body
    assert (sent["model"], sent["x_unknown"], sent["stream"]) == ("served", 1, False)
    assert orjson.loads(reply.body)["id"] == "chatcmpl-1" and reply.engine == "e0"
    assert sampled_text(orjson.loads(reply.body)["choices"][0]) is None, "nobody asked for logprobs"


async def test_sampled_text_has_a_logprob_for_each_token_when_the_endpoint_offers_them(
    http: EngineConnections,
) -> None:
    async with FakeOpenAIEngine() as fake:
        reply = await engine(fake, http, logprobs=True).complete(ROUTE, BODY)
    choice = orjson.loads(reply.body)["choices"][0]
    sampled = sampled_text(choice)
    assert sampled is not None and sampled.token_ids is None
    assert sampled.logprobs == fake.calls[0].logprobs
    assert b"".join(sampled.tokens).decode() == choice["message"]["content"]


async def test_stream_passes_as_bytes_with_usage_at_the_end(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        raw = b"".join([chunk async for chunk in engine(fake, http).stream_text(ROUTE, BODY)])
    assert raw.endswith(b"data: [DONE]\n\n") and b'"usage"' in raw and raw.count(b"data: ") == 11


async def test_stream_raises_when_the_endpoint_breaks_off(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(CutOff(2))
        with pytest.raises(EngineLostError):
            async for _ in engine(fake, http).stream_text(ROUTE, BODY):
                pass


async def test_endpoint_stops_when_the_stream_is_closed(http: EngineConnections, eventually: Eventually) -> None:
    async with FakeOpenAIEngine() as fake:
        fake.event_gate = asyncio.Semaphore(1)
        stream = engine(fake, http).stream_text(ROUTE, BODY)
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: fake.calls[0].outcome == "cancelled")


async def test_refusal_keeps_the_endpoints_words_for_the_harness(http: EngineConnections) -> None:
    said = b'{"error": {"message": "context length exceeded", "code": "context_length_exceeded"}}'
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(Status(400, said))
        with pytest.raises(EngineRefusedError) as caught:
            await engine(fake, http).complete(ROUTE, BODY)
    assert caught.value.body == said and caught.value.details["upstream_status"] == 400


async def test_engine_is_a_text_engine_and_no_token_engine(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        made = engine(fake, http)
        await made.probe()
    assert isinstance(made, TextEngine) and not isinstance(made, TokenEngine)
    assert fake.probes == 1


@pytest.mark.parametrize(
    ("listing", "health", "well"),
    [(500, 200, True), (500, 503, False), (500, 404, False), (503, 200, False), (404, 404, True)],
)
async def test_endpoint_that_fails_at_listing_its_models_is_asked_whether_it_is_well(
    http: EngineConnections, listing: int, health: int, well: bool
) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.Response(status=listing)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(status=health)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", healthy)
    async with TestServer(app) as server:
        probe = OpenAIEngine(EngineEndpoint("e0", str(server.make_url("/v1"))), http).probe()
        if well:
            with contextlib.suppress(EngineRefusedError):  # no such route: nothing that is counted
                await probe
        else:
            with pytest.raises(EngineFailedError, match=str(listing)):
                await probe


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("streamed", [False, True])
async def test_refused_key_is_a_credential_error_that_does_not_quote_it(
    status: int, streamed: bool, http: EngineConnections
) -> None:
    said = b'{"error": {"message": "Incorrect API key provided: sk-secret"}}'
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(Status(status, said))
        made = OpenAIEngine(EngineEndpoint("e0", fake.url, api_key="sk-secret"), http)
        with pytest.raises(EngineCredentialError) as caught:
            if streamed:
                async for _ in made.stream_text(ROUTE, BODY):
                    pass
            else:
                await made.complete(ROUTE, BODY)
    assert "sk-secret" not in str(caught.value) + str(caught.value.as_problem()) and "'e0'" in str(caught.value)
    assert caught.value.details["upstream_status"] == status and not caught.value.retryable


async def test_missing_route_is_a_refusal_that_says_what_the_endpoint_said(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        with pytest.raises(EngineRefusedError, match="404"):
            await engine(fake, http).complete("/responses", {"input": "hi"})


@pytest.mark.parametrize(("configured", "sent"), [(None, "Bearer sk-env"), ("sk-own", "Bearer sk-own")])
async def test_key_comes_from_the_environment_when_none_is_configured(
    configured: str | None, sent: str, http: EngineConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    async with FakeOpenAIEngine() as fake:
        given = {"type": "openai", "base_url": fake.url, "api_key": configured}
        made = TypeAdapter(EngineConfig).validate_python(given).make(http)
        assert isinstance(made, OpenAIEngine)
        await made.complete(ROUTE, BODY)
    assert fake.calls[0].headers["Authorization"] == sent and "sk-" not in repr(made.endpoint)


async def test_key_of_the_environment_goes_to_no_other_kind_of_engine(
    http: EngineConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    made = TypeAdapter(EngineConfig).validate_python({"type": "vllm", "base_url": "http://127.0.0.1:1"}).make(http)
    assert made.endpoint.api_key is None


async def test_streamed_chat_asks_for_logprobs_and_usage_when_they_are_configured(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        async for _ in engine(fake, http, logprobs=True).stream_text(ROUTE, BODY):
            pass
    sent = fake.calls[0].body
    assert sent["logprobs"] is True and sent["stream"] is True and sent["stream_options"] == {"include_usage": True}
