"""Agent servers: acts and how they end, and `/run` from its pieces."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import Request

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import AgentError, ModelError
from nemo_gym.contract.session import ActRequest, ActResponse, AgentOutcome, InferenceEndpoint, SessionDescriptor
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from responses_api_models.scripted_model.app import ScriptedModel
from tests.harness.stage import patience_s
from tests.servers.plugins import ToolAgent, WaitingAgent
from tests.servers.stack import Stack, rollout, until

SCRIPT = "responses_api_models/scripted_model/data/example_script.yaml"
WHO = rollout().model_dump()
REFS: dict[str, Any] = {
    "resources_server": {"type": "resources_servers", "name": "counter"},
    "model_server": {"type": "responses_api_models", "name": "model"},
}


def act_body(attempt: int = 1, prompt: str = "wait", **fields: Any) -> dict[str, Any]:
    who = rollout(attempt=attempt)
    descriptor = SessionDescriptor(environment="counter", task_id=who.task_id, rollout=who)
    inference = InferenceEndpoint(base_url="http://127.0.0.1:1/v1", token="t")
    return {
        "responses_create_params": {"input": prompt},
        "descriptor": descriptor.model_dump(mode="json"),
        "inference": inference.model_dump(),
        **fields,
    }


@pytest.fixture
def waiting(stack: Stack) -> Stack:
    stack.add("agent", WaitingAgent, Role.AGENT, ("counter",), resources_server=REFS["resources_server"])
    return stack


def agent_of(stack: Stack) -> Any:
    return stack.servers["agent"]


async def test_act_answers_with_what_the_agent_made(waiting: Stack) -> None:
    reply = await waiting.client().post("agent", "/act", json=act_body(prompt="at once"))
    answer = await reply.json()
    assert reply.status == 200 and answer["outcome"] == "completed" and answer["artifacts"] == []


async def test_act_is_ended_and_cleaned_up_when_its_caller_leaves(waiting: Stack) -> None:
    asking = asyncio.create_task(waiting.client().post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(waiting).started)
    asking.cancel()
    await until(lambda: agent_of(waiting).cleaned == ["r1-a1"])
    await until(lambda: agent_of(waiting)._acts.active == 0)  # an act ends after its cleanup


async def test_cancel_answers_when_the_act_has_cleaned_up(waiting: Stack) -> None:
    client = waiting.client()
    asking = asyncio.create_task(client.post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(waiting).started)
    reply = await client.post("agent", "/cancel", json={"rollout": rollout().model_dump()})
    assert (await reply.json())["cancelled"] is True and agent_of(waiting).cleaned == ["r1-a1"]
    assert (await asking).status == 409
    late = await client.post("agent", "/cancel", json={"rollout": rollout(attempt=9).model_dump()})
    assert (await late.json())["cancelled"] is False


async def test_newer_attempt_ends_the_older_one_which_stays_fenced(waiting: Stack) -> None:
    client = waiting.client()
    old = asyncio.create_task(client.post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(waiting).started)
    new = await client.post("agent", "/act", json=act_body(attempt=2, prompt="at once"))
    again = await client.post("agent", "/act", json=act_body(attempt=1, prompt="at once"))
    assert (new.status, (await old).status, again.status) == (200, 409, 409)
    assert agent_of(waiting).cleaned == ["r1-a1", "r1-a2"]


async def test_act_is_refused_when_the_same_attempt_is_running(waiting: Stack) -> None:
    client = waiting.client()
    first = asyncio.create_task(client.post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(waiting).started)
    second = await client.post("agent", "/act", json=act_body())
    assert second.status == 409
    await client.post("agent", "/cancel", json={"rollout": rollout().model_dump()})
    await first


async def test_acts_are_cleaned_up_when_the_server_stops(waiting: Stack) -> None:
    asking = asyncio.create_task(waiting.client().post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(waiting).started)
    agent = agent_of(waiting)
    await asyncio.to_thread(waiting.stop, "agent")
    assert agent.cleaned == ["r1-a1"]
    await asyncio.gather(asking, return_exceptions=True)


async def test_solution_is_refused_by_an_agent_that_is_not_configured_to_see_it(waiting: Stack) -> None:
    reply = await waiting.client().post("agent", "/act", json=act_body(validation={"text": "gold"}))
    assert reply.status == 409 and agent_of(waiting).started == []


async def test_act_names_the_field_when_its_body_is_wrong(waiting: Stack) -> None:
    reply = await waiting.client().post("agent", "/act", json={**act_body(), "surprise": 1})
    assert reply.status == 422 and "surprise" in (await reply.json())["detail"]


@pytest.fixture
def tools(counter: Stack, tmp_path: Path) -> Stack:
    """An agent in NeMo Gym's style with its environment and a scripted model."""
    counter.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    counter.add("agent", ToolAgent, Role.AGENT, ("counter", "model"), **REFS)
    return counter


