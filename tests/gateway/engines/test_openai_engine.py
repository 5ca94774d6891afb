from __future__ import annotations

import asyncio
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
    EngineRefusedError,
    OpenAIEngine,
    TokenEngine,
)
from nemo_gym.gateway.engines.openai import completion_in, tokens_in
from nemo_gym.gateway.engines.types import Engine
from nemo_gym_testing.gateway import FakeOpenAIEngine, Status

BODY = {"model": "asked", "messages": [{"role": "user", "content": "hi"}], "x_unknown": 1}
ROUTE = "/chat/completions"
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def engine(fake: FakeOpenAIEngine, http: EngineConnections, **options: bool) -> OpenAIEngine:
    return OpenAIEngine(EngineEndpoint("e0", fake.url, model="served"), http, **options)


async def test_reply_passes_untouched_and_the_model_name_is_the_engines(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        asked = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        reply = await engine(fake, http).complete(ROUTE, asked)
    sent = fake.calls[0].body
    assert (sent["model"], sent["x_unknown"], sent["stream"]) == ("served", 1, False)
    assert "stream_options" not in sent, "OpenAI refuses it without a stream"
    assert orjson.loads(reply.body)["id"] == "chatcmpl-1" and reply.engine == "e0"
    assert not completion_in(reply.body).entries, "nobody asked for logprobs"


async def test_sampled_text_has_a_logprob_for_each_token_when_the_endpoint_offers_them(
    http: EngineConnections,
) -> None:
    async with FakeOpenAIEngine() as fake:
        reply = await engine(fake, http, logprobs=True).complete(ROUTE, BODY)
    completion = completion_in(reply.body)
    sampled = tokens_in(completion.entries, completion.token_ids)
    assert sampled is not None and sampled.token_ids is None
    assert sampled.logprobs == fake.calls[0].logprobs
    assert b"".join(sampled.tokens).decode() == completion.message["content"]


async def test_refusal_keeps_the_endpoints_words_for_the_harness(http: EngineConnections) -> None:
    said = b'{"error": {"message": "context length exceeded", "code": "context_length_exceeded"}}'
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(Status(400, said))
        with pytest.raises(EngineRefusedError) as caught:
            await engine(fake, http).complete(ROUTE, BODY)
    assert caught.value.body == said and caught.value.details["upstream_status"] == 400


RENAMED = (
    b'{"error": {"message": "Unsupported parameter: \'max_tokens\' is not supported with this model. Use'
    b' \'max_completion_tokens\' instead.", "param": "max_tokens", "code": "unsupported_parameter"}}'
)


async def test_token_limit_gets_the_name_that_the_endpoint_asks_for(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        fake.faults += [Status(400, RENAMED)] * 3
        made = engine(fake, http)
        asked = {**BODY, "max_tokens": 9}
        await asyncio.gather(*(made.complete(ROUTE, asked) for _ in range(3)))
        assert len(fake.answered) == 3
        await made.complete(ROUTE, asked)
        await made.complete(ROUTE, {**asked, "max_completion_tokens": 7})
        assert len(fake.calls) == 8, "the endpoint was asked only once more"
    sent = [call.body for call in fake.answered]
    assert [body["max_completion_tokens"] for body in sent] == [9, 9, 9, 9, 7]
    assert not any("max_tokens" in body for body in sent)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (RENAMED, {}),
        (b"'max_tokens' or 'max_completion_tokens' is too large: 9000", {"max_tokens": 9000}),
        (RENAMED, {"max_completion_tokens": 9}),
    ],
)
async def test_refusal_that_another_name_of_the_limit_cannot_mend_is_final(
    http: EngineConnections, said: bytes, asked: dict[str, int]
) -> None:
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(Status(400, said))
        made = engine(fake, http)
        with pytest.raises(EngineRefusedError):
            await made.complete(ROUTE, {**BODY, **asked})
        await made.complete(ROUTE, {**BODY, "max_tokens": 9})
    assert len(fake.calls) == 2 and fake.calls[-1].body["max_tokens"] == 9


async def test_engine_is_no_token_engine(http: EngineConnections) -> None:
    async with FakeOpenAIEngine() as fake:
        made = engine(fake, http)
        await made.probe()
    assert isinstance(made, Engine) and not isinstance(made, TokenEngine)
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
            await probe
        else:
            with pytest.raises(EngineFailedError, match=str(listing)):
                await probe


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_key_is_a_credential_error_that_does_not_quote_it(status: int, http: EngineConnections) -> None:
    said = b'{"error": {"message": "Incorrect API key provided: sk-secret"}}'
    async with FakeOpenAIEngine() as fake:
        fake.faults.append(Status(status, said))
        made = OpenAIEngine(EngineEndpoint("e0", fake.url, api_key="sk-secret"), http)
        with pytest.raises(EngineCredentialError) as caught:
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
