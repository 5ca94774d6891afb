"""The gateway's vLLM wire before a real vLLM (CPU, float32, a tiny random policy)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    EngineRefusedError,
    FinishReason,
    Generation,
    Sampling,
    TokenDelta,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.tokens import PolicyTokenizer
from nemo_gym.rollouts.trajectories import trajectories_of_rows
from nemo_gym_testing.gateway.real import recomputed_logprobs
from tests.engines.conftest import MAX_MODEL_LEN, RealVllm, count_of
from tests.engines.recordings import ask, recorded, strange

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-3
"""Of a logprob, between two programs that compute in float32."""
TEXT = "<|im_start|>user\nName three colours, one per line.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def prompt(vllm: RealVllm) -> list[int]:
    return PolicyTokenizer.load(vllm.policy).encode(TEXT)


async def running(url: str) -> float:
    """Requests that the engine is sampling for, or has queued, by its own metrics."""
    return await count_of(url, "vllm:num_requests_running", "vllm:num_requests_waiting")


async def test_engine_says_its_context_and_that_it_serves_the_policy(vllm: RealVllm, engine: VllmEngine) -> None:
    check = await engine.check()
    assert (check.problem, check.unreachable, check.context_tokens) == (None, None, MAX_MODEL_LEN)
    text = "naïve 東京 12345\n\tdef f(x): return x"
    assert await engine.tokenize(text) == PolicyTokenizer.load(vllm.policy).encode(text)


async def test_unknown_model_is_named_before_the_first_call(vllm: RealVllm) -> None:
    http = EngineConnections()
    check = await VllmEngine(EngineEndpoint("e0", vllm.url, model="tinny"), http).check()
    assert "has no model 'tinny' (did you mean 'tiny'?)" in (check.problem or "")
    await http.aclose()


@pytest.mark.parametrize("route", ["completions", "generate"])
async def test_sampled_tokens_come_with_the_logprobs_that_the_weights_give(
    vllm: RealVllm, prompt: list[int], route: str
) -> None:
    http = EngineConnections()
    engine = VllmEngine(EngineEndpoint("e0", vllm.url, model="tiny"), http, route=route)  # type: ignore[arg-type]
    answers = [
        await engine.generate(TokenRequest(f"{route}-{seed}", prompt, Sampling(200, temperature=1.0, seed=seed)))
        for seed in range(4)
    ]
    await http.aclose()
    told = recomputed_logprobs(vllm.policy, [[*prompt, *answer.token_ids] for answer in answers])
    for answer, logprobs in zip(answers, told, strict=True):
        assert answer.token_ids and len(answer.token_ids) == len(answer.logprobs)
        assert list(answer.logprobs) == pytest.approx(logprobs[len(prompt) :], abs=TOLERANCE)
    assert len({answer.token_ids for answer in answers}) == 4


async def test_stream_brings_the_tokens_of_the_whole_answer(engine: VllmEngine, prompt: list[int]) -> None:
    request = TokenRequest("whole", prompt, Sampling(120, temperature=1.0, seed=7, ignore_eos=True))
    whole = await engine.generate(request)
    pieces, last = [], None
    async for piece in engine.stream(TokenRequest("streamed", prompt, request.sampling)):
        if isinstance(piece, TokenDelta):
            pieces.append(piece)
        else:
            last = piece
    assert isinstance(last, Generation) and last.finish_reason is FinishReason.LENGTH
    assert last.token_ids == whole.token_ids == tuple(one for piece in pieces for one in piece.token_ids)
    assert last.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
    assert len(pieces) > 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_call_that_is_given_up_frees_its_place_in_the_engine(
    vllm: RealVllm, engine: VllmEngine, prompt: list[int], streamed: bool
) -> None:
    request = TokenRequest(f"abandoned-{streamed}", prompt, Sampling(15_000, temperature=1.0, ignore_eos=True))

    async def read() -> None:
        if not streamed:
            await engine.generate(request)
        async for _ in engine.stream(request):
            pass

    call = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while not await running(vllm.url):
            assert not call.done()
            await asyncio.sleep(0.05)
        call.cancel()
        while await running(vllm.url):  # noqa: ASYNC110 - only the engine's metrics tell
            await asyncio.sleep(0.05)


async def test_request_that_does_not_fit_is_refused_as_the_requests_fault(
    engine: VllmEngine, prompt: list[int]
) -> None:
    with pytest.raises(EngineRefusedError, match=str(MAX_MODEL_LEN)):
        await engine.generate(TokenRequest("too-long", prompt, Sampling(MAX_MODEL_LEN + 1)))


async def test_engine_answers_as_it_was_recorded(vllm: RealVllm) -> None:
    found = await ask("vllm", vllm.url)
    known = recorded("vllm")
    assert [one for name in known for one in strange(known[name], found[name], name)] == []


async def test_run_keeps_every_sampled_token_although_the_directory_names_a_longer_context(
    vllm: RealVllm, tmp_path: Path
) -> None:
    """No limit is set by hand: the first real vLLM failed every row of such a run."""
    output = tmp_path / "rollouts.jsonl"
    run = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("ng_run"), "agent=simple_agent", "environment=math", "model=vllm"),
        *(f"policy_base_url={vllm.url}", "policy_model_name=tiny", f"policy_path={vllm.policy}"),
        *("input=resources_servers/math/data/example.jsonl", f"output={output}", "num_repeats=2"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await run.communicate()
    assert run.returncode == 0, said.decode()
    assert f"conversations end at {MAX_MODEL_LEN}" in said.decode()
    trajectories = [one for row in trajectories_of_rows(output) for one in row]
    assert len(trajectories) == 12
    told = recomputed_logprobs(vllm.policy, [[*one.prompt_ids, *one.response_ids] for one in trajectories])
    for one, logprobs in zip(trajectories, told, strict=True):
        assert one.logprobs is not None and all(one.response_mask)
        assert list(one.logprobs) == pytest.approx(logprobs[len(one.prompt_ids) :], abs=TOLERANCE)
