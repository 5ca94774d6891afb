"""Engines that are processes: killed, stopped, and back. `campaigns.faults.gateway_router` has figures of the same."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from campaigns.faults.router_doors import LibraryDoor, Load, TurnError, library, until
from campaigns.faults.router_engines import EngineProcess, Listener, engines
from nemo_gym_testing.gateway.tiny import make_policy

FAST = {"probe_interval_s": 0.1, "queue_timeout_s": 60.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), "chatml_think")


class Lab:
    """Three engines and a pool before them."""

    def __init__(self, running: list[EngineProcess], door: LibraryDoor) -> None:
        self.engines = running
        self.door = door

    def down(self, name: str) -> bool:
        return self.door.pool.engine_status(name)["state"] == "down"

    def sampled(self) -> set[tuple[int, ...]]:
        return {tuple(call.token_ids) for engine in self.engines for call in engine.calls()}


@pytest.fixture
async def lab(policy: Path, tmp_path: Path) -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        wanted = [EngineProcess(f"e{n}", policy, tmp_path, tokens_per_second=100.0) for n in range(3)]
        running = await stack.enter_async_context(engines(*wanted))
        configs = [engine.config(probe_timeout_s=0.3) for engine in running]
        yield Lab(running, await stack.enter_async_context(library(configs, routing=FAST, retries={}, max_tokens=8)))


async def test_no_session_is_lost_when_an_engine_is_killed(lab: Lab) -> None:
    load = Load(lab.door)
    running = asyncio.create_task(load.run(24, 4))
    await load.reached(20)
    lab.engines[0].kill()
    await running
    assert load.lost == [] and load.turns_done == 96
    assert {answer.token_ids for answer in lab.door.answers} <= lab.sampled()


async def test_no_session_is_lost_when_an_engine_hangs_and_it_serves_again_later(lab: Lab) -> None:
    victim = lab.engines[0]
    load = Load(lab.door)
    running = asyncio.create_task(load.run(24, 4))
    await load.reached(20)
    victim.send(signal.SIGSTOP)
    await until(functools.partial(lab.down, victim.name))
    await running
    assert load.lost == [] and load.turns_done == 96
    placed = victim.count()
    victim.send(signal.SIGCONT)
    await until(lambda: not lab.down(victim.name))
    more = Load(lab.door)
    await more.run(12, 2)
    assert more.lost == [] and victim.count() > placed
    assert {answer.token_ids for answer in lab.door.answers} <= lab.sampled()


async def test_dead_engine_gets_probes_only(lab: Lab) -> None:
    victim = lab.engines[0]
    load = Load(lab.door)
    running = asyncio.create_task(load.run(1000, 4, width=12))
    await load.reached(20)
    victim.kill()
    async with Listener().at(victim.port, b"") as listener:
        await until(functools.partial(lab.down, victim.name))
        before = listener.seen.copy()
        await until(lambda: listener.seen["GET /health"] >= before["GET /health"] + 5)
        found = listener.seen - before
    load.stopped = True
    await running
    assert load.lost == [] and found["requests"] == found["GET /health"]


async def test_session_goes_on_when_every_engine_was_gone_for_a_while(lab: Lab) -> None:
    session = await lab.door.session()
    await session.turn()
    for engine in lab.engines:
        engine.kill()
    turn = asyncio.create_task(session.turn())
    await until(lambda: all(lab.down(engine.name) for engine in lab.engines))
    lab.engines[1].start()
    await turn
    assert lab.door.answers[-1].token_ids in lab.sampled()


async def test_caller_is_told_when_to_come_back_while_no_engine_is_there(policy: Path) -> None:
    configs = [{"type": "vllm", "base_url": "http://127.0.0.1:9", "name": "nobody"}]
    async with library(configs, routing={"queue_timeout_s": 0.05}, retries={}) as door:
        session = await door.session()
        for _ in range(2):
            with pytest.raises(TurnError) as caught:
                await session.turn()
            assert (caught.value.status, caught.value.retry_after) == (503, "5")
