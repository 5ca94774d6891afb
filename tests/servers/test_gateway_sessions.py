"""Sessions of a model server: whose token opens what, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientResponse

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.errors import CredentialError, FencedError
from nemo_gym.contract.session import MAX_ATTEMPT
from nemo_gym.gateway.policy_request import StreamedUsage, Usage
from nemo_gym.gateway.sessions import KEEP_CLOSED_SESSIONS, GatewaySessions, InMemoryGatewaySessions
from responses_api_models.scripted_model.app import ScriptedModel
from tests.servers.stack import Stack, rollout

SCRIPT = "responses_api_models/scripted_model/data/example_script.yaml"
SUM = {"messages": [{"role": "user", "content": "What is 8 plus zero"}]}


@pytest.fixture
def model(stack: Stack) -> Stack:
    stack.add("model", ScriptedModel, Role.MODEL, script=SCRIPT)
    return stack


async def opened(stack: Stack, **identity: Any) -> dict[str, Any]:
    reply = await stack.client().post("model", "/sessions", json={"rollout": rollout(**identity).model_dump()})
    assert reply.status == 200
    return await reply.json()


async def opened_by(stack: Stack, role: Role, name: str, **identity: Any) -> dict[str, Any]:
    asked = {"rollout": rollout(**identity).model_dump()}
    reply = await stack.client(role, name).post("model", "/sessions", json=asked)
    assert reply.status == 200, await reply.text()
    return await reply.json()


async def ask(stack: Stack, session: dict[str, Any], header: str = "Authorization", **body: Any) -> ClientResponse:
    """As a harness does: with the session's token, and no credential of the stack."""
    from nemo_gym.server_utils import request

    token = session["inference_token"]
    headers = {header: f"Bearer {token}" if header == "Authorization" else token}
    return await request("POST", f"{session['base_url']}/chat/completions", json={**SUM, **body}, headers=headers)


