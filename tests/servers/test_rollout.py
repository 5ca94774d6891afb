"""A whole rollout as a caller without a pipeline drives it: `RolloutSteps.run`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.verdict import FailureKind, StageError, StageName
from nemo_gym.gateway.journal_log import JournalFullError
from nemo_gym.http import peers
from nemo_gym.http.client import read_whole
from nemo_gym.http.connections import Reply
from nemo_gym.http.peers import PeerError, Peers
from nemo_gym.rollout import Attempt, Budgets, RolloutSettings, RolloutSteps, Servers, failure_of
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.plugins import UnheldPhraseEnvironment, WaitingAgent
from tests.servers.stack import Stack, rollout, until

SCRIPT = "responses_api_models/scripted_model/data/example_script.yaml"
SERVERS = Servers("agent", "phrase", "model", needs_prompt=True)


@pytest.fixture
def servers(phrase: Stack) -> Stack:
    phrase.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    reference = {"type": "resources_servers", "name": "phrase"}
    phrase.add("agent", WaitingAgent, Role.AGENT, ("phrase", "model"), resources_server=reference)
    return phrase


def attempt_at(prompt: str, **row: Any) -> Attempt:
    row = {"responses_create_params": {"input": prompt}, "phrase": "rested", **row}
    return Attempt(SERVERS, rollout().model_dump(), orjson.dumps(row))


def steps_of(stack: Stack, **settings: Any) -> RolloutSteps:
    return RolloutSteps(Peers(stack.client()), RolloutSettings(**settings))


def left_open(stack: Stack) -> tuple[int, list[str], list[str]]:
    """Open model sessions, and the attempts that the environment and the agent have let go of."""
    model: Any = stack.servers["model"]
    environment: Any = stack.servers["phrase"]
    agent: Any = stack.servers["agent"]
    sessions = sum(entry.closed_at is None for entry in model.gateway_sessions._table._by_id.values())
    return sessions, environment.closed, agent.cleaned


NOTHING = (0, ["r1-a1"], ["r1-a1"])


async def test_rollout_ends_with_its_verdict_and_its_model_session(servers: Stack) -> None:
    verified = await steps_of(servers).run(attempt_at("at once"), Budgets(60, 60, 60))
    assert (verified["reward"], verified["valid"], verified["phrase"]) == (1.0, True, "rested")
    assert verified["ng_model_session"]["turns"] == 0
    assert left_open(servers) == NOTHING


def refuse_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: Any = stack.servers["model"].gateway_sessions  # type: ignore[attr-defined]
    finalize, left = sessions.finalize, [JournalFullError("full", retryable=True, retry_after_s=0.6)]

    async def refused(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return await finalize(*args, **options)

    monkeypatch.setattr(sessions, "finalize", refused)


def break_off_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [ConnectionResetError("the server died")]

    async def broken(incoming: Reply, *args: Any) -> bytes:
        body = await read_whole(incoming, *args)
        if left and b"trajectories" in body:
            raise left.pop()
        return body

    monkeypatch.setattr(peers, "read_whole", broken)


@pytest.mark.parametrize("fail", [refuse_once, break_off_once])
async def test_trajectories_outlive_a_passing_failure_of_the_model_server(
    servers: Stack, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Stack, pytest.MonkeyPatch], None]
) -> None:
    fail(servers, monkeypatch)
    verified = await steps_of(servers).run(attempt_at("at once"), Budgets(60, 60, 60))
    assert verified["ng_model_session"]["turns"] == 0
    assert left_open(servers) == NOTHING


async def test_verdict_outlives_a_model_server_that_stays_full(
    servers: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any, **__: Any) -> Any:
        raise JournalFullError("the disk is full", retryable=True, retry_after_s=5)

    model: Any = servers.servers["model"]
    monkeypatch.setattr(model.gateway_sessions, "finalize", refused)
    verified = await steps_of(servers, finalize_timeout_s=1).run(attempt_at("at once"), Budgets(60, 60, 60))
    assert (verified["reward"], verified["valid"]) == (1.0, True)
    assert "the disk is full" in verified["ng_model_session"]["error"]
    assert left_open(servers) == NOTHING


async def test_environment_with_nothing_to_release_is_not_asked_to_close(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.add("phrase", UnheldPhraseEnvironment, Role.ENVIRONMENT)
    stack.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    reference = {"type": "resources_servers", "name": "phrase"}
    stack.add("agent", WaitingAgent, Role.AGENT, ("phrase", "model"), resources_server=reference)
    asked, post = [], Peers.post

    async def noted(self: Peers, server: str, path: str, body: Any, **options: Any) -> Any:
        asked.append(path.rpartition("/")[2])
        return await post(self, server, path, body, **options)

    monkeypatch.setattr(Peers, "post", noted)
    assert (await steps_of(stack).run(attempt_at("at once"), Budgets(60, 60, 60)))["reward"] == 1.0
    assert asked == ["sessions", "seed_session", "act", "verify", "finalize"]
    with pytest.raises(TimeoutError):
        other = Attempt(SERVERS, rollout("r2").model_dump(), attempt_at("wait").row)
        await steps_of(stack).run(other, Budgets(work_s=1))
    assert asked[5:] == ["sessions", "seed_session", "act", "close", "abort"], "no verdict, no end"


async def test_rollout_is_closed_when_its_work_takes_longer_than_its_budget(servers: Stack) -> None:
    with pytest.raises(TimeoutError) as raised:
        await steps_of(servers).run(attempt_at("wait"), Budgets(work_s=1))
    assert failure_of(StageName.RUN, raised.value).kind is FailureKind.DEADLINE
    await until(lambda: left_open(servers) == NOTHING)


@pytest.mark.parametrize(
    ("stage", "path", "lost_kind", "broken_kind"),
    [
        ("init", "/sessions", "model_unreachable", "seed_failed"),
        ("init", "/seed_session", "environment_lost", "seed_failed"),
        ("init", "/rows", "environment_lost", "seed_failed"),
        ("run", "/act", "agent_lost", "agent_crashed"),
        ("run", "/run", "agent_lost", "agent_crashed"),
        ("run", "/harvest", "environment_lost", "internal"),
        ("run", "/verdict", "environment_lost", "verifier_failed"),
        ("eval", "/verify", "environment_lost", "verifier_failed"),
    ],
)
def test_kind_of_a_failure_says_which_server_is_lost_or_broken(
    stage: str, path: str, lost_kind: str, broken_kind: str
) -> None:
    lost = failure_of(StageName(stage), PeerError("a server", path, 0, {"detail": "the connection broke"}))
    assert (lost.kind, lost.retryable) == (lost_kind, True)
    broken = failure_of(StageName(stage), PeerError("a server", path, 500, {"detail": "KeyError"}))
    assert (broken.kind, broken.retryable) == (broken_kind, True)


async def test_rollout_is_closed_when_its_task_is_cancelled(servers: Stack) -> None:
    agent: Any = servers.servers["agent"]
    running = asyncio.create_task(steps_of(servers).run(attempt_at("wait"), Budgets()))
    await until(lambda: agent.started)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: left_open(servers) == NOTHING)


@pytest.mark.parametrize(
    ("enforced", "expected"),
    [
        (True, {"temperature": 0.0, "top_p": 0.5, "max_output_tokens": 9, "stop": ["X"]}),
        (False, {"top_p": 0.5}),
    ],
)
async def test_row_samples_every_model_call_of_an_agent_that_cannot_pass_its_parameters_on(
    servers: Stack, enforced: bool, expected: dict[str, Any]
) -> None:
    attempt = attempt_at("at once")
    attempt.servers = replace(SERVERS, enforce_row_sampling=enforced)
    own = {"temperature": 0.0, "top_p": 0.9, "top_k": None, "max_output_tokens": 9, "stop": ["X"], "user": "me"}
    attempt.row = orjson.dumps({"responses_create_params": {"input": "at once", **own}})
    await steps_of(servers, sampling={"top_p": 0.5}).open_session(attempt, "model")
    assert attempt.session is not None
    model: Any = servers.servers["model"]
    assert model.gateway_sessions.authorize(attempt.session.inference_token).sampling == expected


async def test_rollout_without_a_prompt_fails_before_anybody_is_asked(servers: Stack) -> None:
    with pytest.raises(StageError) as raised:
        await steps_of(servers).run(attempt_at("  "), Budgets())
    assert (raised.value.failure.kind, raised.value.failure.retryable) == (FailureKind.SEED_FAILED, False)
    assert left_open(servers) == (0, ["r1-a1"], [])


async def test_seed_without_an_answer_is_closed_although_its_row_has_no_prompt(servers: Stack) -> None:
    with pytest.raises(TimeoutError):
        await steps_of(servers).run(attempt_at("  ", open_delay_s=1), Budgets(prepare_s=0.2))
    assert left_open(servers) == (0, ["r1-a1"], [])


async def test_close_that_runs_out_of_time_leaves_no_heartbeat(
    servers: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, post = [], Peers.post

    async def lending_a_box(self: Peers, server: str, path: str, body: Any, **options: Any) -> peers.PeerReply:
        asked.append(path)
        if path == "/close":
            await asyncio.Event().wait()
        reply = await post(self, server, path, body, **options)
        is_seed = path == "/seed_session"
        return peers.PeerReply(orjson.dumps({**reply.json(), "heartbeat_s": 60}), reply.cookies) if is_seed else reply

    monkeypatch.setattr(Peers, "post", lending_a_box)
    with pytest.raises(TimeoutError):
        await steps_of(servers).run(attempt_at("wait", open_delay_s=1), Budgets(prepare_s=0.2, close_s=2))
    assert asked.count("/seed_session") == 2 and "/close" in asked
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("heartbeat")]
