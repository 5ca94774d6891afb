"""Two services over one PostgreSQL store: each job runs once, and either may be asked about all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from resources_servers.sandbox.tests.postgres import running_postgres
from tests.service.conftest import Chain, job, serving
from tests.service.test_service import raw

MakeChain = Callable[..., Chain]


async def test_ids_that_the_database_cannot_hold_do_not_stop_the_service(make_chain: MakeChain) -> None:
    with running_postgres() as server:
        async with serving(make_chain(agent={"delay_s": 0.05}), store=server.new_database(), concurrency=8) as served:
            await served.client.submit([job(n) for n in range(40)])
            for _ in range(20):
                asked = (raw(served, "GET", "/v1/jobs/a%00b", role="read") for _ in range(4))
                assert {status for status, _ in await asyncio.gather(*asked)} == {404}
            for body in ({"group": "a\0b"}, {"run": "\0"}, {"job_id": "\0"}, {"job_ids": ["\0"]}):
                assert (await raw(served, "POST", "/v1/cancel", body))[0] == 422
            status, problem = await raw(served, "POST", "/v1/cancel", {"run": "r", "reason": "a\0b"})
            assert status == 422 and "reason" in problem["detail"]
            assert await served.client.wait() == {"done": 40}


async def test_two_services_share_jobs_results_and_cancels(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"delay_s": 0.2, "hang": ["t100"]})
    with running_postgres() as server:
        store = server.new_database()
        async with serving(chain, store=store, pipeline="a", concurrency=4, lease_s=20) as first:
            async with serving(chain, store=store, pipeline="b", concurrency=4, lease_s=20) as second:
                await first.client.submit([job(n, run_id="r") for n in range(60)])
                await second.client.submit([job(n, run_id="r") for n in range(60)])  # the same jobs
                assert await second.client.wait(run="r") == {"done": 60}
                told = Counter([view.job_id async for view in first.client.results(run="r", follow=False)])
                assert set(told.values()) == {1} and len(told) == 60
                assert Counter(chain.notes("act")).most_common(1)[0][1] == 1
                done = [
                    sum(each["done"] for each in (await each.client.status())["servers"]) for each in (first, second)
                ]
                assert min(done) > 0
                await second.service.drain(0)
                await first.client.submit([job(100, run_id="hung")])
                await first.wait(lambda: any(name == "job-100" for name, _ in chain.notes("act")), "it to hang")
                await second.client.cancel(run="hung", reason="asked of the other service")
                view = await second.client.job("job-100", wait_s=30)
                assert (view.state, view.failures[-1]["reason"]) == ("cancelled", "asked of the other service")
