"""Bounds on boxes: a queue with a deadline, fair across owners, and nothing beyond the bound."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter

import pytest

from nemo_gym.broker.boxes import Admission
from nemo_gym.contract.credentials import Role
from nemo_gym.sandbox.wire.problems import BrokerError
from resources_servers.sandbox.tests.api import Api, calling, eventually
from resources_servers.sandbox.tests.conftest import StartBroker


def admission(max_boxes: int | None = None, per_owner: int | None = None, **changes: float) -> Admission:
    settings = {"max_waiting": 1000, "timeout_s": 30.0, **changes}
    return Admission(
        max_boxes=max_boxes,
        max_per_owner=per_owner,
        max_waiting=int(settings["max_waiting"]),
        timeout_s=settings["timeout_s"],
    )


async def test_places_go_to_the_owner_who_holds_the_fewest() -> None:
    places = admission(10)
    order: list[str] = []

    async def one(owner: str) -> None:
        await places.enter(owner)
        order.append(owner)

    greedy = [asyncio.create_task(one("greedy")) for _ in range(100)]
    await asyncio.sleep(0)
    modest = [asyncio.create_task(one("modest")) for _ in range(5)]
    await asyncio.sleep(0)
    assert order == ["greedy"] * 10
    for _ in range(10):
        places.leave("greedy")
        await asyncio.sleep(0)
    assert Counter(order[10:]) == {"greedy": 5, "modest": 5}
    assert order[10] == "modest"
    assert places.total == 10
    for task in (*greedy, *modest):
        task.cancel()
    await asyncio.gather(*greedy, *modest, return_exceptions=True)
    assert (places.waiting, places.total) == (0, 10)


async def test_owner_at_its_quota_does_not_hold_up_others() -> None:
    places = admission(10, 2, timeout_s=0.2)
    for _ in range(2):
        await places.enter("full")
    waiting = asyncio.create_task(places.enter("full"))
    await asyncio.sleep(0)
    await places.enter("other")
    with pytest.raises(BrokerError, match="'full' has 2 boxes of at most 2") as caught:
        await waiting
    assert (caught.value.code, caught.value.retryable, caught.value.started) == ("quota", True, "no")


async def test_wait_ends_at_its_deadline_and_a_full_queue_refuses_at_once() -> None:
    places = admission(1, timeout_s=0.1, max_waiting=1)
    await places.enter("a")
    waiting = asyncio.create_task(places.enter("b"))
    await asyncio.sleep(0)
    with pytest.raises(BrokerError, match="the queue for a box is full"):
        await places.enter("c")
    with pytest.raises(BrokerError, match="no box became free within") as caught:
        await waiting
    assert caught.value.code == "no_room"
    assert (places.total, places.waiting) == (1, 0)


async def test_cancelled_waits_lose_no_place() -> None:
    places = admission(3)
    for _ in range(3):
        await places.enter("a")
    tasks = [asyncio.create_task(places.enter("b")) for _ in range(50)]
    await asyncio.sleep(0)
    for position, task in enumerate(tasks):
        if position % 2:
            task.cancel()
        else:
            with contextlib.suppress(KeyError):
                places.leave("a" if places.held["a"] else "b")
        if position % 3 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert places.total <= 3
    assert places.waiting == 0


async def test_storm_of_creates_is_served_within_the_bound_and_fairly(start_broker: StartBroker) -> None:
    broker = start_broker(max_boxes=4, queue_timeout_s=120)
    finished: list[str] = []
    most = 0
    async with calling(broker) as operator:

        async def one(owner: str) -> None:
            nonlocal most
            async with calling(broker, owner, Role.ENVIRONMENT) as api:
                box = await api.box(labels={"owner": owner})
                most = max(most, len(await operator.ids()))
                assert (await box.run("echo ran")).stdout == b"ran\n"
                assert (await box.ask("DELETE")).status == 204
                finished.append(owner)

        await asyncio.gather(*(one("greedy") for _ in range(20)), *(one("modest") for _ in range(4)))
        assert most <= 4
        assert len(finished) == 24
        # By the time the modest owner's four are served, the greedy one's twenty are not.
        assert len(finished) - 1 - finished[::-1].index("modest") < 23
        assert await operator.ids() == []
        metrics = (await operator.call("GET", "/metrics")).body.decode()
        assert "sandbox_broker_waiting 0.0" in metrics


async def test_creates_commands_and_renewals_are_counted(start_broker: StartBroker) -> None:
    async with calling(start_broker()) as operator:

        async def counted(*names: str) -> list[float]:
            lines = (await operator.call("GET", "/metrics")).body.decode().splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
            return [float(values.get(f"sandbox_broker_{name}", 0)) for name in names]

        names = ('creates_total{outcome="created"}', "create_seconds_count", "execs_total", "renewals_total")
        before = await counted(*names)
        box = await operator.box()
        assert (await box.run("true")).end["return_code"] == 0
        assert (await box.ask("PUT", "/lease", json={"ttl_s": 60})).status == 200
        after = await counted(*names)
        assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1, 1, 1]


async def waits(api: Api, count: int) -> bool:
    return f"sandbox_broker_waiting {count}.0" in (await api.call("GET", "/metrics")).body.decode()


async def test_caller_that_leaves_the_queue_leaves_no_box(start_broker: StartBroker) -> None:
    broker = start_broker(max_boxes=1, queue_timeout_s=60)
    async with calling(broker) as api:
        first = await api.box()
        key = uuid.uuid4().hex
        waiting = asyncio.create_task(api.create(key, labels={"late": "yes"}))
        await eventually(lambda: waits(api, 1), "the second create waits")
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await eventually(lambda: waits(api, 0), "nobody waits any more")
        await first.ask("DELETE")
        assert await api.ids(late="yes") == []
        assert (await api.create(key, labels={"late": "yes"})).status == 201


async def test_refusal_for_want_of_room_says_when_to_try_again(start_broker: StartBroker) -> None:
    broker = start_broker(max_boxes=3, max_boxes_per_owner=1, queue_timeout_s=0.2)
    async with calling(broker, "one", Role.ENVIRONMENT) as one, calling(broker, "two", Role.ENVIRONMENT) as two:
        await one.box()
        refused = await one.create()
        assert (refused.status, refused.code, refused.json["retryable"]) == (429, "quota", True)
        assert int(refused.headers["Retry-After"]) >= 1
        await two.box()
