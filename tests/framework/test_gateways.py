"""Many gateways: sessions spread evenly, a lost gateway gets nothing, and its sessions are run again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.framework import SessionLostError
from nemo_gym.framework.gateways import GatewayPool
from nemo_gym.http.peers import PeerReply, Peers
from nemo_gym_testing.gateway import FakeOpenAIEngine
from tests.framework import runners
from tests.framework.conftest import Stage, prompts
from tests.servers.stack import rollout, until

RUNNERS = "tests.framework.runners"


async def test_sessions_that_open_together_spread_evenly(stage: Stage) -> None:
    await stage.start(4)
    pool = stage.pool()
    opened = await asyncio.gather(*(pool.open(rollout(f"r{number}"), {}) for number in range(40)))
    assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in stage.spread)
    assert [*pool.counts.values()] == [10] * 4
    await asyncio.gather(*(pool.abort(session) for session in opened[:8]), *(pool.finalize(s) for s in opened[8:]))
    assert [*pool.counts.values()] == [0] * 4
    assert stage.live_sessions() == []


async def test_each_session_is_finalized_where_it_is(stage: Stage) -> None:
    await stage.start(2)
    pool = stage.pool()
    opened = [await pool.open(rollout(f"r{number}"), {}) for number in range(4)]
    for number, session in enumerate(opened):
        await runners.chat(session.handle, [{"role": "user", "content": str(number)}])
    for number, session in enumerate(opened):
        (trajectory,) = await pool.finalize(session, reward=number / 4, reward_info={"n": number})
        assert (trajectory.session_id, trajectory.reward) == (session.session_id, number / 4)
        assert trajectory.reward_info == {"n": number}


async def test_dead_gateway_gets_no_session(stage: Stage) -> None:
    await stage.start(3)
    await asyncio.to_thread(stage.stack.stop, "gateway_2")
    pool = stage.pool()
    for number in range(9):
        await pool.open(rollout(f"r{number}"), {})
    assert pool.counts == {"gateway_1": 5, "gateway_3": 4} or pool.counts == {"gateway_1": 4, "gateway_3": 5}


async def test_sessions_of_a_lost_gateway_are_run_again_as_new_attempts(stage: Stage) -> None:
    await stage.start(3)
    pool = stage.pool()
    stage.engine.gate.clear()
    runner = {"runner_fqn": f"{RUNNERS}.Counting", "runner_kwargs": {"turns": 2}}
    running = asyncio.create_task(
        stage.framework({"calls": runner}, pool=pool, rollout={"n": 3}).run_batch(prompts(6))
    )
    await until(lambda: runners.in_flight.get("counting", 0) == 18)
    lost = pool.gateways[0]
    assert lost.active == 6
    stopping = asyncio.create_task(asyncio.to_thread(stage.stack.stop, lost.name))
    await asyncio.sleep(0.2)
    stage.engine.gate.set()
    summary = await running
    await stopping
    assert summary.failed_sessions == 0
    assert {key.rsplit("_", 1)[0] for key in stage.sink.rows} == {f"u{n}_{k}" for n in range(6) for k in range(3)}
    assert [stage.sink.status(f"u{number}")[-1] for number in range(6)] == ["finished"] * 6
    assert not lost.alive
    assert len([counts for counts in stage.spread if lost.name not in counts]) == 6
    assert [gateway.active for gateway in pool.gateways] == [0, 0, 0]


async def test_gateway_that_comes_back_aborts_what_was_open_and_serves_again(stage: Stage) -> None:
    await stage.start(2)
    pool = stage.pool()
    first = await pool.open(rollout("r0"), {})
    port = int(stage.stack.url(first.gateway.name).rsplit(":", 1)[1])
    await asyncio.to_thread(stage.stack.stop, first.gateway.name)
    with pytest.raises(SessionLostError, match=f"gateway '{first.gateway.name}' was lost"):
        await pool.finalize(first)
    await pool.abort(first)
    assert first.gateway.active == 0
    number = stage.names.index(first.gateway.name)
    names, stage.names = stage.names, stage.names[:number]
    await stage.start(1, port=port)
    stage.names = names
    await until(lambda: first.gateway.alive)
    assert first.session_id not in stage.live_sessions()
    assert first.gateway.orphans == []


async def test_session_left_while_another_is_aborted_is_aborted_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.start(1)
    pool = stage.pool()
    first, second = [await pool.open(rollout(f"r{number}"), {}) for number in range(2)]
    post, left = Peers.post, [second]

    async def post_while_another_is_left(
        peers: Peers, server: str, path: str, *args: Any, **options: Any
    ) -> PeerReply:
        if left:
            await pool.abort(left.pop())
        return await post(peers, server, path, *args, **options)

    pool._mark_lost(first.gateway, TimeoutError())
    await pool.abort(first)
    monkeypatch.setattr(Peers, "post", post_while_another_is_left)
    await until(lambda: first.gateway.alive)
    assert stage.live_sessions() == []


async def test_no_gateway_at_all_is_told_in_time(stage: Stage) -> None:
    await stage.start(1)
    await asyncio.to_thread(stage.stack.stop, "gateway_1")
    summary = await stage.framework(
        pool=stage.pool(patience_s=0.5), max_session_attempts=2, rollout={"n": 1}
    ).run_batch(prompts(2))
    assert summary.failed_sessions == 2
    assert all("no gateway answers (gateway_1)" in reason for reason in summary.reasons)
    assert [stage.sink.status(f"u{number}")[-1] for number in range(2)] == ["failure", "failure"]


async def test_gateway_without_tokens_in_paths_is_refused(stage: Stage) -> None:
    await stage.start(1, path_tokens=False)
    with pytest.raises(ConfigError, match="path_tokens: true"):
        await stage.pool().open(rollout("r0"), {})


async def test_gateway_that_keeps_text_is_refused(stage: Stage) -> None:
    async with FakeOpenAIEngine() as engine:
        await stage.start(1, policy=None, engines=[{"type": "openai", "base_url": engine.url}])
        pool = stage.pool()
        session = await pool.open(rollout("r0"), {})
        await runners.chat(session.handle, [{"role": "user", "content": "hello"}])
        with pytest.raises(ConfigError, match="keeps text and no tokens"):
            await pool.finalize(session)
        await pool.abort(session)
        assert pool.counts == {"gateway_1": 0}


def test_pool_needs_a_gateway(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        GatewayPool(stage.stack.client(), [])
