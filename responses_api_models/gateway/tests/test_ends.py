"""How calls and sessions end, and what observers see of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson

from nemo_gym_testing.gateway import Status
from responses_api_models.gateway.tests.conftest import GatewayStack, until


async def test_call_in_flight_is_told_when_its_session_ends(gateway: GatewayStack) -> None:
    session = await gateway.open()
    await session.chat()
    gateway.engine.gate.clear()
    body = {"model": "m", "messages": session.messages}
    asking = asyncio.create_task(session.post("/chat/completions", body))
    await until(lambda: len(gateway.engine.calls) == 2)
    summary = await session.finalize()
    reply = await asking
    assert reply.status == 409
    assert "finalized" in (await reply.json())["error"]["message"]
    assert summary["turns"] == len(summary["trajectories"][0]["turns"]) == 1
    await until(lambda: gateway.engine.calls[1].outcome == "cancelled")
    gateway.engine.gate.set()


async def test_finalizing_again_answers_the_same(gateway: GatewayStack) -> None:
    session = await gateway.open()
    await session.chat()
    first = await session.finalize(reward=1.0, reward_info={"passed": True})
    assert await session.finalize(reward=0.0) == first
    assert first["trajectories"][0]["reward_info"] == {"passed": True}
    assert (await session.control("abort")).status == 409


async def test_newer_attempt_closes_the_older_ones_session(gateway: GatewayStack) -> None:
    older = await gateway.open()
    newer = await gateway.open(attempt=2)
    reply = await older.post("/chat/completions", {"model": "m", "messages": older.messages})
    assert reply.status == 409
    await newer.chat()


async def test_session_is_aborted_at_its_deadline(gateway: GatewayStack) -> None:
    session = await gateway.open({"ttl_s": 0.2})
    async with asyncio.timeout(20):
        while (await session.state())["state"] != "aborted":  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.05)
    assert (await session.post("/chat/completions", {"model": "m", "messages": session.messages})).status == 401
    assert (await session.control("finalize")).status == 409


async def test_capture_holds_every_call_without_the_token(gateway: GatewayStack, tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    await gateway.restart(capture={"directory": str(folder)}, retries={"max_tries": 1})
    session = await gateway.open()
    await session.chat()
    await session.post("/messages", {"model": "m", "max_tokens": 9, "stream": True, "messages": session.messages})
    gateway.engine.faults.append(Status(500))
    await session.post("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "other"}]})
    await session.post("/chat/completions", {"model": "m", "messages": "no list"})
    file = folder / f"{session.facts['session_id']}.jsonl"
    await until(lambda: file.exists() and file.read_bytes().count(b"\n") == 4)
    calls = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    assert [(call["dialect"], call["status"], call["code"]) for call in calls] == [
        ("chat", 200, None),
        ("messages", 200, None),
        ("chat", 502, "engine_failed"),
        ("chat", 400, "body"),
    ]
    assert calls[0]["engines"] == [gateway.engine.url.removeprefix("http://")]
    assert calls[1]["split_reason"] == "resample"
    assert {"sampled", "committed", "sent"} <= {*calls[0]["milliseconds"]}
    assert session.facts["inference_token"].encode() not in file.read_bytes()


async def test_token_in_the_path_opens_a_session_where_it_is_allowed(gateway: GatewayStack) -> None:
    await gateway.restart(path_tokens=True)
    session = await gateway.open()
    session.facts["base_url"] = session.facts["path_token_base_url"]
    body = {"model": "m", "messages": session.messages}
    reply = await session.post("/chat/completions", body, Authorization="Bearer whatever-the-client-insists-on")
    assert reply.status == 200
    assert (await session.state())["turns"] == 1