async def test_nemo_gym_agent_acts_with_the_sessions_cookies_and_the_attempts_token(tools: Stack) -> None:
    client = tools.client()
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "expected": 7, "start": 2}
    seeded = await client.post(
        "counter", "/seed_session", json={**row, "_ng_session": {"rollout": rollout().model_dump()}}
    )
    seed = await seeded.json()
    opened = await (await client.post("model", "/sessions", json={"rollout": rollout().model_dump()})).json()
    endpoint = {"base_url": opened["base_url"], "token": opened["inference_token"], "model": opened["model"]}
    body = {
        "responses_create_params": seed["public_row"]["responses_create_params"],
        "descriptor": seed["descriptor"],
        "inference": endpoint,
    }
    acted = await (await client.post("agent", "/act", json=body, cookies=seeded.cookies)).json()
    verified = await client.post(
        "counter",
        "/verify",
        json={**row, "response": acted["response"], "_ng_session": {"rollout": rollout().model_dump()}},
        headers={CONTROL_TOKEN_HEADER: seed["control_token"]},
        cookies=seeded.cookies,
    )
    finalized = await client.post(
        "model",
        f"/sessions/{opened['session_id']}/finalize",
        json={},
        headers={CONTROL_TOKEN_HEADER: opened["control_token"]},
    )
    assert acted["response"]["output"][0]["content"][0]["text"] == "The answer is 4."
    assert (await verified.json())["reward"] == 1.0
    assert (await finalized.json())["turns"] == 1


async def test_run_is_made_of_seed_act_and_verify_when_a_pipeline_gave_a_row_reference(tools: Stack) -> None:
    client = tools.client()
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "expected": 5}
    stored = await (await client.post("counter", "/rows", json={"row": row, "rollout": rollout().model_dump()})).json()
    session = {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}
    reply = await client.post("agent", "/run", json={**stored["public_row"], "_ng_session": session})
    result = await reply.json()
    assert reply.status == 200, result
    assert (result["reward"], "expected" in result) == (1.0, False)


async def test_run_passes_the_environments_own_words_on_when_it_refuses(tools: Stack) -> None:
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "_ng_session": {"row_ref": "ngr_guess"}}
    reply = await tools.client().post("agent", "/run", json=row)
    problem = await reply.json()
    assert (reply.status, problem["peer_status"], problem["peer_code"]) == (502, 401, "credential")


async def test_run_says_where_to_leave_the_row_when_it_comes_without_a_reference(tools: Stack) -> None:
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "expected": 5}
    reply = await tools.client().post("agent", "/run", json=row)
    problem = await reply.json()
    assert reply.status == 422 and "/rows of 'counter'" in problem["detail"]


