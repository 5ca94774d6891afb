"""Numbers that are none, or too large: an engine's fail its call as a failure of its own, a caller's are refused by
name, and neither is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway import FakeOpenAIEngine, FakeVllmEngine
from nemo_gym_testing.gateway.faults import Garbage
from responses_api_models.gateway.tests.conftest import FAMILY, GatewayStack, Teller
from responses_api_models.gateway.tests.test_text_sessions import TextStack
from tests.gateway.tokens.policies import write
from tests.servers.stack import running_stack


def completion(ids: str, logprobs: str, *, long: bool) -> bytes:
    """As vLLM writes it. ``long``: so long that it is read another way."""
    filler = f',"text":"{"x" * (70 << 10)}"' if long else ',"text":"x"'
    told = f'{{"text_offset":[0,5],"token_logprobs":{logprobs},"tokens":["a","b"],"top_logprobs":[{{"a":-0.5}}]}}'
    choice = f'{{"index":0{filler},"logprobs":{told},"finish_reason":"stop","stop_reason":null,"token_ids":{ids}'
    return f'{{"id":"c","choices":[{choice},"prompt_token_ids":null}}],"usage":null}}'.encode()


WRONG = [
    ("[5.0,6]", "[-0.5,-0.25]"),
    ("[-1,5]", "[-0.5,-0.25]"),
    ("[5,-2147483648]", "[-0.5,-0.25]"),
    ("[2147483648,5]", "[-0.5,-0.25]"),
    ("[4294967301,5]", "[-0.5,-0.25]"),
    ("[99999999999999999999999,5]", "[-0.5,-0.25]"),
    ("[1e300,5]", "[-0.5,-0.25]"),
    ("[5.5,5]", "[-0.5,-0.25]"),
    ('["5",5]', "[-0.5,-0.25]"),
    ("[true,5]", "[-0.5,-0.25]"),
    ("[null,5]", "[-0.5,-0.25]"),
    ("[999999999,5]", "[-0.5,-0.25]"),
    ("null", "[-0.5,-0.25]"),
    ("[5,6]", "[null,-0.25]"),
    ("[5,6]", "[NaN,-0.25]"),
    ("[5,6]", "[-Infinity,-0.25]"),
    ("[5,6]", "[-1e39,-0.25]"),
    ("[5,6]", "[-1e999,-0.25]"),
    ("[5,6]", "[-0.25]"),
    ("[5,6]", "null"),
    ("[5,6]", '["-0.5",-0.25]'),
    ("[5,6]", "[[-0.5],-0.25]"),
]
SPELLED = [
    ("[5,6]", "[-0.5,-0.25]", [5, 6]),
    ("[ 5 , 6 ]", "[-0.0,-2.5e-1]", [5, 6]),
    ("[-0,6]", "[0,-1]", [0, 6]),
    ("[]", "[]", []),
]


def written(body: dict[str, Any]) -> bytes:
    """With numbers as large as they are."""
    return json.dumps(body).encode()


ALONE: dict[str, Any] = {"retries": {"max_tries": 1}, "routing": {"probe_interval_s": 0.05}}
"""Each call fails at once."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayStack]:
    write(tmp_path / "policy", FAMILY)
    teller = Teller()
    async with FakeVllmEngine(teller) as engine:
        with running_stack() as stack:
            served = GatewayStack(stack, engine, teller, tmp_path)
            await served.start(**ALONE)
            yield served
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)


@pytest.mark.parametrize("long", [False, True])
async def test_numbers_that_are_none_are_the_engines_failure(gateway: GatewayStack, long: bool) -> None:
    session = await gateway.open()
    body = {"messages": session.messages, "model": "any"}
    told = {}
    for ids, logprobs in WRONG:
        gateway.engine.faults.append(Garbage(completion(ids, logprobs, long=long)))
        reply = await session.post("/chat/completions", body)
        told[ids, logprobs] = reply.status
        assert not gateway.engine.faults
    assert set(told.values()) == {502}, told
    await session.chat()
    assert (await session.finalize())["turns"] == 1


