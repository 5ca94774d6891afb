"""Tiny engines on both wires: tokens and logprobs are the model's own, however the call goes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineFailedError,
    EngineLostError,
    EngineRefusedError,
    FinishReason,
    Generation,
    Sampling,
    TokenDelta,
    TokenRequest,
)
from nemo_gym_testing.gateway import Abort, CutOff, Status
from nemo_gym_testing.gateway.chance import faults_by_chance
from nemo_gym_testing.gateway.tiny import FAMILIES, CallView, EngineCall, read_log, recompute
from nemo_gym_testing.gateway.tiny.engine import Wire
from tests.gateway.testing.runs import TOOLS, client, policy, policy_dir, served, user

WIRES: tuple[Wire, ...] = ("vllm", "sglang")
FAMILY = "chatml_think"
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


def prompt(text: str = "hello", family: str = FAMILY) -> list[int]:
    return policy(family).encode(policy(family).render([user(text)], tools=TOOLS))


def request(text: str = "hello", max_tokens: int = 60, name: str = "r", **sampling: object) -> TokenRequest:
    return TokenRequest(name, prompt(text), Sampling(max_tokens, **sampling))  # type: ignore[arg-type]


def own_logprobs(prompt_ids: list[int], ids: tuple[int, ...], family: str = FAMILY) -> list[float]:
    return recompute(policy_dir(family), [*prompt_ids, *ids])[len(prompt_ids) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("wire", WIRES)
async def test_answer_holds_the_logged_tokens_and_the_models_own_logprobs(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http) as (engine, caller):
        answer = await caller.generate(request())
        *deltas, streamed = [item async for item in caller.stream(request(seed=4, temperature=0.7, top_p=0.9))]
    assert isinstance(streamed, Generation)
    for given, call in zip((answer, streamed), engine.log.calls, strict=True):
        assert given.token_ids == tuple(call.token_ids) and given.logprobs == tuple(call.logprobs)
        assert given.logprobs == pytest.approx(own_logprobs(prompt(), given.token_ids), abs=1e-5)
        assert call.outcome == "answered" and call.sent == len(call.token_ids)
    assert len(deltas) == len(streamed.token_ids)
    assert all(isinstance(delta, TokenDelta) and len(delta.token_ids) == 1 for delta in deltas)


@pytest.mark.parametrize("wire", WIRES)
async def test_seed_repeats_an_answer_and_its_absence_does_not(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http) as (_, caller):
        seeded = [await caller.generate(request(seed=11)) for _ in range(2)]
        free = [await caller.generate(request()) for _ in range(2)]
    assert seeded[0].token_ids == seeded[1].token_ids
    assert free[0].token_ids != free[1].token_ids


@pytest.mark.parametrize("wire", WIRES)
async def test_answer_ends_at_the_budget_a_stop_token_or_a_stop_string(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http) as (_, caller):
        whole = await caller.generate(request(seed=1, max_tokens=12, ignore_eos=True))
        assert (len(whole.token_ids), whole.finish_reason) == (12, FinishReason.LENGTH)
        stop_id = whole.token_ids[5]
        by_id = await caller.generate(request(seed=1, stop_token_ids=(stop_id,)))
        assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
        assert (by_id.finish_reason, by_id.stop_reason) == (FinishReason.STOP, stop_id)
        text = policy(FAMILY).decode(whole.token_ids[3:5])
        by_text = await caller.generate(request(seed=1, ignore_eos=True, stop=(text,)))
        assert by_text.token_ids == whole.token_ids[:5] and by_text.stop_reason == text


async def test_next_turn_reads_its_beginning_from_the_prefix_cache(http: EngineConnections) -> None:
    async with served(FAMILY, "vllm", http) as (_, caller):
        first = await caller.generate(request("tell me"))
        ids = [*prompt("tell me"), *first.token_ids, *policy(FAMILY).encode("\nand then?")]
        second = await caller.generate(TokenRequest("r2", ids, Sampling(20)))
    assert second.cached_tokens is not None
    assert second.cached_tokens >= len(prompt("tell me")) + len(first.token_ids) - 1
    assert second.logprobs == pytest.approx(own_logprobs(ids, second.token_ids), abs=1e-5)


@pytest.mark.parametrize("wire", WIRES)
async def test_concurrent_calls_do_not_mix(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http) as (_, caller):
        alone = [await caller.generate(request(f"{n} " * n, seed=n)) for n in range(12)]
        together = await asyncio.gather(*(caller.generate(request(f"{n} " * n, seed=n)) for n in range(12)))
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_forced_answer_is_the_templates_own_with_the_models_logprobs(
    family: str, http: EngineConnections
) -> None:
    views: list[CallView] = []

    def script(view: CallView) -> dict[str, object]:
        views.append(view)
        call = {"name": "shell", "arguments": {"command": "ls -la"}}
        return {"content": "I look.", "reasoning_content": "what is there?", "tool_calls": [call]}

    used, ids = policy(family), prompt("go", family)
    async with served(family, "vllm", http, script) as (engine, caller):
        answer = await caller.generate(TokenRequest("r", ids, Sampling(200, temperature=0.3)))
    assert (views[0].answers, views[0].tools) == (0, ("shell",))
    assert views[0].prompt == used.decode(ids)
    text = used.decode(answer.token_ids)
    assert "shell" in text and "ls -la" in text and ("what is there?" in text) == (family == "chatml_think")
    assert answer.finish_reason is FinishReason.STOP and answer.token_ids[-1] in used.stop_ids
    assert answer.logprobs == pytest.approx(own_logprobs(ids, answer.token_ids, family), abs=1e-5)
    assert engine.log.calls[0].forced
    call = {"id": "call00000", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls -la"}'}}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "what is there?", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "out"}
    whole = used.encode(used.render([user("go"), said, result], tools=TOOLS))
    assert whole[: len(ids) + len(answer.token_ids)] == [*ids, *answer.token_ids]


@pytest.mark.parametrize("family", FAMILIES)
async def test_forced_answer_goes_on_where_it_broke_off(family: str, http: EngineConnections) -> None:
    seen: list[str] = []

    def script(view: CallView) -> dict[str, object]:
        seen.append(view.prompt)
        return {"content": "one two three four five six seven eight"}

    ids = prompt("count", family)
    async with served(family, "vllm", http, script) as (_, caller):
        whole = await caller.generate(TokenRequest("a", ids, Sampling(99)))
        for kept in (1, 4, len(whole.token_ids) - 1):
            rest = await caller.generate(TokenRequest("b", [*ids, *whole.token_ids[:kept]], Sampling(99)))
            assert whole.token_ids[:kept] + rest.token_ids == whole.token_ids
    assert len(set(seen)) == 1, "a script is asked as at the answer's start"


@pytest.mark.parametrize("wire", WIRES)
async def test_sampling_stops_when_the_caller_leaves(
    wire: Wire, http: EngineConnections, eventually: Eventually, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    async with served(FAMILY, wire, http, log=log, tokens_per_second=100) as (engine, caller):
        stream = caller.stream(request(max_tokens=5000, ignore_eos=True))
        got = [await anext(stream) for _ in range(3)]
        await stream.aclose()
        await eventually(lambda: engine.log.calls[0].outcome == "cancelled")
        sampled = len(engine.log.calls[0].token_ids)
        whole = asyncio.create_task(caller.generate(request(max_tokens=5000, ignore_eos=True)))
        await eventually(lambda: len(engine.log.calls) == 2 and len(engine.log.calls[1].token_ids) > 2)
        whole.cancel()
        await eventually(lambda: engine.log.calls[1].outcome == "cancelled")
        assert 3 <= sampled < 4000 and len(got) == 3
        answer = await caller.generate(request(max_tokens=3, ignore_eos=True))
    assert len(answer.token_ids) == 3
    calls = read_log(log)
    assert [(call.outcome, call.finish) for call in calls] == [("cancelled", None)] * 2 + [("answered", "length")]
    assert len(calls[0].token_ids) == sampled, "nothing was sampled behind the caller's back"
    assert calls[1].sent == 0


@pytest.mark.parametrize("wire", WIRES)
async def test_faults_break_answers_where_they_say(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http) as (engine, caller):
        engine.faults.extend([Status(500), CutOff(4), Abort(3)])
        with pytest.raises(EngineFailedError):
            await caller.generate(request())
        deltas = []
        with pytest.raises(EngineLostError):
            async for item in caller.stream(request(ignore_eos=True)):
                deltas.append(item)
        aborted = await caller.generate(request(ignore_eos=True))
    assert (len(aborted.token_ids), aborted.finish_reason) == (3, FinishReason.ABORT)
    cut, abort = engine.log.calls
    assert (cut.outcome, cut.sent, cut.fault) == ("faulted", 4, "CutOff") and len(deltas) <= 4
    assert (abort.outcome, abort.finish, len(abort.token_ids)) == ("faulted", "abort", 3)


def test_faults_by_chance_come_as_often_as_asked_and_the_same_for_a_seed() -> None:
    spec = "status:503=0.1,cutoff=0.2,abort:4=0.1"
    made = [faults_by_chance(spec, 7) for _ in range(2)]
    first, second = ([chance() for _ in range(3000)] for chance in made)
    assert first == second
    assert [round(first.count(fault) / 3000, 1) for fault in (Status(503), Abort(4), None)] == [0.1, 0.1, 0.6]


@pytest.mark.parametrize("wire", WIRES)
async def test_request_that_does_not_fit_is_refused_with_the_reason(wire: Wire, http: EngineConnections) -> None:
    async with served(FAMILY, wire, http, max_context_tokens=100) as (engine, caller):
        with pytest.raises(EngineRefusedError, match="maximum context length is 100 tokens"):
            await caller.generate(request(max_tokens=100))
        with pytest.raises(EngineRefusedError, match="no token id"):
            await caller.generate(TokenRequest("r", [5, 10**6], Sampling(5)))
        with pytest.raises(EngineRefusedError, match="empty"):
            await caller.generate(TokenRequest("r", [], Sampling(5)))
    assert engine.log.calls == [] and {call.outcome for call in engine.calls} == {"refused"}


async def test_defect_of_a_script_is_an_error_that_names_it(http: EngineConnections) -> None:
    def script(view: CallView) -> None:
        raise LookupError("no such step")

    async with served(FAMILY, "vllm", http, script) as (_, caller):
        with pytest.raises(EngineFailedError, match="no such step"):
            await caller.generate(request())


@contextlib.asynccontextmanager
async def process(*arguments: str):  # type: ignore[no-untyped-def]
    command = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny", *arguments]
    running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert running.stdout is not None
    try:
        yield running, (await running.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGTERM)
        await running.wait()


async def test_server_process_makes_serves_logs_and_tells_what_it_sampled_before_a_kill(
    tmp_path: Path, http: EngineConnections
) -> None:
    folder, log, script = tmp_path / "policy", tmp_path / "log.jsonl", tmp_path / "script.yaml"
    script.write_text("rules: [{when: hello, steps: [{say: Hello yourself.}]}]")
    start = ["--make", FAMILY, str(folder), "--policy", str(folder), "--log", str(log), "--wire", "sglang"]
    async with process(*start, "--script", str(script), "--tokens-per-second", "50") as (running, url):
        caller = client("sglang", url, http)
        await caller.probe()
        forced = await caller.generate(request())
        assert "Hello yourself." in policy(FAMILY).decode(forced.token_ids)
        received: list[int] = []
        with pytest.raises(EngineLostError):
            async for item in caller.stream(request("something else", 4000, ignore_eos=True)):
                received += item.token_ids
                if len(received) == 5:
                    os.kill(running.pid, signal.SIGKILL)
    calls: list[EngineCall] = read_log(log)
    assert [call.outcome for call in calls] == ["answered", "killed"]
    assert calls[1].token_ids[: len(received)].tolist() == received
    assert np.allclose(recompute(folder, [*prompt(), *forced.token_ids])[len(prompt()) :], forced.logprobs, atol=1e-5)
