"""Large answers pass as bytes: what an endpoint told of tokens is not read on its way, and is all there at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.gateway.policy_request import JsonText
from nemo_gym.server_utils import close_global_aiohttp_client
from nemo_gym_testing.gateway import FakeOpenAIEngine
from nemo_gym_testing.gateway.engine import Answer, CallLog
from nemo_gym_testing.gateway.sampler import Sampled
from responses_api_models.gateway.app import Gateway
from responses_api_models.gateway.tests.conftest import GatewayStack, Opened, Teller, until
from responses_api_models.gateway.tests.test_text_sessions import TextStack
from tests.servers.stack import running_stack

TOKENS = 3000
ASKED = {"logprobs": True, "return_token_ids": True}
RETRY = {"x-stainless-retry-count": "1"}


class IdsEngine(FakeOpenAIEngine):
    """Tells ids, and for each token an alternative, with text that JSON must escape."""

    def answer(self, call: CallLog) -> Answer:
        made = super().answer(call)
        choice = made.whole["choices"][0]
        choice["token_ids"] = [*call.token_ids]
        for entry in (choice["logprobs"] or {}).get("content") or ():
            entry["top_logprobs"] = [{"token": '"]},"token_ids":[é', "logprob": -9.5, "bytes": None}]
        return made


def long_answer(prompt_ids: Sequence[int], max_tokens: int, call: int) -> Sampled:
    return Sampled(tuple(range(1, TOKENS + 1)), tuple(-at / 977 - call for at in range(TOKENS)), stopped=True)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[TextStack]:
    async with IdsEngine(long_answer) as engine:
        with running_stack() as stack:
            served = TextStack(stack, engine, Teller(), tmp_path)  # type: ignore[arg-type]
            await served.start()
            yield served
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)


async def raw(session: Opened, **headers: str) -> bytes:
    reply = await session.post("/chat/completions", {"messages": session.messages, "model": "any", **ASKED}, **headers)
    body = await reply.read()
    assert reply.status == 200, body[:500]
    assert int(reply.headers["Content-Length"]) == len(body)
    return body


def port_of(session: Opened) -> int:
    return int(session.facts["base_url"].split(":")[2].split("/")[0])


async def test_reply_has_the_endpoints_own_entries_and_ids(gateway: TextStack) -> None:
    session = await gateway.open()
    choice = orjson.loads(await raw(session))["choices"][0]
    (call,) = gateway.engine.answered
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [*call.logprobs]
    assert content[7]["top_logprobs"] == [{"token": '"]},"token_ids":[é', "logprob": -9.5, "bytes": None}]
    assert choice["message"]["generation_token_ids"] == [*call.token_ids]
    assert choice["message"]["content"] == "".join(f"w{token} " for token in call.token_ids)


async def test_repeated_answer_is_the_same_bytes_also_after_a_restart(gateway: TextStack) -> None:
    session = await gateway.open()
    first = await raw(session)
    assert await raw(session, **RETRY) == first
    await gateway.restart(port=port_of(session))
    assert await raw(session, **RETRY) == first
    assert len(gateway.engine.answered) == 1


def relayed_in(gateway: TextStack, session: Opened) -> list[Mapping[str, JsonText]]:
    """What the gateway holds of a session's relayed texts, by turn."""
    server = gateway.stack.servers["gateway"]
    assert isinstance(server, Gateway)
    found: list[Mapping[str, JsonText]] = server._durable.live(session.facts["session_id"]).conversations.relayed
    return found


@pytest.mark.parametrize("durability", ["process", "power_loss"])
async def test_large_texts_are_in_memory_until_their_answer_has_left(gateway: TextStack, durability: str) -> None:
    await gateway.restart(durability=durability)
    session = await gateway.open()
    first = await raw(session)
    (told,) = relayed_in(gateway, session)
    await until(lambda: told["entries"]._data is None)
    # Small: reading it again would cost more. A view would hold the whole reply.
    assert isinstance(told["token_ids"]._data, bytes)
    assert await raw(session, **RETRY) == first
    assert bytes(told["entries"].data) in first
    assert len(gateway.engine.answered) == 1


async def test_large_texts_stay_in_the_journal_after_a_restart(gateway: TextStack) -> None:
    session = await gateway.open()
    first = await raw(session)
    await gateway.restart(port=port_of(session))
    (told,) = relayed_in(gateway, session)
    assert (told["entries"]._data, type(told["token_ids"]._data)) == (None, bytes)
    assert await raw(session, **RETRY) == first
    (row,) = (await session.finalize(reward=1.0))["trajectories"]
    assert row["turns"][0]["details"]["token_logprobs"] == [*gateway.engine.answered[0].logprobs]