class FailingAgent(ToolAgent):
    """Fails after the model has answered."""

    async def responses(self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
        await super().responses(request, body)
        raise AgentError("the harness broke")


class CrashedAgent(WaitingAgent):
    """Its harness dies, as its answer says, with work that would be graded right."""

    async def act_in_session(self, request: ActRequest, cookies: Mapping[str, str]) -> ActResponse:
        answer = await super().act_in_session(request, cookies)
        return answer.model_copy(update={"outcome": AgentOutcome.CRASHED, "outcome_detail": "the harness died"})


class ModellessAgent(ToolAgent):
    """Calls its model by itself, and the endpoint refuses the key, or does not answer."""

    async def act(self, request: ActRequest) -> ActResponse:
        status = {"status": 401} if "refused" in str(request.responses_create_params["input"]) else {}
        raise ModelError("the policy endpoint failed", **status)


@pytest.fixture
def runs(phrase: Stack) -> Stack:
    """Agents for ``/run`` with an environment that counts what it closes, and a model."""
    phrase.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    refs = {**REFS, "resources_server": {"type": "resources_servers", "name": "phrase"}}
    phrase.add("agent", WaitingAgent, Role.AGENT, ("phrase", "model"), **refs)
    phrase.add("failing", FailingAgent, Role.AGENT, ("phrase", "model"), **refs)
    phrase.add("crashed", CrashedAgent, Role.AGENT, ("phrase", "model"), **refs)
    phrase.add("modelless", ModellessAgent, Role.AGENT, ("phrase", "model"), **refs)
    return phrase


async def run_body(stack: Stack, prompt: str) -> dict[str, Any]:
    """What an operator sends to ``/run``, with its row left with the environment."""
    row = {"responses_create_params": {"input": prompt}, "phrase": "rested"}
    kept = await stack.client(Role.OPERATOR).post("phrase", "/rows", json={"row": row, "rollout": WHO})
    stored = await kept.json()
    return {**stored["public_row"], "_ng_session": {"rollout": WHO, "row_ref": stored["row_ref"]}}


def open_sessions(stack: Stack) -> int:
    model: Any = stack.servers["model"]
    return sum(entry.closed_at is None for entry in model.gateway_sessions._table)


def is_closed(stack: Stack) -> bool:
    environment: Any = stack.servers["phrase"]
    return environment.closed == [rollout().attempt_id] and environment.opened == 1 and open_sessions(stack) == 0


async def test_operators_run_is_judged_and_leaves_nothing_open(runs: Stack) -> None:
    body = await run_body(runs, "at once")
    reply = await runs.client(Role.OPERATOR).post("agent", "/run", json=body)
    result = await reply.json()
    assert (reply.status, result["reward"], "phrase" in result) == (200, 1.0, False), result
    assert is_closed(runs)
    again = await runs.client(Role.OPERATOR).post("agent", "/run", json=body)
    assert (again.status, (await again.json())["peer_status"]) == (502, 401)
    verdict = await runs.client(Role.OPERATOR).post("phrase", "/verdict", json={"rollout": WHO})
    assert (await verdict.json())["reward"] == 1.0


async def test_run_leaves_nothing_open_when_its_caller_leaves(runs: Stack) -> None:
    body = await run_body(runs, "wait")
    running = asyncio.create_task(runs.client(Role.OPERATOR).post("agent", "/run", json=body))
    await until(lambda: agent_of(runs).started)
    assert open_sessions(runs) == 1 and not is_closed(runs)
    running.cancel()
    await until(lambda: is_closed(runs))


async def test_run_leaves_nothing_open_when_its_agent_fails(runs: Stack) -> None:
    body = await run_body(runs, "What is 4 plus zero")
    reply = await runs.client(Role.OPERATOR).post("failing", "/run", json=body)
    assert reply.status >= 500
    assert is_closed(runs)


async def test_run_has_no_reward_when_its_harness_crashed(runs: Stack) -> None:
    body = await run_body(runs, "at once")
    reply = await runs.client(Role.OPERATOR).post("crashed", "/run", json=body)
    result = await reply.json()
    said = (reply.status, result["reward"], result.get("valid"), result.get("mask_sample"), result.get("failure_kind"))
    assert said == (200, None, False, True, "agent_crashed"), result
    assert (result["failure_reason"], "response" in result, "phrase" in result) == ("the harness died", True, False)
    assert is_closed(runs)


@pytest.mark.parametrize(("prompt", "kind"), [("refused", "model_refused"), ("silent", "model_unreachable")])
async def test_error_of_the_model_that_leaves_an_act_says_whether_the_model_was_reached(
    runs: Stack, prompt: str, kind: str
) -> None:
    answer = await (await runs.client().post("modelless", "/act", json=act_body(prompt=prompt))).json()
    assert (answer["outcome"], answer["outcome_detail"]) == (kind, "the policy endpoint failed")
    body = await run_body(runs, prompt)
    result = await (await runs.client(Role.OPERATOR).post("modelless", "/run", json=body)).json()
    assert (result["reward"], result["failure_kind"]) == (None, kind)


async def test_run_leaves_nothing_open_when_its_server_stops(runs: Stack) -> None:
    body = await run_body(runs, "wait")
    running = asyncio.create_task(runs.client(Role.OPERATOR).post("agent", "/run", json=body))
    await until(lambda: agent_of(runs).started)
    await asyncio.to_thread(runs.stop, "agent")
    await asyncio.wait({running})
    assert is_closed(runs)


async def test_agent_closes_its_own_attempt_only(runs: Stack) -> None:
    body = await run_body(runs, "at once")
    ref = body["_ng_session"]["row_ref"]
    agents = runs.client(Role.AGENT)
    for who, given, status in ((WHO, None, 403), (rollout("other").model_dump(), ref, 409), (WHO, ref, 200)):
        reply = await agents.post("phrase", "/close", json={"rollout": who, "row_ref": given})
        assert reply.status == status, await reply.text()


@pytest.mark.parametrize(
    ("index", "named"), [("x", "_ng_attempt_index"), (2**31, "attempt"), (2_000_000, "attempt"), (-7, "attempt")]
)
async def test_run_names_what_is_wrong_with_a_number_that_no_attempt_has(tools: Stack, index: Any, named: str) -> None:
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "_ng_attempt_index": index}
    reply = await tools.client().post("agent", "/run", json=row)
    assert reply.status == 422
    assert named in (await reply.json())["detail"]


