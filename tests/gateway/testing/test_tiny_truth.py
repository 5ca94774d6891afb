"""Trajectories of real sampling are true, and whatever is changed in them is found."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.gateway.engines import EngineConnections, FinishReason, Sampling, TokenEngine, TokenRequest
from nemo_gym.gateway.engines.calls import EngineCalls, RetryConfig, TokenCalls
from nemo_gym.gateway.engines.pool import Prober
from nemo_gym.gateway.engines.router import Router, RoutingConfig
from nemo_gym.gateway.tokens import Trajectory, TrajectoryTurn
from nemo_gym.gateway.tokens.trajectories import as_row, write_jsonl
from nemo_gym_testing.gateway import Abort, CutOff, Status
from nemo_gym_testing.gateway.chance import faults_by_chance
from nemo_gym_testing.gateway.tiny import FAMILIES, CallView, EngineCall, TinyEngine, check_truth, read_log
from nemo_gym_testing.gateway.tiny.engine import Wire
from tests.gateway.testing.runs import TOOLS, Session, client, conversation, policy, policy_dir, served, user
from tests.gateway.testing.test_tiny_engine import Eventually, process

FAMILY = "chatml_think"


@pytest.mark.parametrize(
    ("family", "wire"),
    [(family, wire) for number, family in enumerate(FAMILIES) for wire in ("vllm", "sglang")[number % 2 :]],
)
async def test_sampled_conversations_are_true_in_every_family(
    family: str, wire: Wire, http: EngineConnections
) -> None:
    async with served(family, wire, http) as (engine, caller):
        session = Session(family, caller.generate)
        history = await conversation(session, 4)
        await session.ask([*history[:-1], user("another way")], TOOLS)
        await session.ask(history[:2], TOOLS)  # sampled again
        await session.ask([user("Summarise: x")], None)
        report = check_truth(session.trajectories(), engine.log.calls, policy_dir(family))
    assert report.true, report
    assert (report.calls, report.answered) == (7, 7) and report.trajectories >= 3
    assert report.sampled_tokens == sum(len(call.token_ids) for call in engine.log.calls)
    assert 0 < report.largest_logprob_error < 1e-4


@dataclass
class Run:
    """A finished session that is true."""

    trajectories: list[Trajectory]
    calls: list[EngineCall]

    def check(self, trajectories: list[Trajectory], **given: Any) -> list[str]:
        return check_truth(trajectories, self.calls, policy_dir(FAMILY), **given).violations


@pytest.fixture
async def run(http: EngineConnections, eventually: Eventually) -> Run:
    async with served(FAMILY, "vllm", http) as (engine, caller):
        session = Session(FAMILY, caller.generate)
        history = await conversation(session, 3)
        await session.ask(history[:2], TOOLS)
        stream = caller.stream(left_alone(session, history))
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: engine.log.calls[-1].outcome == "cancelled")
        made = Run(session.trajectories(), engine.log.calls)
    assert not made.check(made.trajectories)
    return made


def left_alone(session: Session, history: list[dict[str, Any]]) -> TokenRequest:
    return TokenRequest("left", session.forest.prepare(history, TOOLS).prompt.ids(), Sampling(3000, ignore_eos=True))


def with_turns(one: Trajectory, **changed: Any) -> Trajectory:
    """With turns that agree with the mask, so that only the comparison with the engine can find the change."""
    made = replace(one, **changed)
    turns, start = [], None
    for at, sampled in enumerate([*made.response_mask, 0]):
        if sampled and start is None:
            start = at
        elif not sampled and start is not None:
            turns.append(TrajectoryTurn(start, at, "stop", None))
            start = None
    return replace(made, turns=tuple(turns))


def first_turn(one: Trajectory) -> tuple[int, int]:
    return one.turns[0].start, one.turns[0].end


def token_changed(one: Trajectory) -> Trajectory:
    ids = one.response_ids[:]
    ids[first_turn(one)[0] + 1] ^= 1
    return replace(one, response_ids=ids)


def prompt_token_changed(one: Trajectory) -> Trajectory:
    ids = one.prompt_ids[:]
    ids[-2] ^= 1
    return replace(one, prompt_ids=ids)


def mask_cut(one: Trajectory) -> Trajectory:
    mask, logprobs = bytearray(one.response_mask), array("f", one.logprobs or ())
    last = first_turn(one)[1] - 1
    mask[last], logprobs[last] = 0, 0.0
    return with_turns(one, response_mask=bytes(mask), logprobs=logprobs)


def mask_widened(one: Trajectory) -> Trajectory:
    mask = bytearray(one.response_mask)
    mask[first_turn(one)[1]] = 1
    return with_turns(one, response_mask=bytes(mask))


def turn_unmasked(one: Trajectory) -> Trajectory:
    mask, logprobs = bytearray(one.response_mask), array("f", one.logprobs or ())
    for at in range(*first_turn(one)):
        mask[at], logprobs[at] = 0, 0.0
    return with_turns(one, response_mask=bytes(mask), logprobs=logprobs)


def turns_wrong(one: Trajectory) -> Trajectory:
    return replace(one, turns=one.turns[1:])


def logprob_changed(one: Trajectory) -> Trajectory:
    logprobs = array("f", one.logprobs or ())
    logprobs[first_turn(one)[0]] += 1e-3
    return replace(one, logprobs=logprobs)


def logprob_not_a_number(one: Trajectory) -> Trajectory:
    logprobs = array("f", one.logprobs or ())
    logprobs[first_turn(one)[0]] = float("nan")
    return replace(one, logprobs=logprobs)


def logprobs_moved(one: Trajectory) -> Trajectory:
    start, end = first_turn(one)
    logprobs = array("f", one.logprobs or ())
    logprobs[start:end] = array("f", [*logprobs[start + 1 : end], logprobs[start]])
    return replace(one, logprobs=logprobs)


def logprob_where_nothing_was_sampled(one: Trajectory) -> Trajectory:
    logprobs = array("f", one.logprobs or ())
    logprobs[first_turn(one)[1]] = -1.0
    return replace(one, logprobs=logprobs)


def logprobs_missing(one: Trajectory) -> Trajectory:
    return replace(one, logprobs=None)


def token_dropped(one: Trajectory) -> Trajectory:
    at = first_turn(one)[0] + 1
    cut: Callable[[Any], Any] = lambda values: values[:at] + values[at + 1 :]  # noqa: E731
    return with_turns(
        one,
        response_ids=cut(one.response_ids),
        response_mask=cut(one.response_mask),
        logprobs=cut(one.logprobs),
    )


CHANGES: Mapping[Callable[[Trajectory], Trajectory], str] = {
    token_changed: "the engine sampled something else",
    prompt_token_changed: "no engine was asked",
    mask_cut: "the engine sampled something else",
    mask_widened: "the engine sampled something else|no engine was asked",
    turn_unmasked: "sampled tokens are in no trajectory",
    turns_wrong: "the mask and the turns name different tokens",
    logprob_changed: "are not those of the engine's call",
    logprob_not_a_number: "differ from the model's own",
    logprobs_moved: "are not those of the engine's call",
    logprob_where_nothing_was_sampled: "a token that was not sampled has a logprob",
    logprobs_missing: "has no logprobs",
    token_dropped: "the engine sampled something else",
}


async def test_each_change_of_a_trajectory_is_found_for_what_it_is(run: Run) -> None:
    one, *others = sorted(run.trajectories, key=lambda each: -len(each.turns))
    assert len(one.turns) > 1 and others
    for change, says in CHANGES.items():
        found = run.check([change(one), *others])
        assert any(part in violation for violation in found for part in says.split("|")), (change.__name__, found)


async def test_missing_and_doubled_trajectories_are_found(run: Run) -> None:
    one, *others = run.trajectories
    assert any("in no trajectory" in found for found in run.check(others))
    assert any("another place holds already" in found for found in run.check([one, one, *others]))


async def test_tokens_of_a_cancelled_call_are_found_when_they_appear(run: Run) -> None:
    left = next(call for call in run.calls if call.outcome == "cancelled")
    ids = left.token_ids[:5]
    logprobs = array("f", left.logprobs[:5])
    turn = TrajectoryTurn(0, 5, "stop", None)
    invented = replace(
        run.trajectories[0],
        prompt_ids=left.prompt_ids,
        response_ids=ids,
        response_mask=b"\1" * 5,
        logprobs=logprobs,
        turns=(turn,),
    )
    assert len(ids) == 5 and run.check([*run.trajectories, invented])


async def test_answer_that_nobody_took_is_excused_by_name_only(run: Run) -> None:
    without = [one for one in run.trajectories if len(one.turns) == 1]
    missing = run.check(without)
    names = [violation.split(":")[0].removeprefix("call ") for violation in missing]
    assert names and not run.check(without, excused=names)
    assert len(run.check(without, excused=names[1:])) == 1


async def test_excused_answer_may_be_equal_to_the_one_that_was_kept(run: Run) -> None:
    lost = replace(run.calls[0], key="lost", request_id="lost")
    run.calls.insert(0, lost)
    assert run.check(run.trajectories, excused=["lost"]) == []
    assert len(run.check(run.trajectories)) == 1


@pytest.fixture(params=["vllm", "sglang"])
async def pair(
    request: pytest.FixtureRequest, http: EngineConnections
) -> AsyncIterator[tuple[list[TinyEngine], TokenCalls[TokenEngine]]]:
    """Two engines that hold the same weights, behind a router."""
    async with AsyncExitStack() as stack:
        router: Router[TokenEngine] = Router(RoutingConfig(probe_interval_s=0.02))
        engines = []
        for number in range(2):
            made = served(FAMILY, request.param, http, name=f"e{number}", seed=number)
            engine, caller = await stack.enter_async_context(made)
            engines.append(engine)
            router.add(caller)
        config = RetryConfig(max_tries=6, first_backoff_s=0.001, keep_partial_answers=True)
        # Three faults in a row take an engine out of service, and only a probe brings it back.
        probing = asyncio.create_task(Prober(router).run())
        yield engines, TokenCalls(EngineCalls(router, config))
        probing.cancel()


async def test_answers_continued_on_other_engines_are_true(
    pair: tuple[list[TinyEngine], TokenCalls[TokenEngine]],
) -> None:
    engines, calls = pair
    session = Session(FAMILY, partial(calls.generate, "s"))
    engines[0].faults.extend([CutOff(3), Status(500), Abort(5), Abort(0)])
    engines[1].faults.extend([CutOff(2), CutOff(1)])
    history = await conversation(session, 6, ignore_eos=True, max_tokens=30)
    engines[0].faults.append(Abort(7))
    engines[1].faults.append(Abort(7))
    turn = await session.ask(history, TOOLS, ignore_eos=True, max_tokens=7)
    assert turn.finish_reason == FinishReason.LENGTH
    logged = [call for engine in engines for call in engine.log.calls]
    report = check_truth(session.trajectories(), logged, policy_dir(FAMILY))
    assert report.true, report
    assert report.resumed >= 4 and report.sampled_tokens == 6 * 30 + 7
    ids = session.trajectories()[0].response_ids
    cut = next(call for call in logged if call.fault == "CutOff" and call.sent)
    without = [call for call in logged if call is not cut]
    assert not check_truth(session.trajectories(), without, policy_dir(FAMILY)).true, len(ids)


async def test_many_sessions_with_faults_by_chance_are_true(
    pair: tuple[list[TinyEngine], TokenCalls[TokenEngine]],
) -> None:
    engines, calls = pair
    for number, engine in enumerate(engines):
        engine.chance = faults_by_chance("status:503=0.1,cutoff=0.15,abort=0.15,garbage=0.05", number)
    sessions = [Session(FAMILY, partial(calls.generate, f"s{n}"), f"s{n}") for n in range(6)]

    async def talk(session: Session) -> None:
        history = [user(f"hello from {id(session)}")]
        for number in range(4):
            for _ in range(20):
                try:
                    turn = await session.ask(history, TOOLS, max_tokens=24)
                    break
                except Exception:
                    await asyncio.sleep(0.01)  # as a harness does
            history += [dict(turn.message), user(f"more {number}")]

    await asyncio.gather(*map(talk, sessions))
    found = [one for session in sessions for one in session.trajectories()]
    logged = [call for engine in engines for call in engine.log.calls]
    report = check_truth(found, logged, policy_dir(FAMILY))
    assert report.true, report
    assert sum(len(session.forest.turns) for session in sessions) == 24 and report.resumed


async def test_engine_killed_in_mid_answer_leaves_a_log_that_proves_what_it_gave(
    http: EngineConnections, tmp_path: Path, eventually: Eventually
) -> None:
    log = tmp_path / "killed.jsonl"
    start = ["--policy", str(policy_dir(FAMILY)), "--log", str(log), "--tokens-per-second", "50"]
    async with process(*start) as (running, url), served(FAMILY, "vllm", http, name="e1") as (engine, second):
        router: Router[TokenEngine] = Router()
        router.add(client("vllm", url, http), weight=1000)
        router.add(second)
        calls = TokenCalls(EngineCalls(router, RetryConfig(first_backoff_s=0.001, keep_partial_answers=True)))
        session = Session(FAMILY, partial(calls.generate, "s"))
        asking = asyncio.create_task(session.ask([user("go")], TOOLS, max_tokens=200, ignore_eos=True))
        await eventually(lambda: log.exists() and log.read_bytes().count(b'"tokens"') >= 5)
        os.kill(running.pid, signal.SIGKILL)
        await asking
    assert [call.outcome for call in read_log(log)] == ["killed"]
    report = check_truth(session.trajectories(), [log, *engine.log.calls], policy_dir(FAMILY))
    assert report.true and report.resumed == 1 and report.sampled_tokens == 200, report


async def test_forced_tool_runs_are_true_when_the_harness_sends_messages_back(http: EngineConnections) -> None:
    def script(view: CallView) -> dict[str, Any] | None:
        if view.answers % 4 == 3:
            return None
        call = {"name": "shell", "arguments": {"command": f"echo {view.answers}"}}
        return {"content": "", "reasoning_content": f"step {view.answers}", "tool_calls": [call]}

    async with served(FAMILY, "sglang", http, script) as (engine, caller):
        session = Session(FAMILY, caller.generate)
        history = [user("do it")]
        for _ in range(10):
            turn = await session.ask(history, TOOLS, max_tokens=300)
            history += [dict(turn.message), user("<tool_response>\nout\n</tool_response>")]
        report = check_truth(session.trajectories(), engine.log.calls, policy_dir(FAMILY))
    assert report.true and report.trajectories == 1 and report.answered == 10, report
    assert sum(call.forced for call in engine.log.calls) == 8
    assert "echo 9" in policy(FAMILY).decode(session.trajectories()[0].response_ids)


async def test_report_is_printed_as_json_by_its_command(http: EngineConnections, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    async with served(FAMILY, "vllm", http, log=log) as (_, caller):
        session = Session(FAMILY, caller.generate)
        await conversation(session, 2)
    rows = [as_row(one) for one in session.trajectories()]
    assert check_truth(rows, log, policy_dir(FAMILY)).true
    write_jsonl(tmp_path / "right.jsonl", session.trajectories())
    write_jsonl(tmp_path / "wrong.jsonl", map(token_changed, session.trajectories()))
    command = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny.truth", "--policy", str(policy_dir(FAMILY))]
    for name, code in (("right", 0), ("wrong", 1)):
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, "--log", str(log), "--", str(tmp_path / f"{name}.jsonl")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert bool(json.loads(done.stdout)["violations"]) == bool(code)
