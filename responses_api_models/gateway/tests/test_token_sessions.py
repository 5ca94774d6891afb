"""Sessions whose tokens are exact, from a harness's request to the exported trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest

from nemo_gym.server_utils import request
from nemo_gym_testing.gateway import Status
from nemo_gym_testing.gateway.sampler import Sampled
from responses_api_models.gateway.tests.conftest import CALL, TOOL, GatewayStack, until


def sampled(row: dict[str, Any]) -> list[int]:
    return [i for i, mask in zip(row["response_ids"], row["response_mask"], strict=True) if mask]


async def test_trajectory_holds_what_the_engine_sampled_and_nothing_else(gateway: GatewayStack) -> None:
    session = await gateway.open()
    gateway.teller.texts = ["first", CALL, "third"]
    await session.say("and then?", tools=[TOOL])
    answer = (await session.chat(tools=[TOOL]))["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "shell", "arguments": '{"command": "ls"}'}
    call_id = answer["message"]["tool_calls"][0]["id"]
    session.messages += [answer["message"], {"role": "tool", "tool_call_id": call_id, "content": "a.py"}]
    await session.chat(tools=[TOOL])
    summary = await session.finalize(reward=0.5)
    (row,) = summary["trajectories"]
    calls = gateway.engine.answered
    assert sampled(row) == [token for call in calls for token in call.token_ids]
    logprobs = [lp for lp, mask in zip(row["logprobs"], row["response_mask"], strict=True) if mask]
    assert logprobs == pytest.approx([lp for call in calls for lp in call.logprobs])
    everything = row["prompt_ids"] + row["response_ids"]
    for call in calls:
        assert everything[: len(call.body["prompt"])] == call.body["prompt"]
    assert row["reward"] == 0.5
    assert summary["turns"] == 3
    assert summary["usage"]["output_tokens"] == len(sampled(row))


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_is_answered_in_its_own_shape(gateway: GatewayStack, path: str, stream: bool) -> None:
    session = await gateway.open()
    gateway.teller.texts = ["said so"]
    asked: dict[str, Any] = {"model": "m", "stream": stream, "max_tokens": 50}
    asked |= {"input": "hi"} if path == "/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    if path == "/responses":
        asked.pop("max_tokens")
    reply = await session.post(path, asked)
    text = await reply.text()
    assert reply.status == 200, text
    assert "said so" in text
    assert reply.headers["Content-Type"].startswith("text/event-stream" if stream else "application/json")
    assert (await session.state())["turns"] == 1


async def test_same_conversation_in_three_dialects_is_one_chain(gateway: GatewayStack) -> None:
    session = await gateway.open()
    gateway.teller.texts = ["one", "two", "three"]
    user = {"role": "user", "content": "hi"}
    await session.chat(messages=[user])
    history = [user, {"role": "assistant", "content": "one"}, {"role": "user", "content": "next"}]
    assert (await session.post("/messages", {"model": "m", "max_tokens": 9, "messages": history})).status == 200
    items = [*history, {"role": "assistant", "content": "two"}, {"role": "user", "content": "last"}]
    assert (await session.post("/responses", {"model": "m", "input": items})).status == 200
    assert len((await session.finalize())["trajectories"]) == 1


async def test_restarted_gateway_goes_on_with_the_same_tokens(gateway: GatewayStack) -> None:
    session = await gateway.open()
    await session.say("more")
    before = (await session.state())["usage"]
    await gateway.restart(port=int(session.facts["base_url"].split(":")[2].split("/")[0]))
    assert (await session.state())["usage"] == before
    await session.say("more")
    summary = await session.finalize()
    assert len(summary["trajectories"]) == 1
    assert sampled(summary["trajectories"][0]) == [t for call in gateway.engine.answered for t in call.token_ids]


@pytest.mark.parametrize("restarted", [False, True])
async def test_stop_string_that_a_harness_puts_back_keeps_the_conversation_one(
    gateway: GatewayStack, restarted: bool
) -> None:
    sampler, stop = gateway.engine.sampler, "</search>"

    def stopped(prompt_ids: Sequence[int], max_tokens: int, call: int) -> Sampled:
        whole = sampler(prompt_ids, max_tokens, call)
        return replace(whole, token_ids=whole.token_ids[:-1], logprobs=whole.logprobs[:-1], stop_reason=stop)

    gateway.engine.sampler = stopped
    gateway.teller.texts = [f"I look.\n<search>\nx {number}\n{stop}" for number in range(3)]
    session = await gateway.open()
    for number in range(3):
        answer = await session.say("<information>1</information>", stop=[stop])
        assert answer["content"] == f"I look.\n<search>\nx {number}\n"
        answer["content"] += stop
        if restarted:
            await gateway.restart(port=int(session.facts["base_url"].split(":")[2].split("/")[0]))
    (row,) = (await session.finalize())["trajectories"]
    assert sampled(row) == [token for call in gateway.engine.calls for token in call.token_ids]


async def test_idempotency_key_gets_the_first_answer_sampled_once(gateway: GatewayStack) -> None:
    session = await gateway.open()
    body = {"model": "m", "messages": session.messages}
    replies = [await session.post("/chat/completions", body, **{"Idempotency-Key": "k1"}) for _ in range(3)]
    assert len({await reply.text() for reply in replies}) == 1
    assert len(gateway.engine.calls) == 1


async def test_template_variables_of_a_request_are_not_applied_and_the_log_says_so_once(
    gateway: GatewayStack, capsys: pytest.CaptureFixture[str]
) -> None:
    session = await gateway.open()
    metadata = {"chat_template_kwargs": '{"enable_thinking": false}'}
    for _ in range(2):
        assert (await session.post("/responses", {"model": "m", "input": "hi", "metadata": metadata})).status == 200
    assert capsys.readouterr().out.count("chat_template_kwargs are not applied") == 1


async def test_asking_again_after_a_delivered_answer_samples_anew(gateway: GatewayStack) -> None:
    session = await gateway.open()
    first, second = await session.chat(), await session.chat()
    assert first["choices"][0]["message"] != second["choices"][0]["message"]
    summary = await session.finalize()
    assert [row["split_reason"] for row in summary["trajectories"]] == ["initial", "resample"]


async def test_caller_that_leaves_ends_the_sampling_and_changes_nothing(gateway: GatewayStack) -> None:
    session = await gateway.open()
    gateway.engine.gate.clear()
    asking = asyncio.create_task(session.chat())
    await until(lambda: bool(gateway.engine.calls))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: gateway.engine.calls[0].outcome == "cancelled")
    gateway.engine.gate.set()
    await session.chat()
    summary = await session.finalize()
    assert summary["turns"] == 1
    assert sampled(summary["trajectories"][0]) == [*gateway.engine.answered[0].token_ids]


async def test_long_answer_is_announced_by_pings(gateway: GatewayStack) -> None:
    await gateway.restart(first_event_grace_s=0.05, ping_interval_s=0.05)
    session = await gateway.open(rollout_id="slow")
    gateway.engine.gate.clear()
    body = {"model": "m", "max_tokens": 50, "stream": True, "messages": session.messages}
    reply = await session.post("/messages", body)
    seen = b""
    while seen.count(b"event: ping") < 3:
        seen += await reply.content.readany()
    gateway.engine.gate.set()
    seen += await reply.content.read()
    assert b"message_stop" in seen
    assert (await session.state())["turns"] == 1


async def test_turns_after_a_restart_carry_the_version_that_the_trainer_set(gateway: GatewayStack) -> None:
    await gateway.restart(engines=[{"type": "vllm", "base_url": gateway.engine.url, "weights_version": "0"}])
    reply = await gateway.stack.client().post("gateway", "/weights", json={"version": "7"})
    assert reply.status == 200, await reply.text()
    await gateway.restart(engines=[{"type": "vllm", "base_url": gateway.engine.url, "weights_version": "0"}])
    session = await gateway.open()
    await session.chat()
    (row,) = (await session.finalize(reward=1.0))["trajectories"]
    assert row["weights_versions"] == ["7"]


async def test_one_model_by_name_is_a_model_to_both_clients(gateway: GatewayStack) -> None:
    import anthropic  # here, because it takes a second, and every test process imports this file

    session = await gateway.open()
    token, url = session.facts["inference_token"], session.facts["base_url"]
    async with openai.AsyncOpenAI(api_key=token, base_url=url, max_retries=0) as client:
        model = await client.models.retrieve("org/any")
    assert (model.id, model.object) == ("policy-7b", "model")
    async with anthropic.AsyncAnthropic(auth_token=token, base_url=url[: -len("/v1")], max_retries=0) as other:
        info = await other.models.retrieve("any")
    assert (info.id, info.type) == ("policy-7b", "model")


async def test_token_of_another_session_is_refused_on_a_sessions_path(gateway: GatewayStack) -> None:
    first, second = await gateway.open(), await gateway.open(rollout_id="r2")
    headers = {"Authorization": f"Bearer {second.facts['inference_token']}"}
    url = first.facts["base_url"] + "/chat/completions"
    reply = await request("POST", url, json={"messages": first.messages}, headers=headers)
    assert reply.status in (401, 403)
    assert "error" in await reply.json()


async def test_prompt_beyond_the_context_is_told_as_each_dialect_does(gateway: GatewayStack) -> None:
    session = await gateway.open()
    long = [{"role": "user", "content": "word " * 200_000}]
    chat = await session.post("/chat/completions", {"model": "m", "messages": long})
    assert (chat.status, (await chat.json())["error"]["code"]) == (400, "context_length_exceeded")
    messages = await session.post("/messages", {"model": "m", "max_tokens": 5, "messages": long})
    assert "prompt is too long" in (await messages.json())["error"]["message"]
    assert not gateway.engine.calls


async def test_prompt_that_only_the_engine_counts_beyond_its_context_is_told_so_too(gateway: GatewayStack) -> None:
    said = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
    gateway.engine.faults.append(Status(400, orjson.dumps({"error": {"message": said}})))
    session = await gateway.open()
    reply = await session.post("/chat/completions", {"messages": session.messages})
    error = (await reply.json())["error"]
    assert (reply.status, error["code"]) == (400, "context_length_exceeded"), error


@pytest.mark.parametrize(("block", "body"), [({"return_token_ids": True}, {}), ({}, {"return_token_ids": True})])
async def test_reply_carries_the_exact_tokens_when_the_gateway_or_the_caller_asks_for_them(
    gateway: GatewayStack, block: dict[str, Any], body: dict[str, Any]
) -> None:
    await gateway.restart(**block)
    session = await gateway.open()
    message = (await session.chat(**body))["choices"][0]["message"]
    (call,) = gateway.engine.answered
    assert message["prompt_token_ids"] == call.body["prompt"]
    assert message["generation_token_ids"] == list(call.token_ids)
    assert message["generation_log_probs"] == pytest.approx(list(call.logprobs))
