"""A server that hangs or is stopped among others that work: it gets no more, and no job is lost to it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nemo_gym.service.client import ServiceError
from tests.rollouts.chain_process import ChainServer
from tests.service.conftest import Chain, Served, job, serving

MakeChain = Callable[..., Chain]
CAPACITY = 4


@pytest.fixture
def hung() -> Iterator[ChainServer]:
    """An agent server that takes jobs and never answers."""
    server = ChainServer("agent", {"delay_s": 3600.0})
    server.wait_ready()
    yield server
    server.stop()


async def health_of(served: Served, server_id: str) -> tuple[str, str | None, int]:
    told: dict[str, Any] = {each["server_id"]: each for each in (await served.client.status())["servers"]}
    return told[server_id]["health"], told[server_id]["reason"], told[server_id]["busy"]


async def lend(served: Served, server: ChainServer) -> None:
    await served.client.register_server("trivial", f"http://127.0.0.1:{server.port}", capacity=CAPACITY)


async def test_server_that_hangs_is_drained_by_the_stages_deadline(make_chain: MakeChain, hung: ChainServer) -> None:
    keys = {"capacities": {"trivial": CAPACITY}, "concurrency": 2 * CAPACITY, "run_timeout_s": 2.0}
    async with serving(make_chain(agent={"delay_s": 0.05}), **keys) as served:
        await lend(served, hung)
        await served.client.submit([job(n) for n in range(60)])
        assert await served.client.wait() == {"done": 60}
        state, reason, active = await health_of(served, "trivial.1")
        assert (state, active) == ("draining", 0)
        late, _, rest = str(reason).partition(" ")
        assert rest == "rollouts in a row ran into their deadline"
        # The first two that were late may have left their places to others before the third had the server drained.
        assert CAPACITY <= int(late) <= CAPACITY + 2
        attempts = Counter([view.attempt async for view in served.client.results(follow=False)])
        assert attempts == {1: 60 - int(late), 2: int(late)}


async def test_server_that_hangs_is_drained_by_the_jobs_deadlines(make_chain: MakeChain, hung: ChainServer) -> None:
    keys = {"capacities": {"trivial": CAPACITY}, "concurrency": 2 * CAPACITY}
    async with serving(make_chain(agent={"delay_s": 0.05}), **keys) as served:
        await lend(served, hung)
        await served.client.submit([job(n, deadline_s=6.0) for n in range(2 * CAPACITY)])
        assert await served.client.wait() == {"done": CAPACITY, "failed": CAPACITY}
        assert (await health_of(served, "trivial.1"))[0] == "draining"
        await served.client.submit([job(n, deadline_s=60.0, group_id="later") for n in range(100, 120)])
        assert await served.client.wait(group="later") == {"done": 20}


async def test_server_whose_jobs_were_late_before_they_came_keeps_its_place(
    make_chain: MakeChain, hung: ChainServer
) -> None:
    async with serving(make_chain(agent={"delay_s": 0.05}), concurrency=2 * CAPACITY) as served:
        await served.service.drain(0)
        await served.client.submit([job(n, deadline_s=4.0) for n in range(CAPACITY)])
        await lend(served, hung)
        for other in served.service.pool.replicas("trivial")[:1]:
            served.service.pool.drain(other, "the test wants the jobs elsewhere")
        queued = await served.client.job("job-0", wait_s=2.5)
        assert queued.state == "queued"
        await served.client.drain(resume=True)
        assert await served.client.wait() == {"failed": CAPACITY}
        assert (await health_of(served, "trivial.1"))[0] == "ready"


async def test_jobs_wait_for_an_agent_that_is_silent_when_the_service_starts(make_chain: MakeChain) -> None:
    chain = make_chain()
    async with serving(chain) as served:
        await served.client.drain()
        await served.client.submit([job(n) for n in range(3)])
    agent = chain.servers["agent"].process.pid or 0
    os.kill(agent, signal.SIGSTOP)
    try:
        async with serving(chain, check_s=0.5) as served:
            assert (await served.client.status())["agents"] == {"trivial": False}
            os.kill(agent, signal.SIGCONT)
            async with asyncio.timeout(30):
                assert await served.client.wait() == {"done": 3}
    finally:
        os.kill(agent, signal.SIGCONT)


async def test_servers_stay_watched_beside_one_whose_url_no_client_can_use(make_chain: MakeChain) -> None:
    other = ChainServer("agent", {})
    try:
        other.wait_ready()
        async with serving(make_chain()) as served:
            pool = served.service.pool
            pool.register("trivial", "http://a..b")  # a state file of an earlier release may hold it
            await lend(served, other)
            await served.wait(lambda: pool.of_id("trivial.1").state == "lost", "the one to be found useless")
            other.kill()
            await served.wait(lambda: pool.of_id("trivial.2").state == "lost", "the other to be missed")
    finally:
        other.stop()


@pytest.mark.parametrize("url", ["http://a..b", "http://node:99999", "http://[::1", "http://me:word@node", "node:80"])
async def test_url_to_which_no_connection_can_be_made_is_refused(make_chain: MakeChain, url: str) -> None:
    async with serving(make_chain()) as served:
        with pytest.raises(ServiceError, match=r"url: .*is not a valid server URL") as refused:
            await served.client.register_server("trivial", url)
        assert refused.value.details["status"] == 422


async def test_server_process_that_is_stopped_gives_its_jobs_to_others(make_chain: MakeChain) -> None:
    other = ChainServer("agent", {"delay_s": 0.2})
    keys = {"capacities": {"trivial": CAPACITY}, "concurrency": 2 * CAPACITY}
    try:
        other.wait_ready()
        async with serving(make_chain(agent={"delay_s": 0.05}), **keys) as served:
            await lend(served, other)
            await served.client.submit([job(n) for n in range(80)])
            pool = served.service.pool
            await served.wait(lambda: pool.of_id("trivial.1").busy == CAPACITY, "work at the second server")
            os.kill(other.process.pid or 0, signal.SIGSTOP)
            assert await served.client.wait() == {"done": 80}
            assert (await health_of(served, "trivial.1"))[0] == "lost"
            os.kill(other.process.pid or 0, signal.SIGCONT)
            await served.wait(lambda: pool.of_id("trivial.1").state == "ready", "it to be back")
    finally:
        other.stop()


async def test_agent_that_is_silent_when_it_has_its_verdict_buys_no_second_try(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"overrides_run": True, "run_hangs": True})
    agent = chain.servers["agent"].process.pid or 0
    async with serving(chain) as served:
        await served.client.submit([job(0)])
        await served.wait(lambda: len(chain.notes("run")) == 1, "the agent to have its verdict")
        os.kill(agent, signal.SIGSTOP)
        try:
            view = await served.client.job("job-0", wait_s=30)
        finally:
            os.kill(agent, signal.SIGCONT)
        assert (view.state, view.reward, view.attempt) == ("done", 0.5, 1)
        assert view.result is not None and "silent for" in view.result["outcome_detail"]
    assert chain.notes("run") == [("job-0", 1)]


async def test_agent_that_hangs_until_the_jobs_deadline_discards_no_verdict(make_chain: MakeChain) -> None:
    async with serving(make_chain(agent={"overrides_run": True, "run_hangs": True})) as served:
        await served.client.submit([job(0, deadline_s=2.0)])
        view = await served.client.job("job-0", wait_s=30)
        assert (view.state, view.reward, view.attempt) == ("done", 0.5, 1)


async def test_cancelled_job_whose_agent_has_its_verdict_ends_cancelled(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"overrides_run": True, "run_hangs": True})
    async with serving(chain) as served:
        await served.client.submit([job(0)])
        await served.wait(lambda: len(chain.notes("run")) == 1, "the agent to have its verdict")
        await served.client.cancel(job_ids=["job-0"])
        assert (await served.client.job("job-0", wait_s=30)).state == "cancelled"
    assert chain.notes("verdict") == []


async def test_drained_server_that_was_silent_and_is_back_stays_drained(make_chain: MakeChain) -> None:
    other = ChainServer("agent", {})
    try:
        other.wait_ready()
        async with serving(make_chain()) as served:
            await lend(served, other)
            pool = served.service.pool
            server = pool.of_id("trivial.1")
            pool.drain(server, "an operator drains it")
            os.kill(other.process.pid or 0, signal.SIGSTOP)
            await served.wait(lambda: server.state == "lost", "it to be missed")
            os.kill(other.process.pid or 0, signal.SIGCONT)
            await served.wait(lambda: server.state != "lost", "it to be back")
            assert server.state == "draining"
            assert server.reason == "an operator drains it"
            await lend(served, other)
            assert (server.state, server.reason) == ("ready", None)
    finally:
        other.stop()
