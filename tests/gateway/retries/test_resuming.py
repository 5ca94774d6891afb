"""An answer that broke off goes on elsewhere: each token once, with the logprob of whoever sampled it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    EngineLostError,
    FinishReason,
    Generation,
    Sampling,
    SglangEngine,
    TokenDelta,
    TokenEngine,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.engines.calls import EngineCalls, RetryConfig, TokenCalls
from nemo_gym.gateway.engines.router import Router
from nemo_gym_testing.gateway import Abort, CutOff, FakeEngine, FakeSglangEngine, FakeVllmEngine, Status

PROMPT = [5, 6, 7]
Pair = tuple[list[FakeEngine], TokenCalls[TokenEngine]]


@pytest.fixture(params=["vllm", "sglang"])
async def pair(request: pytest.FixtureRequest, http: EngineConnections) -> AsyncIterator[Pair]:
    """Two engines that hold different weights."""
    async with AsyncExitStack() as stack:
        router: Router[TokenEngine] = Router()
        fakes: list[FakeEngine] = []
        for number in range(2):
            version = f"w{number}"
            fake: FakeEngine = (
                FakeVllmEngine(weights_version=version)
                if request.param == "vllm"
                else FakeSglangEngine(weights_version=version)
            )
            fakes.append(await stack.enter_async_context(fake))
            endpoint = EngineEndpoint(f"e{number}", fake.url)
            engine = VllmEngine(endpoint, http) if request.param == "vllm" else SglangEngine(endpoint, http)
            engine.weights_version = version
            router.add(engine)
        yield (
            fakes,
            TokenCalls(EngineCalls(router, RetryConfig(first_backoff_s=0.001, keep_partial_answers=True))),
        )


def asked(**sampling: object) -> TokenRequest:
    return TokenRequest("r", PROMPT, Sampling(int(sampling.pop("max_tokens", 100)), **sampling))  # type: ignore[call-overload, arg-type]


def prompt_of(fake: FakeEngine, call: int = 0) -> list[int]:
    body = fake.calls[call].body
    return list(body.get("prompt") or body.get("input_ids") or ())


async def test_answer_is_untouched_when_nothing_happens(pair: Pair) -> None:
    fakes, calls = pair
    answer = await calls.generate("s", asked())
    assert answer.token_ids == fakes[0].calls[0].token_ids and answer.segments == ()


@pytest.mark.parametrize("after", [1, 4, 7])
async def test_answer_goes_on_after_the_engine_broke_off(pair: Pair, after: int) -> None:
    fakes, calls = pair
    fakes[0].faults.append(CutOff(after))
    fakes[0].faults.append(Status(500))  # should it be asked again
    items = [item async for item in calls.stream("s", asked())]
    *deltas, whole = items
    assert isinstance(whole, Generation)
    broken, finished = fakes[0].calls[0], fakes[1].calls[0]
    assert whole.token_ids == (*broken.token_ids[:after], *finished.token_ids)
    assert whole.logprobs == (*broken.logprobs[:after], *finished.logprobs)
    assert prompt_of(fakes[1]) == [*PROMPT, *broken.token_ids[:after]]
    handed_on = [token for delta in deltas if isinstance(delta, TokenDelta) for token in delta.token_ids]
    assert tuple(handed_on) == whole.token_ids
    assert [(s.engine, s.tokens, s.weights.last) for s in whole.segments] == [("e0", after, "w0"), ("e1", 8, "w1")]
    assert (whole.weights.first, whole.weights.last) == ("w0", "w1")


async def test_answer_goes_on_after_an_abort_for_new_weights(pair: Pair) -> None:
    fakes, calls = pair
    fakes[0].faults.append(Abort(3))
    answer = await calls.generate("s", asked())
    first, second = fakes[0].calls
    assert answer.token_ids == (*first.token_ids, *second.token_ids) and len(first.token_ids) == 3
    assert answer.finish_reason is FinishReason.STOP
    assert [segment.tokens for segment in answer.segments] == [3, 8]


async def test_budget_counts_over_all_pieces(pair: Pair) -> None:
    fakes, calls = pair
    fakes[0].faults.append(Abort(3))
    answer = await calls.generate("s", asked(max_tokens=5))
    assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)
    fakes[0].faults.append(Abort(5))
    answer = await calls.generate("s", asked(max_tokens=5))
    assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)
    assert sum(len(fake.calls) for fake in fakes) == 3, "nothing is left to ask for"


@pytest.mark.parametrize("sampling", [{"stop": ("END",)}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}])
async def test_answer_that_depends_on_more_than_its_ids_is_not_continued_but_sampled_again(
    pair: Pair, sampling: dict[str, object]
) -> None:
    fakes, calls = pair
    fakes[0].faults.append(CutOff(3))
    with pytest.raises(EngineLostError):  # the caller of a stream has the first tokens already
        async for _ in calls.stream("s", asked(**sampling)):
            pass
    fakes[0].faults.append(CutOff(3))
    answer = await calls.generate("s", asked(**sampling))
    (whole,) = [call for fake in fakes for call in fake.answered]
    assert answer.token_ids == whole.token_ids and answer.segments == ()


@pytest.mark.parametrize("after", [0, 1])
async def test_engines_that_only_ever_abort_end_the_answer(pair: Pair, after: int) -> None:
    fakes, calls = pair
    fakes[0].faults.extend([Abort(after)] * 50)
    answer = await calls.generate("s", asked())
    assert (len(answer.token_ids), answer.finish_reason) == (17 * after, FinishReason.ABORT)
    assert len(fakes[0].calls) == 17


async def test_request_ids_are_unique_over_tries_and_pieces(pair: Pair) -> None:
    fakes, calls = pair
    fakes[0].faults.extend([Status(500), CutOff(2)])
    fakes[1].faults.extend([CutOff(2), Abort(1)])
    await calls.generate("s", asked())
    ids = [call.body.get("request_id") or call.body.get("rid") for fake in fakes for call in fake.calls]
    assert len(ids) >= 3 and len(set(ids)) == len(ids)