async def control(stack: Stack, session: dict[str, Any], action: str, token: str | None = None) -> ClientResponse:
    headers = {CONTROL_TOKEN_HEADER: token or session["control_token"]}
    return await stack.client().post("model", f"/sessions/{session['session_id']}/{action}", json={}, headers=headers)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_session_counts_its_turns_and_tokens(model: Stack, header: str) -> None:
    session = await opened(model)
    replies = [await ask(model, session, header, stream=stream) for stream in (False, True, False)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    usage = (await replies[0].json())["usage"]
    summary = await (await control(model, session, "finalize")).json()
    assert summary["turns"] == 3
    assert summary["usage"]["input_tokens"] == 3 * usage["prompt_tokens"]
    assert summary["usage"]["output_tokens"] == 3 * usage["completion_tokens"]
    assert session["model"] == "scripted-example"


async def test_failed_call_is_no_turn(model: Stack) -> None:
    session = await opened(model)
    assert (await ask(model, session, messages=[{"role": "user", "content": "unheard of"}])).status == 422
    assert (await (await control(model, session, "finalize")).json())["turns"] == 0


async def test_finalize_answers_the_same_when_it_is_repeated_and_ends_inference(model: Stack) -> None:
    session = await opened(model)
    await ask(model, session)
    first = await (await control(model, session, "finalize")).json()
    again = await (await control(model, session, "finalize")).json()
    assert first == again
    assert (await ask(model, session)).status == 409


@pytest.mark.parametrize(
    ("body", "param"),
    [({"reward": "1"}, "reward"), ({"reward": True}, "reward"), ({"reward": 1.0, "reward_info": [1]}, "reward_info")],
)
async def test_finalize_refuses_a_reward_that_is_none_and_keeps_the_session(
    model: Stack, body: dict[str, Any], param: str
) -> None:
    session = await opened(model)
    path, headers = f"/sessions/{session['session_id']}/finalize", {CONTROL_TOKEN_HEADER: session["control_token"]}
    refused = await model.client().post("model", path, json=body, headers=headers)
    assert (refused.status, (await refused.json())["param"]) == (422, param)
    taken = await model.client().post("model", path, json={"reward": 1, "reward_info": {"a": 1}}, headers=headers)
    assert taken.status == 200


async def test_aborted_session_can_neither_infer_nor_be_finalized(model: Stack) -> None:
    session = await opened(model)
    assert (await control(model, session, "abort")).status == 200
    assert (await control(model, session, "abort")).status == 200
    assert (await ask(model, session)).status == 409
    assert (await control(model, session, "finalize")).status == 409


async def test_inference_token_decides_about_nothing(model: Stack) -> None:
    session, other = await opened(model), await opened(model, rollout_id="r2")
    for token in (session["inference_token"], other["control_token"], "guess"):
        assert (await control(model, session, "finalize", token)).status == 401
    as_bearer = {**session, "inference_token": session["control_token"]}
    assert (await ask(model, as_bearer)).status == 401


async def test_newer_attempt_ends_the_session_of_the_older_one(model: Stack) -> None:
    old, new = await opened(model), await opened(model, attempt=2)
    assert (await ask(model, old)).status == 409
    assert (await ask(model, new)).status == 200
    late = await model.client().post("model", "/sessions", json={"rollout": rollout().model_dump()})
    assert late.status == 409


async def test_agents_sessions_touch_none_but_its_own_whatever_rollout_and_attempt_they_name(model: Stack) -> None:
    victim = await opened(model)
    for attempt in (1, 2, MAX_ATTEMPT):
        intruder = await opened_by(model, Role.AGENT, "agent", attempt=attempt)
        assert (await ask(model, victim)).status == 200
        assert (await ask(model, intruder)).status == 200
    retried = await opened(model, attempt=2)
    assert [(await ask(model, session)).status for session in (victim, retried)] == [409, 200]
    rival = await opened_by(model, Role.AGENT, "rival", attempt=1)
    assert [(await ask(model, session)).status for session in (intruder, rival, retried)] == [200, 200, 200]
    early = await model.client(Role.AGENT, "agent").post(
        "model", "/sessions", json={"rollout": rollout().model_dump()}
    )
    assert early.status == 409, "within its own, an older attempt stays fenced"


@pytest.mark.parametrize("attempt", [0, -1, MAX_ATTEMPT + 1, 2**31, 2**63, "x"])
async def test_attempt_that_no_rollout_comes_to_is_refused(model: Stack, attempt: Any) -> None:
    asked = {"rollout": {**rollout().model_dump(), "attempt": attempt}}
    for role in (Role.PIPELINE, Role.AGENT):
        refused = await model.client(role, "any").post("model", "/sessions", json=asked)
        assert refused.status == 422
        assert "attempt" in (await refused.json())["detail"]


async def test_session_sampling_is_what_the_model_is_asked_for() -> None:
    from nemo_gym.gateway.dialects import Dialect, apply_sampling

    sampling = {"temperature": 0.5, "max_output_tokens": 7, "seed": 3}
    chat = apply_sampling(Dialect.CHAT, {"temperature": 1, "max_completion_tokens": 99}, sampling)
    assert chat == {"temperature": 0.5, "max_completion_tokens": 7, "seed": 3}
    assert apply_sampling(
        Dialect.CHAT, {"max_tokens": 9, "n_predict": 9, "min_tokens": 9, "user": "me"}, sampling
    ) == {
        **{"user": "me", "seed": 3, "temperature": 0.5, "max_tokens": 7},
    }
    assert apply_sampling(Dialect.MESSAGES, {}, sampling) == {"temperature": 0.5, "max_tokens": 7}
    assert apply_sampling(Dialect.RESPONSES, {}, sampling) == {"temperature": 0.5, "max_output_tokens": 7}
    asked = {"max_completion_tokens": 99, "n_predict": 99, "min_tokens": 9}
    assert apply_sampling(Dialect.CHAT, asked, {"max_tokens": 7}) == {"max_completion_tokens": 7}
    assert apply_sampling(Dialect.MESSAGES, {**asked}, {"seed": 1}) == asked


async def test_expired_token_is_refused() -> None:
    sessions = InMemoryGatewaySessions(ttl_s=-1)
    assert isinstance(sessions, GatewaySessions)
    token = (await sessions.open(rollout())).inference_token
    with pytest.raises(CredentialError, match="expired"):
        sessions.authorize(token)
    with pytest.raises(FencedError):
        sessions.authorize(token)


async def test_ended_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_gym.gateway import sessions as module

    monkeypatch.setattr(module, "KEEP_CLOSED_S", -1)
    sessions = InMemoryGatewaySessions()
    for number in range(50):
        opened_session = await sessions.open(rollout(f"r{number}"))
        await sessions.abort(opened_session.session_id, opened_session.control_token)
    table = sessions._table
    assert len(table._by_id) == len(table._by_token) == len(table._current) <= 2


async def test_closed_sessions_are_kept_up_to_a_number() -> None:
    sessions = InMemoryGatewaySessions()
    still_open = await sessions.open(rollout("open"))
    for number in range(KEEP_CLOSED_SESSIONS + 200):
        opened_session = await sessions.open(rollout(f"r{number}"))
        await sessions.finalize(opened_session.session_id, opened_session.control_token)
    table = sessions._table
    assert len(table._by_id) == len(table._by_token) == len(table._current) <= KEEP_CLOSED_SESSIONS + 2
    sessions.authorize(still_open.inference_token)
    await sessions.finalize(opened_session.session_id, opened_session.control_token)


def test_usage_is_found_in_streams_however_they_are_cut() -> None:
    stream = (
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(stream)):
        seen = StreamedUsage()
        for start in range(0, len(stream), size):
            seen.feed(stream[start : start + size])
        assert (seen.usage, seen.completed) == (Usage(11, 3), True)
    cut = StreamedUsage()
    cut.feed(stream[:60])
    assert not cut.completed