@pytest.mark.parametrize("long", [False, True])
async def test_numbers_in_any_spelling_are_kept_as_what_they_are(gateway: GatewayStack, long: bool) -> None:
    for number, (ids, logprobs, kept) in enumerate(SPELLED):
        session = await gateway.open(rollout_id=f"r{number}")
        gateway.engine.faults.append(Garbage(completion(ids, logprobs, long=long)))
        first = await session.chat(return_token_ids=True)
        assert first["choices"][0]["message"].get("generation_token_ids", []) == kept
        (row,) = (await session.finalize())["trajectories"]
        sampled = zip(row["response_ids"], row["response_mask"], strict=True)
        assert [token for token, mask in sampled if mask] == kept


LARGE = (2**63, 2**64, 10**30, -(10**30))
WHOLE = {
    "/chat/completions": ("max_tokens", "max_completion_tokens", "seed", "top_k", "n"),
    "/messages": ("max_tokens", "top_k"),
    "/responses": ("max_output_tokens", "seed", "top_k", "n"),
}
ANYTHING = ("unknown", "logit_bias", "top_logprobs", "max_tool_calls", "metadata", "created")


@pytest.mark.parametrize("path", WHOLE)
async def test_numbers_beyond_64_bits_are_refused_by_name(gateway: GatewayStack, path: str) -> None:
    session = await gateway.open()
    history = {"input": "hi"} if path == "/responses" else {"messages": session.messages}
    body = {"model": "any", "max_output_tokens" if path == "/responses" else "max_tokens": 8, **history}
    for field in WHOLE[path]:
        for number in LARGE:
            reply = await session.post_raw(path, written({**body, field: number}))
            assert reply.status == 400, (field, number, await reply.text())
            assert field in (await reply.json())["error"]["message"]
    for field in ANYTHING:
        for number in LARGE:
            reply = await session.post_raw(path, written({**body, field: number}))
            assert reply.status in (200, 400), (field, number, await reply.text())
    assert (await session.finalize())["trajectories"]


async def test_numbers_beyond_64_bits_within_tools_and_calls_are_no_failure_here(gateway: GatewayStack) -> None:
    session = await gateway.open()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 10**30}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}
    history = [*session.messages, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c"}]
    for body in ({"tools": [tool]}, {"messages": history}, {"messages": history, "tools": [tool]}):
        reply = await session.post_raw("/chat/completions", written({"messages": session.messages, **body}))
        assert reply.status == 200, await reply.text()


USAGES = (
    '{"prompt_tokens": 1000000000000000000000000000000}',
    '{"prompt_tokens": 1, "completion_tokens": 1e300}',
    '{"prompt_tokens": 1, "completion_tokens": "many"}',
    '{"prompt_tokens": 1, "completion_tokens": {}}',
    '{"prompt_tokens": 1, "completion_tokens": -1}',
    '{"prompt_tokens_details": {"cached_tokens": 36893488147419103232}}',
)


async def test_usage_that_counts_nothing_is_the_endpoints_failure(tmp_path: Path) -> None:
    async with FakeOpenAIEngine() as engine:
        with running_stack() as stack:
            served = TextStack(stack, engine, Teller(), tmp_path)  # type: ignore[arg-type]
            await served.start(**ALONE)
            session = await served.open()
            for usage in USAGES:
                message = '{"role": "assistant", "content": "x"}'
                answer = f'{{"choices": [{{"message": {message}, "finish_reason": "stop"}}], "usage": {usage}}}'
                engine.faults.append(Garbage(answer.encode()))
                reply = await session.post("/chat/completions", {"messages": session.messages})
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (502, "engine_answer"), (usage, error)
            await session.say("more")
            assert (await session.finalize())["turns"] == 1
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)


async def test_cached_tokens_that_count_nothing_are_the_engines_failure(gateway: GatewayStack) -> None:
    session = await gateway.open()
    good = completion("[5,6]", "[-0.5,-0.25]", long=False)
    wrong = good.replace(b'"usage":null', b'"usage":{"prompt_tokens_details":{"cached_tokens":1e40}}')
    gateway.engine.faults.append(Garbage(wrong))
    reply = await session.post("/chat/completions", {"messages": session.messages})
    assert (reply.status, (await reply.json())["error"]["code"]) == (502, "engine_answer")
    await session.say("more")
