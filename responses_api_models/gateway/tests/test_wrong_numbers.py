"""Engines whose token ids and logprobs are no such: each call fails as a failure of theirs, and keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nemo_gym.gateway.testing import FakeVllmEngine
from nemo_gym.gateway.testing.faults import Garbage
from nemo_gym.server_utils import close_global_aiohttp_client
from responses_api_models.gateway.tests.conftest import FAMILY, GatewayStack, Teller
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
ALONE = {"retries": {"max_tries": 1}, "routing": {"probe_interval_s": 0.05}}
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
