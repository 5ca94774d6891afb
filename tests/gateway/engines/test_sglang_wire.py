"""What SGLang says beside tokens: why its scheduler gave a request back, and which weights sampled which token."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from aiohttp import web

from nemo_gym.gateway.dialects.errors import overflow_of
from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    EngineError,
    EngineFailedError,
    EngineRateLimitedError,
    EngineRefusedError,
    Generation,
    Sampling,
    SglangEngine,
    TokenRequest,
    VllmEngine,
    WeightsSpan,
)
from nemo_gym_testing.gateway import FakeSglangEngine, FakeVllmEngine, Status
from nemo_gym_testing.gateway.engine import Answer, CallLog

REQUEST = TokenRequest("r-1", [5, 6, 7], Sampling(100))


def sglang(fake: FakeSglangEngine, http: EngineConnections) -> SglangEngine:
    return SglangEngine(EngineEndpoint("e0", fake.url), http)


class AbortingEngine(FakeSglangEngine):
    """Its scheduler gives every request back."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__()
        self._finish = {"type": "abort", "status_code": status, "message": message, "err_type": None}

    def answer(self, call: CallLog) -> Answer:
        meta = {"finish_reason": self._finish, "completion_tokens": 0, "output_token_logprobs": []}
        whole = {"text": "", "output_ids": [], "meta_info": meta}
        return Answer(whole, [whole])


class UpdatedEngine(FakeSglangEngine):
    """Its weights change after the third token."""

    def answer(self, call: CallLog) -> Answer:
        answer = super().answer(call)
        for part in (answer.whole, answer.events[-1]):
            part["meta_info"]["weight_version"] = "w1"
            part["meta_info"]["weight_versions"] = [
                {"version": "w0", "start": 0, "end": 3},
                {"version": "w1", "start": 3, "end": 8},
            ]
        return answer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("status", "expected"),
    [(400, EngineRefusedError), (503, EngineRateLimitedError), (500, EngineFailedError)],
)
async def test_request_given_back_by_the_scheduler_fails_by_its_reason(
    status: int, expected: type[EngineError], streamed: bool, http: EngineConnections
) -> None:
    async with AbortingEngine(status, "The request queue is full.") as fake:
        engine = sglang(fake, http)
        with pytest.raises(EngineError, match="queue is full") as caught:
            if streamed:
                async for _ in engine.stream(REQUEST):
                    pass
            else:
                await engine.generate(REQUEST)
    assert type(caught.value) is expected and caught.value.details["upstream_status"] == status


async def test_full_queue_is_no_news_about_health(http: EngineConnections) -> None:
    async with FakeSglangEngine() as fake:
        fake.faults.append(Status(503, b'{"detail": "The request queue is full."}'))
        with pytest.raises(EngineRateLimitedError) as caught:
            await sglang(fake, http).generate(REQUEST)
        assert not caught.value.unhealthy and caught.value.elsewhere
        fake.healthy = False
        with pytest.raises(EngineFailedError):  # while a probe that says 503 speaks of nothing else
            await sglang(fake, http).probe()


async def sample(engine: SglangEngine, streamed: bool, request: TokenRequest = REQUEST) -> Generation:
    if not streamed:
        return await engine.generate(request)
    *_, answer = [item async for item in engine.stream(request)]
    assert isinstance(answer, Generation)
    return answer


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_token_knows_its_weights_when_the_server_counts_them(
    streamed: bool, http: EngineConnections
) -> None:
    async with UpdatedEngine() as fake:
        engine = sglang(fake, http)
        answer = await sample(engine, streamed)
    assert answer.weights == WeightsSpan("w0", "w1")
    assert [(part.tokens, part.weights.first) for part in answer.segments] == [(3, "w0"), (5, "w1")]
    assert engine.weights_version == "w1"


async def test_stream_after_an_update_nobody_told_of_is_all_by_the_new_weights(http: EngineConnections) -> None:
    async with FakeSglangEngine() as fake:
        engine = sglang(fake, http)
        await engine.generate(REQUEST)
        fake.weights_version = "w1"
        answer = await sample(engine, streamed=True)
    assert answer.weights == WeightsSpan("w1", "w1")


class ExpandingEngine(FakeSglangEngine):
    """Counts an image as many tokens, and checks the length of a request, as SGLang does."""

    async def respond(self, request: web.Request, call: CallLog) -> web.StreamResponse:
        prompt = len(call.body["input_ids"]) + 50 * len(call.body.get("image_data", ()))
        asked = call.body["sampling_params"]["max_new_tokens"]
        if prompt >= 100:
            message = f"The input ({prompt} tokens) is longer than the model's context length (100 tokens)."
        elif prompt + asked > 100:
            message = (
                "Requested token count exceeds the model's maximum context length of 100 tokens. You requested a total"
                f" of {prompt + asked} tokens: {prompt} tokens from the input messages and {asked} tokens for the"
                " completion. Please reduce the number of tokens in the input messages or the completion to fit within"
                " the limit."
            )
        else:
            return await super().respond(request, call)
        error = orjson.dumps({"error": {"message": message, "code": 400}})
        if call.body["stream"]:
            return web.Response(body=b"data: " + error + b"\n\ndata: [DONE]\n\n")
        return web.Response(status=400, body=error)


