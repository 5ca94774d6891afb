"""What one session may take, and what it hears when it asks for more."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.contract.verdict import FailureKind, StageError
from nemo_gym.gateway.backend import LONG_S, SMALL_BYTES, LoopTurns, SessionShare, step_begins
from nemo_gym.gateway.dialects.messages import MessagesAdapter
from nemo_gym.gateway.tokens import IncrementalEncoder
from nemo_gym.gateway.tokens.history import HistoryReader
from nemo_gym.http.peers import Peers
from nemo_gym.rollout import Attempt, RolloutSteps, Servers
from nemo_gym_testing.gateway import Status
from responses_api_models.gateway.tests.conftest import GatewayStack, Opened, until
from tests.servers.stack import rollout

DIALECTS = {"/chat/completions": "messages", "/messages": "messages", "/responses": "input"}


def port_of(session: Opened) -> int:
    return int(session.facts["base_url"].split(":")[2].split("/")[0])


def asked(path: str, turns: int, **more: Any) -> dict[str, Any]:
    history = [{"role": "user", "content": f"question {turn}"} for turn in range(turns)]
    return {"model": "any", "max_tokens" if path == "/messages" else "x": 9, DIALECTS[path]: history, **more}


async def chunks(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 100):
        yield body[at : at + 100]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
async def test_request_beyond_a_limit_is_told_which(gateway: GatewayStack, path: str, chunked: bool) -> None:
    await gateway.restart(max_messages=20, max_body_values=200)
    session = await gateway.open()

    async def said(body: dict[str, Any]) -> tuple[int, str]:
        raw = orjson.dumps(body)
        reply = await session.post_raw(path, chunks(raw) if chunked else raw)  # type: ignore[arg-type]
        return reply.status, await reply.text()

    assert (await said(asked(path, 20)))[0] == 200
    status, text = await said(asked(path, 21))
    assert status == 413 and "max_messages" in text, text
    wrong: tuple[dict[str, Any], ...] = ({"metadata": [[]] * 300}, {"tools": [[[0] * 300]]}, {"stop": [1] * 300})
    for more in wrong:
        status, text = await said(asked(path, 1, **more))
        assert status == 413 and "max_body_values" in text, text
    assert (await said(asked(path, 1, metadata={"text": "[],{}" * 300})))[0] == 200


async def test_count_of_tokens_has_the_same_limits(gateway: GatewayStack) -> None:
    await gateway.restart(max_messages=20, max_body_values=200)
    session = await gateway.open()
    for body, key in ((asked("/messages", 21), "max_messages"), (asked("/messages", 1, x=[0] * 900), "max_body_v")):
        reply = await session.post("/messages/count_tokens", body)
        assert reply.status == 413 and key in await reply.text()


@pytest.mark.parametrize(
    ("limit", "key"), [({"max_session_messages": 6}, "max_session_messages"), ({"max_session_bytes": 3000}, "bytes")]
)
async def test_session_that_has_kept_all_that_it_may_gets_no_further_answer(
    gateway: GatewayStack, limit: dict[str, Any], key: str
) -> None:
    await gateway.restart(**limit)
    session, other = await gateway.open(), await gateway.open(rollout_id="other")
    refusals = []
    for _ in range(2):
        while (reply := await session.post("/chat/completions", {"messages": session.messages})).status == 200:
            session.messages += [(await reply.json())["choices"][0]["message"], {"role": "user", "content": "x" * 50}]
            assert len(session.messages) < 40
        assert reply.status == 413 and key in await reply.text()
        assert reply.headers.get("x-should-retry") != "true"
        refusals.append(len(session.messages))
        await gateway.restart(**limit, port=port_of(session))
    assert refusals[0] == refusals[1] > 3, "what was kept before a restart counts"
    await other.say("hello")
    assert (await session.finalize())["turns"] == (refusals[0] - 1) // 2


async def test_messages_of_a_growing_conversation_are_counted_once(gateway: GatewayStack) -> None:
    await gateway.restart(max_session_messages=9)
    session = await gateway.open()
    for _ in range(5):
        await session.say("go on")
    assert (await session.post("/chat/completions", {"messages": session.messages})).status == 413


@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_in_flight_are_bounded_for_each_session(gateway: GatewayStack, chunked: bool) -> None:
    await gateway.restart(max_session_in_flight_bytes=3000, max_body_bytes=2000)
    session, other = await gateway.open(), await gateway.open(rollout_id="other")
    gateway.engine.gate.clear()

    def post(number: int, who: Opened = session) -> Any:
        raw = orjson.dumps({"messages": [{"role": "user", "content": f"{number}" * 1900}]})
        return asyncio.create_task(who.post_raw("/chat/completions", chunks(raw) if chunked else raw))  # type: ignore[arg-type]

    first = post(1)
    await until(lambda: len(gateway.engine.calls) == 1)
    refused = await post(2)
    assert refused.status == 429 and "max_session_in_flight_bytes" in await refused.text()
    assert int(refused.headers["retry-after"]) >= 1 and refused.headers["x-should-retry"] == "true"
    beside = post(3, other)
    await until(lambda: len(gateway.engine.calls) == 2)
    gateway.engine.gate.set()
    assert [(await one).status for one in (first, beside)] == [200, 200]
    assert (await post(2)).status == 200


async def test_bodies_whose_tokens_are_counted_are_in_flight_like_others(gateway: GatewayStack) -> None:
    await gateway.restart(max_session_in_flight_bytes=3000, max_body_bytes=2000)
    session = await gateway.open()
    gateway.engine.gate.clear()
    body = {"messages": [{"role": "user", "content": "x" * 1900}]}
    first = asyncio.create_task(session.post("/chat/completions", body))
    await until(lambda: len(gateway.engine.calls) == 1)
    refused = await session.post("/messages/count_tokens", body)
    assert refused.status == 429 and "max_session_in_flight_bytes" in await refused.text()
    gateway.engine.gate.set()
    assert (await first).status == 200
    assert (await session.post("/messages/count_tokens", body)).status == 200


async def test_lowering_a_body_whose_tokens_are_counted_is_charged(
    gateway: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    owed: list[float] = []
    wait, lower = LoopTurns.wait, MessagesAdapter.lower

    async def noted_wait(self: LoopTurns, share: SessionShare) -> None:
        owed.append(share.owed_s)
        await wait(self, share)

    def slow_lower(self: MessagesAdapter, *given: Any) -> Any:
        began = time.thread_time()
        while time.thread_time() - began < 2 * LONG_S:
            pass
        return lower(self, *given)

    monkeypatch.setattr(LoopTurns, "wait", noted_wait)
    monkeypatch.setattr(MessagesAdapter, "lower", slow_lower)
    body = {"messages": [{"role": "user", "content": "x" * 2 * SMALL_BYTES}]}
    assert (await (await gateway.open()).post("/messages/count_tokens", body)).status == 200
    assert max(owed, default=0) >= 2 * LONG_S


async def test_body_that_would_complete_a_session_is_read_for_its_token_only(gateway: GatewayStack) -> None:
    session = await gateway.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(session))
    head = f"POST /sessions/{session.facts['session_id']}/complete HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    writer.write(f"{head}Authorization: Bearer ngd1_another\r\n\r\n".encode())
    async with asyncio.timeout(20):
        assert b" 401 " in await reader.readline()
    writer.close()


async def test_conversation_that_surely_overflows_is_refused_before_it_is_encoded(
    gateway: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"path": str(gateway.folder / "policy"), "max_context_tokens": 1000}
    await gateway.restart(policy=policy)
    session = await gateway.open()
    for path in ("/chat/completions", "/messages/count_tokens"):
        reply = await session.post(path, {"messages": [{"role": "user", "content": "x" * 17_000}]})
        assert reply.status == 400 and "1000" in await reply.text()
    monkeypatch.setattr(IncrementalEncoder, "full", None)  # it is not asked
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 17_000}}
    reply = await session.post("/chat/completions", {"messages": session.messages, "tools": [tool]})
    assert reply.status == 400 and "1000" in await reply.text()
    monkeypatch.undo()
    session.messages = [{"role": "user", "content": "fits"}]
    await session.chat(metadata={"text": "x" * 17_000})


async def test_session_that_owes_the_loop_time_waits_and_nobody_else_does() -> None:
    turns, heavy, light = LoopTurns(), SessionShare(), SessionShare()
    began = time.thread_time()
    while time.thread_time() - began < 2 * LONG_S:
        pass
    heavy.worked(began)
    light.worked(step_begins(SMALL_BYTES + 1))
    assert heavy.owed_s >= 2 * LONG_S and not light.owed_s
    with pytest.raises(StopIteration):
        turns.wait(light).send(None)  # without a turn of the loop
    await turns.wait(heavy)
    assert not heavy.owed_s


async def test_wait_that_is_broken_off_pays_nothing() -> None:
    turns, heavy = LoopTurns(), SessionShare(owed_s=3600.0)
    waiting = [asyncio.create_task(turns.wait(heavy)) for _ in range(3)]
    await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    assert heavy.owed_s == 3600.0


class HeldReader(HistoryReader):
    """Reads long histories only once it is let go."""

    reached, go = threading.Event(), threading.Event()

    def read(self, messages: Any, tools: Any, found: Any = None) -> Any:
        if len(messages) > 500:
            self.reached.set()
            self.go.wait(10)
        return super().read(messages, tools, found)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldReader:
    """Of all sessions that are opened from now on."""
    monkeypatch.setattr("nemo_gym.gateway.tokens.forest.HistoryReader", HeldReader)
    HeldReader.reached, HeldReader.go = threading.Event(), threading.Event()
    return HeldReader()


def long_history() -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": f"line {turn} " * 10} for turn in range(999)]


async def test_others_are_answered_while_a_long_history_is_read(gateway: GatewayStack, held: HeldReader) -> None:
    session, other = await gateway.open(), await gateway.open(rollout_id="other")
    session.messages = long_history()
    asking = asyncio.create_task(session.chat())
    assert await asyncio.to_thread(held.reached.wait, 10)
    for _ in range(3):
        await other.say("hello")
    assert not held.go.is_set() and not asking.done()
    held.go.set()
    session.messages += [(await asking)["choices"][0]["message"], {"role": "user", "content": "go on"}]
    await session.chat()
    (row,) = (await session.finalize(reward=1.0, trajectories=True))["trajectories"]
    assert sum(row["response_mask"]) and len(row["turns"]) == 2


async def test_requests_of_a_session_wait_for_its_long_one_also_when_its_caller_left(
    gateway: GatewayStack, held: HeldReader
) -> None:
    session = await gateway.open()
    short, long = session.messages, long_history()
    leaving = asyncio.create_task(session.post("/chat/completions", {"messages": long}))
    assert await asyncio.to_thread(held.reached.wait, 10)
    leaving.cancel()
    await asyncio.wait({leaving})
    beside = asyncio.create_task(session.chat())
    again = asyncio.create_task(session.post("/chat/completions", {"messages": [*long, *long[:2]]}))
    await (await gateway.open(rollout_id="other")).say("hello")
    assert not beside.done() and not again.done()
    held.go.set()
    session.messages = [*short, (await beside)["choices"][0]["message"], {"role": "user", "content": "go on"}]
    assert (await again).status == 200
    await session.chat()
    rows = (await session.finalize(trajectories=True))["trajectories"]
    assert sorted(len(row["turns"]) for row in rows) == [1, 2]


async def test_count_of_tokens_of_a_long_history_holds_nobody_up(
    gateway: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()
    full = IncrementalEncoder.full

    def encode(self: IncrementalEncoder, messages: Any, **more: Any) -> list[int]:
        if len(messages) > 500:
            reached.set()
            go.wait(10)
        return full(self, messages, **more)

    monkeypatch.setattr(IncrementalEncoder, "full", encode)
    session, other = await gateway.open(), await gateway.open(rollout_id="other")
    counting = asyncio.create_task(session.post("/messages/count_tokens", {"messages": long_history()}))
    assert await asyncio.to_thread(reached.wait, 10)
    await other.say("hello")
    assert not counting.done()
    go.set()
    assert (await (await counting).json())["input_tokens"] > 999


async def test_harness_that_repeats_a_failing_request_is_told_to_stop_and_others_keep_their_retries(
    gateway: GatewayStack,
) -> None:
    await gateway.restart(retries={"first_backoff_s": 0, "session_budget_capacity": 8, "budget_ratio": 0})
    session, other = await gateway.open(), await gateway.open(rollout_id="other")
    gateway.engine.chance = lambda: Status(500)
    told: list[str | None] = []
    while told[-1:] != ["false"]:
        reply = await session.post("/chat/completions", {"messages": session.messages})
        assert reply.status == 502 and len(told) < 10
        told.append(reply.headers.get("x-should-retry"))
    assert told == ["true", "true", "false"] and len(gateway.engine.calls) == 9
    gateway.engine.chance = lambda: None
    gateway.engine.faults.append(Status(500))
    await other.say("hello")
    assert len(gateway.engine.calls) == 11
    await session.say("hello")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"sampling": {"logit_bias": {str(token): 1 for token in range(10_000)}}}, "sampling"),
        ({"sampling": {"stop": ["x" * 70_000]}}, "sampling"),
        ({"ttl_s": 1e308}, "ttl_s"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"limits": {"idle_timeout_s": -1}}, "limits.idle_timeout_s"),
    ],
)
async def test_session_that_asks_for_too_much_is_refused_by_the_fields_name(
    gateway: GatewayStack, body: dict[str, Any], said: str
) -> None:
    asked = {"rollout": rollout().model_dump(), **body}
    reply = await gateway.stack.client(Role.PIPELINE, "collector").post("gateway", "/sessions", json=asked)
    text = await reply.text()
    assert reply.status in (400, 422) and said in text and len(text) < 1000, (reply.status, text[:500])


async def test_rollout_whose_row_samples_wrongly_fails_by_the_rows_field(gateway: GatewayStack) -> None:
    row = {"responses_create_params": {"input": "hello", "temperature": -1}}
    servers = Servers("agent", None, "gateway", enforce_row_sampling=True)
    steps = RolloutSteps(Peers(gateway.stack.client(Role.PIPELINE, "collector")))
    with pytest.raises(StageError) as raised:
        await steps.open_session(Attempt(servers, rollout().model_dump(), orjson.dumps(row)), "gateway")
    failure = raised.value.failure
    assert (failure.kind, failure.retryable) == (FailureKind.SEED_FAILED, False)
    assert "responses_create_params (temperature)" in failure.reason and "-1" in failure.reason


async def test_session_with_a_number_beyond_64_bits_is_no_failure_of_the_gateway(gateway: GatewayStack) -> None:
    asked = {"rollout": {**rollout().model_dump(), "sample_index": 2**70}}
    reply = await gateway.stack.client(Role.PIPELINE, "collector").post("gateway", "/sessions", data=json.dumps(asked))
    assert reply.status in (400, 422), await reply.text()
