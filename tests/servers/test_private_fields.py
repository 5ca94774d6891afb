"""What is private to an environment reaches no agent: not by a reply, an error, a cookie, or a log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nemo_gym.contract.credentials import CONTROL_TOKEN_HEADER, Role
from nemo_gym.contract.verdict import public_row
from tests.servers.plugins import CANARY, CounterEnvironment, LegacyAgent, PhraseEnvironment
from tests.servers.stack import Stack, response, rollout

ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "count to three"}],
        "metadata": {"answer": CANARY, "hint": "start at one"},
    },
    "expected": 3,
    "secret": CANARY,
    "verifier_metadata": {"gold_patch": CANARY, "tests": [CANARY]},
    "_ng_task_index": 4,
    "_ng_rollout_index": 0,
    "agent_ref": {"name": "legacy"},
}
REFS = {"resources_server": {"type": "resources_servers", "name": "counter"}}


@pytest.fixture
def legacy(counter: Stack) -> Stack:
    counter.add("legacy", LegacyAgent, Role.AGENT, ("counter",), **REFS)
    return counter


async def deposit(stack: Stack, row: dict[str, Any] = ROW, **more: Any) -> dict[str, Any]:
    body = {"row": row, "rollout": rollout().model_dump(), **more}
    reply = await stack.client().post("counter", "/rows", json=body)
    assert reply.status == 200
    return await reply.json()


def agent_of(stack: Stack) -> LegacyAgent:
    server = stack.servers["legacy"]
    assert isinstance(server, LegacyAgent)
    return server


@pytest.mark.parametrize("keep_extras", [True, False], ids=["passes its body on", "rebuilds its bodies"])
async def test_agent_that_overrides_run_gets_a_reward_and_nothing_private(
    legacy: Stack, keep_extras: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    agent_of(legacy).keep_extras = keep_extras
    stored = await deposit(legacy)
    session = {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}
    reply = await legacy.client().post("legacy", "/run", json={**stored["public_row"], "_ng_session": session})
    result = await reply.json()
    assert reply.status == 200, result
    assert (result["reward"], result["valid"]) == (1.0, True)
    heard = agent_of(legacy).heard
    assert len(heard) == 5
    for said in (*heard, str(result), str(stored)):
        assert CANARY not in said
    verdict = await legacy.client().post("counter", "/verdict", json={"rollout": rollout().model_dump()})
    full = await verdict.json()
    assert CANARY in full["explanation"] and full["reward"] == 1.0
    # The environment's own log holds the tool's traceback; the agent's messages are not among it.
    assert not [record for record in caplog.records if "legacy" in record.name and CANARY in record.getMessage()]


async def test_agent_sees_the_whole_row_and_its_result_says_so_when_it_is_configured_for_it(legacy: Stack) -> None:
    stored = await deposit(legacy, access="full")
    session = {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}
    reply = await legacy.client().post("legacy", "/run", json={**ROW, "_ng_session": session})
    result = await reply.json()
    assert result["row_access"] == "full" and result["secret"] == CANARY


async def test_agent_without_a_row_reference_can_neither_seed_nor_verify(counter: Stack) -> None:
    agent = counter.client(Role.AGENT, "agent")
    session = {"_ng_session": {"rollout": rollout().model_dump()}}
    for path, body in (
        ("/seed_session", ROW),
        ("/seed_session", {**ROW, **session}),
        ("/verify", {**ROW, "response": response(), **session}),
        ("/verify", {**ROW, "response": response()}),
    ):
        reply = await agent.post("counter", path, json=body)
        assert reply.status == 403


async def test_agent_cannot_use_another_attempts_row_reference(counter: Stack) -> None:
    stored = await deposit(counter)
    agent = counter.client(Role.AGENT, "agent")
    session = {"_ng_session": {"rollout": rollout("other").model_dump(), "row_ref": stored["row_ref"]}}
    assert (await agent.post("counter", "/seed_session", json=session)).status == 403
    guessed = {"_ng_session": {"rollout": rollout().model_dump(), "row_ref": "ngr_guess"}}
    assert (await agent.post("counter", "/seed_session", json=guessed)).status == 401


async def test_agent_cannot_verify_with_the_session_cookie_of_a_pipelines_seed(counter: Stack) -> None:
    body = {**ROW, "_ng_session": {"rollout": rollout().model_dump()}}
    seeded = await counter.client().post("counter", "/seed_session", json=body)
    agent = counter.client(Role.AGENT, "agent")
    tool = await agent.post("counter", "/add", json={"amount": 3}, cookies=seeded.cookies)
    verify = await agent.post("counter", "/verify", json={"response": response()}, cookies=seeded.cookies)
    assert (tool.status, verify.status) == (200, 403)


async def test_agents_row_reference_cannot_change_the_row(counter: Stack) -> None:
    stored = await deposit(counter)
    agent = counter.client(Role.AGENT, "agent")
    session = {"_ng_session": {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}}
    forged = {**stored["public_row"], "expected": 0, **session}
    await agent.post("counter", "/seed_session", json=forged)
    reply = await agent.post("counter", "/verify", json={**forged, "response": response()})
    assert (await reply.json())["reward"] == 0.0


async def test_descriptor_and_public_row_hold_no_private_field(counter: Stack) -> None:
    body = {**ROW, "_ng_session": {"rollout": rollout().model_dump()}}
    seeded = await counter.client().post("counter", "/seed_session", json=body)
    reply = await seeded.json()
    token = reply.pop("control_token")
    assert token and CANARY not in str(reply) and "hint" not in str(reply)
    assert reply["public_row"]["responses_create_params"] == {"input": ROW["responses_create_params"]["input"]}


async def test_tool_error_tells_an_agent_its_type_only(counter: Stack) -> None:
    reply = await counter.client(Role.AGENT, "agent").post("counter", "/broken_tool", json={})
    text = (await reply.read()).decode()
    assert reply.status == 500 and "RuntimeError" in text and CANARY not in text


def test_allow_listed_metadata_is_public() -> None:
    shown = public_row(ROW, PhraseEnvironment.public_metadata_keys)
    assert shown["responses_create_params"]["metadata"] == {"hint": "start at one"}
    assert {*shown} == {"responses_create_params", "_ng_task_index", "_ng_rollout_index", "agent_ref"}


def test_metadata_for_the_model_server_is_public_in_every_environment() -> None:
    given = {"chat_template_kwargs": '{"enable_thinking": false}', "extra_body": '{"top_k": 1}'}
    metadata = {**given, "instance_dict": CANARY}
    shown = public_row({"responses_create_params": {"input": "x", "metadata": metadata}})
    assert shown["responses_create_params"]["metadata"] == given


async def test_session_cookie_cannot_be_forged(counter: Stack) -> None:
    client = counter.client()
    body = {**ROW, "start": 100, "_ng_session": {"rollout": rollout().model_dump()}}
    seeded = await client.post("counter", "/seed_session", json=body)
    (name, morsel), *_ = seeded.cookies.items()
    assert name == "CounterEnvironment___counter"
    payload, mac = morsel.value.split(".")
    for forged in (f"{payload}.{'A' * len(mac)}", f"{payload}x.{mac}", payload, "garbage", ""):
        reply = await client.post("counter", "/add", json={"amount": 1}, cookies={name: forged})
        assert (await reply.json()) == {"count": 1}
    genuine = await client.post("counter", "/add", json={"amount": 1}, cookies={name: morsel.value})
    assert (await genuine.json()) == {"count": 101}


async def test_cookie_of_one_run_is_worth_nothing_in_another(counter: Stack) -> None:
    seeded = await counter.client().post(
        "counter", "/seed_session", json={**ROW, "start": 9, "_ng_session": {"rollout": rollout().model_dump()}}
    )
    other = Stack()
    other.add("counter", CounterEnvironment, Role.ENVIRONMENT)
    try:
        reply = await other.client().post("counter", "/add", json={"amount": 1}, cookies=seeded.cookies)
        assert (await reply.json()) == {"count": 1}
    finally:
        other.close()


async def test_control_token_is_given_to_the_pipeline_only(counter: Stack) -> None:
    stored = await deposit(counter)
    session = {"_ng_session": {"rollout": rollout().model_dump(), "row_ref": stored["row_ref"]}}
    by_agent = await counter.client(Role.AGENT, "agent").post("counter", "/seed_session", json=session)
    by_pipeline = await counter.client().post("counter", "/seed_session", json=session)
    assert "control_token" not in await by_agent.json()
    token = (await by_pipeline.json())["control_token"]
    closing = await counter.client().post(
        "counter", "/close", json={"rollout": rollout().model_dump()}, headers={CONTROL_TOKEN_HEADER: token}
    )
    assert closing.status == 200