async def test_an_answer_whose_caller_left_is_in_memory_for_its_retry(gateway: TextStack) -> None:
    session = await gateway.open()
    host, _, port = session.facts["base_url"].split("/")[2].partition(":")
    body = orjson.dumps({"messages": session.messages, "model": "any", **ASKED})
    _, writer = await asyncio.open_connection(host, int(port))
    token = session.facts["inference_token"]
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await until(lambda: len(gateway.engine.answered) == 1)
    writer.transport.abort()
    await raw(session)
    content = (await session.finalize())["trajectories"][0]["turns"][0]["details"]["token_logprobs"]
    assert len(content) == TOKENS


async def test_texts_that_the_journal_lost_are_said_to_be_lost(gateway: TextStack, tmp_path: Path) -> None:
    session = await gateway.open()
    await raw(session)
    (told,) = relayed_in(gateway, session)
    await until(lambda: told["entries"]._data is None)
    for segment in (tmp_path / "journal").glob("*.log"):
        segment.unlink()
    reply = await session.control("finalize", {"reward": 1.0})
    assert (reply.status, (await reply.json())["code"]) == (503, "journal")


@pytest.mark.parametrize("restarted", [False, True])
async def test_export_has_every_logprob_and_id_of_relayed_answers(gateway: TextStack, restarted: bool) -> None:
    session = await gateway.open()
    for _ in range(2):
        answer = orjson.loads(await raw(session))["choices"][0]["message"]
        session.messages += [answer, {"role": "user", "content": "more"}]
    if restarted:
        await gateway.restart(port=port_of(session))
    (row,) = (await session.finalize(reward=1.0))["trajectories"]
    told = [turn["details"] for turn in row["turns"]]
    assert [details["token_logprobs"] for details in told] == [[*call.logprobs] for call in gateway.engine.answered]
    assert [details["token_ids"] for details in told] == [[*call.token_ids] for call in gateway.engine.answered]
    assert told[0]["token_texts"][:2] == ["w1 ", "w2 "]


@pytest.mark.parametrize("path", ["/responses", "/chat/completions"])
async def test_replies_of_another_shape_tell_the_same_logprobs(gateway: TextStack, path: str) -> None:
    session = await gateway.open()
    body: dict[str, Any] = {"model": "any", "stream": path == "/chat/completions"}
    if path == "/responses":
        body |= {"input": "hello", "include": ["message.output_text.logprobs"]}
    else:
        body |= {"messages": session.messages, **ASKED}
    text = await (await session.post(path, body)).text()
    (call,) = gateway.engine.answered
    if path == "/responses":
        entries = orjson.loads(text)["output"][-1]["content"][0]["logprobs"]
    else:
        events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert [entry["logprob"] for entry in entries] == [*call.logprobs]


async def test_endpoints_logprobs_that_nobody_can_read_cost_neither_answer_nor_trajectory(gateway: TextStack) -> None:
    original = gateway.engine.answer

    def odd(call: CallLog) -> Answer:
        made = original(call)
        del made.whole["choices"][0]["logprobs"]["content"][5]["logprob"]
        return made

    gateway.engine.answer = odd  # type: ignore[method-assign]
    session = await gateway.open()
    await raw(session)
    (row,) = (await session.finalize(reward=1.0))["trajectories"]
    details = row["turns"][0]["details"]
    assert "token_logprobs" not in details
    assert "cannot be read" in details["token_error"]


async def test_tokens_in_replies_of_a_token_engine_are_the_same_bytes_after_a_restart(
    token_gateway: GatewayStack,
) -> None:
    session = await token_gateway.open()
    sent = {"messages": session.messages, "model": "any", "return_token_ids": True}
    first = await (await session.post("/chat/completions", sent)).read()
    message = orjson.loads(first)["choices"][0]["message"]
    (call,) = token_gateway.engine.answered
    assert message["prompt_token_ids"] == call.body["prompt"]
    assert message["generation_token_ids"] == [*call.token_ids]
    assert message["generation_log_probs"] == pytest.approx([*call.logprobs], rel=1e-6)
    await token_gateway.restart(port=port_of(session))
    assert await (await session.post("/chat/completions", sent, **RETRY)).read() == first
    (row,) = (await session.finalize(reward=1.0))["trajectories"]
    sampled = [lp for lp, own in zip(row["logprobs"], row["response_mask"], strict=True) if own]
    assert sampled == pytest.approx(message["generation_log_probs"], rel=1e-6)
    assert len(token_gateway.engine.answered) == 1


@pytest.fixture
async def token_gateway(tmp_path: Path) -> AsyncIterator[GatewayStack]:
    from nemo_gym_testing.gateway import FakeVllmEngine
    from responses_api_models.gateway.tests.conftest import FAMILY
    from tests.gateway.tokens.policies import write

    write(tmp_path / "policy", FAMILY)
    teller = Teller()
    teller.texts = ["word é " * TOKENS]
    async with FakeVllmEngine(teller) as engine:
        with running_stack() as stack:
            served = GatewayStack(stack, engine, teller, tmp_path)
            await served.start()
            yield served
            await close_global_aiohttp_client()
            await asyncio.to_thread(stack.close)