@pytest.mark.parametrize("streamed", [False, True])
async def test_answer_gets_the_room_that_images_leave_by_the_servers_own_count(
    streamed: bool, http: EngineConnections
) -> None:
    async with ExpandingEngine() as fake:
        engine = sglang(fake, http)
        answer = await sample(engine, streamed, replace(REQUEST, sampling=Sampling(97), image_data=("one",)))
        assert answer.token_ids
        assert [call.body["sampling_params"]["max_new_tokens"] for call in fake.calls] == [97, 47]
        with pytest.raises(EngineRefusedError) as caught:
            await sample(engine, streamed, replace(REQUEST, sampling=Sampling(97), image_data=("one", "two")))
        overflow = overflow_of(caught.value.body)
        assert overflow is not None and (overflow.prompt_tokens, overflow.limit) == (103, 100)
        assert len(fake.calls) == 3, "what cannot fit is not asked again"


class CountingEngine(FakeSglangEngine):
    """Says with every answer that one version sampled all of it."""

    def answer(self, call: CallLog) -> Answer:
        answer = super().answer(call)
        for part in (answer.whole, answer.events[-1]):
            part["meta_info"]["weight_versions"] = [{"version": self.weights_version, "start": 0, "end": 8}]
        return answer


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("server", [FakeSglangEngine, CountingEngine])
@pytest.mark.parametrize("reported", ["default", "0"])
async def test_version_that_the_server_always_reports_is_no_news_against_the_trainers(
    reported: str, server: type[FakeSglangEngine], streamed: bool, http: EngineConnections
) -> None:
    async with server(weights_version=reported) as fake:
        engine = sglang(fake, http)
        assert (await sample(engine, streamed)).weights == WeightsSpan(reported, reported)
        for version in ("7", "8"):
            engine.weights_version = version  # by POST /weights, after an update that names no version
            assert (await sample(engine, streamed)).weights == WeightsSpan(version, version)
        fake.weights_version = "9"  # by an update that names it
        assert (await sample(engine, streamed)).weights.last == "9" == engine.weights_version
        told_first = sglang(fake, http)
        told_first.weights_version = "10"
        assert (await sample(told_first, streamed)).weights == WeightsSpan("10", "10")


@pytest.mark.parametrize("streamed", [False, True])
async def test_reported_version_replaces_the_configured_one_unless_it_names_none(
    streamed: bool, http: EngineConnections
) -> None:
    async with FakeSglangEngine(weights_version="default") as fake:
        engine = SglangEngine(EngineEndpoint("e0", fake.url), http, weights_version="0")
        assert (await sample(engine, streamed)).weights.last == "0"
        fake.weights_version = "5"
        assert (await sample(engine, streamed)).weights.last == "5"
        engine = SglangEngine(EngineEndpoint("e0", fake.url), http, weights_version="0")
        assert (await sample(engine, streamed)).weights.last == "5"


@pytest.mark.parametrize("streamed", [False, True])
async def test_server_that_forgot_its_version_has_restarted_with_other_weights(
    streamed: bool, http: EngineConnections
) -> None:
    async with FakeSglangEngine(weights_version="7") as fake:
        engine = SglangEngine(EngineEndpoint("e0", fake.url), http, weights_version="0")
        assert (await sample(engine, streamed)).weights.last == "7"
        fake.weights_version = "default"
        assert (await sample(engine, streamed)).weights.last == "default"
        engine.weights_version = "8"  # by POST /weights
        assert (await sample(engine, streamed)).weights.last == "8"


async def test_stream_asks_for_few_events(http: EngineConnections) -> None:
    async with FakeSglangEngine() as fake:
        engine = SglangEngine(EngineEndpoint("e0", fake.url), http, stream_interval=64)
        async for _ in engine.stream(REQUEST):
            pass
        await engine.generate(REQUEST)
    assert fake.calls[0].body["sampling_params"]["stream_interval"] == 64
    assert "stream_interval" not in fake.calls[1].body["sampling_params"]


async def test_overload_said_with_retry_after_is_a_rate_limit_on_every_wire(http: EngineConnections) -> None:
    async with FakeVllmEngine() as fake:
        fake.faults += [Status(503, headers={"Retry-After": "3"}), Status(503)]
        engine = VllmEngine(EngineEndpoint("e0", fake.url), http)
        with pytest.raises(EngineRateLimitedError) as caught:
            await engine.generate(REQUEST)
        assert caught.value.retry_after_s == 3.0
        with pytest.raises(EngineFailedError):
            await engine.generate(REQUEST)