async def test_run_leaves_the_pipelines_session_of_the_same_rollout_alone(tools: Stack) -> None:
    client = tools.client()
    session = {"rollout": rollout().model_dump()}
    opened = await (await client.post("model", "/sessions", json=session)).json()
    row = {"responses_create_params": {"input": "What is 4 plus zero"}, "expected": 5}
    stored = await (await client.post("counter", "/rows", json={"row": row, **session})).json()
    run = {**stored["public_row"], "_ng_session": {**session, "row_ref": stored["row_ref"]}}
    result = await client.post("agent", "/run", json=run)
    assert result.status == 200, await result.text()
    path = f"/sessions/{opened['session_id']}/finalize"
    finalized = await client.post("model", path, json={}, headers={CONTROL_TOKEN_HEADER: opened["control_token"]})
    assert finalized.status == 200, await finalized.text()


class EndlessAgent(ToolAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        await asyncio.Event().wait()
        raise AssertionError


async def test_agent_in_nemo_gyms_style_is_stopped_at_the_wall_clock(counter: Stack) -> None:
    counter.add("agent", EndlessAgent, Role.AGENT, ("counter",), resources_server=REFS["resources_server"])
    assert agent_of(counter).facts()["limits"] == ["wall_clock_s"]
    body = act_body()
    body["descriptor"]["limits"] = {"wall_clock_s": 0.2}
    answer = await (await counter.client().post("agent", "/act", json=body)).json()
    assert (answer["outcome"], answer["outcome_detail"]) == ("timed_out", "stopped after 0.2 s of wall-clock time")


class ForgetfulAgent(ToolAgent):
    """Returns no response."""

    reply: Any = None

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> Any:  # type: ignore[override]
        return self.reply


async def test_agent_in_nemo_gyms_style_is_told_what_it_returned(counter: Stack) -> None:
    counter.add("agent", ForgetfulAgent, Role.AGENT, ("counter",), resources_server=REFS["resources_server"])
    agent_of(counter).reply = "done"
    answer = await counter.client().post("agent", "/act", json=act_body())
    said = (await answer.json())["detail"]
    assert (answer.status, said) == (500, "responses returned str; it must return a model or a dict")


@pytest.mark.parametrize("reply", [None, {}, {"output": None}])
async def test_agent_in_nemo_gyms_style_that_returns_no_response_has_failed(counter: Stack, reply: Any) -> None:
    counter.add("agent", ForgetfulAgent, Role.AGENT, ("counter",), resources_server=REFS["resources_server"])
    agent_of(counter).reply = reply
    answer = await counter.client().post("agent", "/act", json=act_body())
    problem = await answer.json()
    assert (answer.status, problem["code"]) == (502, "agent")
    assert "responses() of 'agent' returned no Responses object" in problem["detail"]


class LeavingAgent(WaitingAgent):
    """Ends the program at once if it has nothing to wait for, as the main function of a command does."""

    async def act(self, request: ActRequest) -> ActResponse:
        await super().act(request)
        sys.exit(1)


async def test_agent_that_ends_the_program_fails_its_own_act_alone(stack: Stack) -> None:
    stack.add("agent", LeavingAgent, Role.AGENT, ("counter",), resources_server=REFS["resources_server"])
    waiting = asyncio.create_task(stack.client().post("agent", "/act", json=act_body()))
    await until(lambda: agent_of(stack).started)
    other = act_body(prompt="at once")
    other["descriptor"]["rollout"]["rollout_id"] = "another"
    answer = await stack.client().post("agent", "/act", json=other)
    assert (answer.status, (await answer.json())["code"]) == (500, "internal")
    assert not waiting.done()
    waiting.cancel()
    await until(lambda: len(agent_of(stack).cleaned) == 2)


class AskingAgent(ToolAgent):
    """Asks the model again and again."""

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:  # type: ignore[override]
        while True:
            await self.server_client.post("model", "/v1/responses", json=body)
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("prompt", "outcome"), [("silent", "model_unreachable"), ("speaks", "timed_out")])
async def test_agent_in_nemo_gyms_style_is_graded_at_the_wall_clock_only_if_the_model_answered(
    counter: Stack, tmp_path: Path, prompt: str, outcome: str
) -> None:
    turns: dict[str, dict[str, Any]] = {"silent": {"text": "Late.", "fault": {"hang_s": 600}}, "speaks": {"text": "B"}}
    tasks = [{"name": name, "when": {"user": name}, "turns": [turn]} for name, turn in turns.items()]
    script = tmp_path / "script.json"
    script.write_bytes(orjson.dumps({"model": "scripted", "tasks": tasks}))
    counter.add("model", ScriptedModel, Role.MODEL, script=str(script))
    counter.add("agent", AskingAgent, Role.AGENT, ("counter", "model"), **REFS)
    wall_clock_s = await patience_s(counter.client().post("model", "/sessions", json={"rollout": WHO}))
    opened = await (await counter.client().post("model", "/sessions", json={"rollout": WHO})).json()
    body = act_body(prompt=prompt)
    body["descriptor"]["limits"] = {"wall_clock_s": wall_clock_s}
    body["inference"]["token"] = opened["inference_token"]
    answer = await (await counter.client().post("agent", "/act", json=body)).json()
    assert answer["outcome"] == outcome and "of wall-clock time" in answer["outcome_detail"]


async def test_act_names_the_choices_when_the_agent_cannot_work_in_a_topology(tools: Stack) -> None:
    body = act_body()
    body["descriptor"]["placement"] = {"topology": "whole_interaction"}
    reply = await tools.client().post("agent", "/act", json=body)
    assert reply.status == 400 and "env_sandboxed" in (await reply.json())["detail"]
