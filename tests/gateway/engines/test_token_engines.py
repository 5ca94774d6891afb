"""Token ids and logprobs arrive exactly as the engine sampled them, on every wire, streaming and not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from nemo_gym.gateway.engines import (
    EngineAnswerError,
    EngineAnswerTooLargeError,
    EngineConnections,
    EngineEndpoint,
    EngineRefusedError,
    FinishReason,
    Generation,
    Sampling,
    SglangEngine,
    TokenDelta,
    TokenEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.engines.http import without_echo
from nemo_gym_testing.gateway import (
    FakeEngine,
    FakeSglangEngine,
    FakeVllmEngine,
    Garbage,
    Hang,
    Sampled,
    hashed_sampler,
)
from nemo_gym_testing.gateway.sampler import Sampler
from tests.gateway.engines.test_connections import JSON, serving

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
WIRES = ("vllm-completions", "vllm-generate", "sglang", "sglang-incremental")
STREAMING = ("vllm-completions", "sglang", "sglang-incremental")
PROMPT = [5, 6, 7, 8]


@contextlib.asynccontextmanager
async def engine_on(
    wire: str, http: EngineConnections, length: int = 8, sampler: Sampler | None = None
) -> AsyncIterator[tuple[FakeEngine, TokenEngine]]:
    fake: FakeEngine
    engine: TokenEngine
    sampler = sampler or hashed_sampler(length)
    if wire.startswith("vllm"):
        fake = FakeVllmEngine(sampler)
    else:
        fake = FakeSglangEngine(sampler, incremental=wire.endswith("incremental"))
    async with fake:
        endpoint = EngineEndpoint("e0", fake.url, model="policy", api_key="sk-secret")
        if wire == "vllm-generate":
            engine = VllmEngine(endpoint, http, route="generate")
        else:
            engine = VllmEngine(endpoint, http) if wire.startswith("vllm") else SglangEngine(endpoint, http)
        yield fake, engine


def request(max_tokens: int = 100, **sampling: object) -> TokenRequest:
    return TokenRequest("r-1", PROMPT, Sampling(max_tokens, **sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", WIRES)
async def test_generation_holds_exactly_the_sampled_tokens(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        answer = await engine.generate(request())
    logged = fake.calls[0]
    assert answer.token_ids == logged.token_ids and len(answer.token_ids) == 8
    assert answer.logprobs == logged.logprobs
    assert (answer.finish_reason, answer.engine) == (FinishReason.STOP, "e0")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("wire", WIRES)
async def test_answer_of_more_tokens_than_were_asked_for_is_dropped(
    wire: str, streamed: bool, http: EngineConnections
) -> None:
    endless = hashed_sampler(300)
    async with engine_on(wire, http, sampler=lambda prompt, _, call: endless(prompt, 300, call)) as (_, engine):
        seen = 0
        with pytest.raises(EngineAnswerTooLargeError, match="the request allowed 100") as caught:
            if not streamed:
                await engine.generate(request())
            async for item in engine.stream(request()):
                assert isinstance(item, TokenDelta)
                seen += len(item.token_ids)
        assert seen <= 100
        assert not caught.value.elsewhere and not caught.value.unhealthy


@pytest.mark.parametrize("wire", WIRES)
async def test_stream_deltas_joined_are_the_generation(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        items = [item async for item in engine.stream(request())]
    *deltas, whole = items
    assert isinstance(whole, Generation) and all(isinstance(delta, TokenDelta) for delta in deltas)
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids == fake.calls[0].token_ids
    assert tuple(value for delta in deltas for value in delta.logprobs) == whole.logprobs == fake.calls[0].logprobs
    if wire in STREAMING:
        assert len(deltas) == 8


async def test_stream_reads_logprobs_that_are_given_as_content(http: EngineConnections) -> None:
    choices = (
        b'{"token_ids":[11,12],"logprobs":{"content":[{"token":"a","logprob":-0.5},{"token":"b","logprob":-1.5}]}}',
        b'{"token_ids":[13],"logprobs":{"token_logprobs":[-2.5],"content":null},"finish_reason":"stop"}',
    )
    events = b"".join(b'data: {"choices":[%b]}\n\n' % choice for choice in choices) + b"data: [DONE]\n\n"
    async with serving(JSON + b"Content-Length: %d\r\n\r\n%b" % (len(events), events)) as server:
        engine = VllmEngine(EngineEndpoint("e0", f"http://localhost:{server.port}"), http)
        *deltas, whole = [item async for item in engine.stream(request())]
    assert deltas == [TokenDelta((11, 12), (-0.5, -1.5)), TokenDelta((13,), (-2.5,))]
    assert isinstance(whole, Generation)
    assert (whole.token_ids, whole.logprobs) == ((11, 12, 13), (-0.5, -1.5, -2.5))


@pytest.mark.parametrize("wire", WIRES)
async def test_finish_reason_is_length_when_the_budget_is_used_up(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (_, engine):
        answer = await engine.generate(request(max_tokens=3))
    assert (len(answer.token_ids), answer.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize("wire", WIRES)
async def test_sampling_parameters_arrive_in_the_engines_spelling(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        await engine.generate(request(9, temperature=0.5, top_k=7, seed=11, stop=("END",), stop_token_ids=(4,)))
    body = fake.calls[0].body
    flat = body.get("sampling_params", body)
    assert (flat["temperature"], flat["top_k"], flat["stop"], flat["stop_token_ids"]) == (0.5, 7, ["END"], [4])
    assert flat.get("max_tokens", flat.get("max_new_tokens")) == 9
    assert flat.get("seed", flat.get("sampling_seed")) == 11
    assert "top_p" not in flat, "a parameter nobody gave is the engine's own to choose"
    assert fake.calls[0].headers["Authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize("wire", WIRES)
async def test_engine_stops_when_the_caller_is_cancelled(
    wire: str, http: EngineConnections, eventually: Eventually
) -> None:
    async with engine_on(wire, http) as (fake, engine):
        fake.faults.append(Hang())
        call = asyncio.create_task(engine.generate(request()))
        await eventually(lambda: len(fake.calls) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await eventually(lambda: fake.calls[0].outcome == "cancelled")
        assert (await engine.generate(request())).token_ids, "the engine is usable afterwards"


@pytest.mark.parametrize("wire", STREAMING)
async def test_engine_stops_when_a_stream_is_closed_in_the_middle(
    wire: str, http: EngineConnections, eventually: Eventually
) -> None:
    async with engine_on(wire, http) as (fake, engine):
        fake.event_gate = asyncio.Semaphore(2)
        stream = engine.stream(request())
        assert isinstance(await anext(stream), TokenDelta)
        await stream.aclose()
        await eventually(lambda: fake.calls[0].outcome == "cancelled")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("body", [b"<html></html>", b"[]", b"{}", b'{"choices": [], "meta_info": {}}'])
async def test_answer_that_breaks_the_protocol_is_an_engine_answer_error(
    wire: str, body: bytes, http: EngineConnections
) -> None:
    async with engine_on(wire, http) as (fake, engine):
        fake.faults.append(Garbage(body))
        with pytest.raises(EngineAnswerError, match="e0"):
            await engine.generate(request())


@pytest.mark.parametrize("wire", WIRES)
async def test_answer_is_refused_when_a_logprob_is_missing(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        original = fake.answer

        def short(call):  # type: ignore[no-untyped-def]
            answer = original(call)
            if "meta_info" in answer.whole:
                answer.whole["meta_info"]["output_token_logprobs"].pop()
            else:
                logprobs = answer.whole["choices"][0]["logprobs"]
                (logprobs.get("content") or logprobs.get("token_logprobs")).pop()
            return answer

        fake.answer = short  # type: ignore[method-assign]
        with pytest.raises(EngineAnswerError):
            await engine.generate(request())


@pytest.mark.parametrize("prompt_json", [None, b"[5,6,7,8]"])
async def test_vllm_answer_is_refused_when_it_read_another_prompt(
    http: EngineConnections, prompt_json: bytes | None
) -> None:
    for echoed in ([1, *PROMPT], [*PROMPT, 9], [5, 6, 7, 80], []):
        async with engine_on("vllm-completions", http) as (fake, engine):
            original = fake.answer

            def with_another(call, original=original, echoed=echoed):  # type: ignore[no-untyped-def]
                answer = original(call)
                answer.whole["choices"][0]["prompt_token_ids"] = echoed
                return answer

            fake.answer = with_another  # type: ignore[method-assign]
            with pytest.raises(EngineAnswerError, match=f"{len(echoed)} prompt tokens that differ from the 4 sent"):
                await engine.generate(replace(request(), prompt_json=prompt_json))


@pytest.mark.parametrize("wire", WIRES)
async def test_prompt_given_as_json_is_the_prompt_that_the_engine_reads(http: EngineConnections, wire: str) -> None:
    async with engine_on(wire, http) as (fake, engine):
        plain = await engine.generate(request())
        assert await engine.generate(replace(request(), prompt_json=b"[5,6,7,8]")) is not None
        streamed = [item async for item in engine.stream(replace(request(), prompt_json=b"[5,6,7,8]"))]
        assert isinstance(streamed[-1], Generation)
        assert len(streamed[-1].token_ids) == len(plain.token_ids)
        key = {"vllm-completions": "prompt", "vllm-generate": "token_ids"}.get(wire, "input_ids")
        assert [call.body[key] for call in fake.calls] == [PROMPT] * 3


@pytest.mark.parametrize(
    ("raw", "left"),
    [
        (b'{"prompt_token_ids":[1,2],"a":1}', b'{"prompt_token_ids":null,"a":1}'),
        (b'{"prompt_token_ids":[1,2,3]}', b'{"prompt_token_ids":[1,2,3]}'),
        (b'{"prompt_token_ids":[1, 2]}', b'{"prompt_token_ids":[1, 2]}'),
        (rb'{"text":"\"prompt_token_ids\":[1,2]"}', rb'{"text":"\"prompt_token_ids\":[1,2]"}'),
        (b"{}", b"{}"),
    ],
)
def test_echo_is_left_out_only_where_it_is_the_prompt_to_the_byte(raw: bytes, left: bytes) -> None:
    assert without_echo(raw, b"[1,2]") == left
    assert without_echo(raw, None) == raw


async def test_weights_span_shows_an_update_during_sampling(http: EngineConnections, eventually: Eventually) -> None:
    async with engine_on("sglang", http) as (fake, engine):
        assert (await engine.generate(request())).weights.last == "w0"
        fake.gate.clear()
        call = asyncio.create_task(engine.generate(request()))
        await eventually(lambda: len(fake.calls) == 2)
        fake.weights_version = "w1"
        fake.gate.set()
        span = (await call).weights
    assert (span.first, span.last) == ("w0", "w1")


async def test_weights_span_follows_the_trainer_when_the_engine_does_not_tell(http: EngineConnections) -> None:
    async with engine_on("vllm-completions", http) as (_, engine):
        engine.weights_version = "step-7"
        span = (await engine.generate(request())).weights
    assert (span.first, span.last) == ("step-7", "step-7")


async def test_images_go_to_sglang_and_are_refused_for_vllm(http: EngineConnections) -> None:
    pictured = TokenRequest("r", PROMPT, Sampling(4), ("data:image/png;base64,AA==",))
    async with engine_on("sglang", http) as (fake, engine):
        await engine.generate(pictured)
    assert fake.calls[0].body["image_data"] == ["data:image/png;base64,AA=="]
    async with engine_on("vllm-completions", http) as (fake, engine):
        with pytest.raises(EngineRefusedError, match="images"):
            await engine.generate(pictured)
    assert fake.calls == []


async def test_long_answer_survives_any_cut_of_the_stream(http: EngineConnections) -> None:
    def many(prompt, budget, call):  # type: ignore[no-untyped-def]
        return Sampled(tuple(range(3000)), tuple(-i / 4096 for i in range(3000)), stopped=True)

    async with engine_on("vllm-completions", http) as (fake, engine):
        fake.sampler = many
        *_, whole = [item async for item in engine.stream(request(5000))]
    assert isinstance(whole, Generation)
    assert whole.token_ids == tuple(range(3000)) and whole.logprobs[2999] == -2999 / 4096


@pytest.mark.parametrize("wire", WIRES)
async def test_connection_is_used_again_after_a_whole_answer(wire: str, http: EngineConnections) -> None:
    async with engine_on(wire, http) as (fake, engine):
        for _ in range(3):
            await engine.generate(request())
            async for _ in engine.stream(request()):
                pass
    assert len({call.connection for call in fake.calls}) == 1 and len(fake.calls) == 6
