"""Who gets the next call, by counts: nothing here depends on time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, deque

import pytest

from nemo_gym._util.tasks import RETRY_AFTER_AT_MOST_S
from nemo_gym.contract.errors import ConfigError
from nemo_gym.gateway.engines import EngineError, EngineRateLimitedError, EngineUnreachableError
from nemo_gym.gateway.engines.router import HealthState, NoEngineError, Reservation, Router, RoutingConfig
from tests.gateway.stubs import Clock, StubEngine

Stubs = Router[StubEngine]


def router_of(*names: str, **options: float) -> Stubs:
    router: Stubs = Router(RoutingConfig(**options))  # type: ignore[arg-type]
    for name in names:
        router.add(StubEngine(name))
    return router


def one_call(router: Stubs, session_id: str | None = None) -> str:
    with _reserved(router, session_id) as reservation:
        return reservation.engine.name


def _reserved(router: Stubs, session_id: str | None = None) -> Reservation[StubEngine]:
    reservation = router.reserve(session_id)
    assert reservation is not None
    return reservation


def closed_loop(router: Stubs, calls: int, width: int, seed: int = 0) -> Counter[str]:
    """So many calls, ``width`` of them running at any time, ending in random order."""
    chance = random.Random(seed)
    running: list[Reservation[StubEngine]] = []
    placed: Counter[str] = Counter()
    for number in range(calls):
        if len(running) == width:
            running.pop(chance.randrange(width)).release(True)
        running.append(_reserved(router, f"s{seed}-{number}"))
        placed[running[-1].engine.name] += 1
    for reservation in running:
        reservation.release(True)
    return placed


def test_sequential_calls_are_spread_evenly() -> None:
    router = router_of("a", "b", "c")
    assert Counter(one_call(router) for _ in range(300)) == {"a": 100, "b": 100, "c": 100}


def test_sequential_calls_follow_the_weights() -> None:
    router: Stubs = Router()
    router.add(StubEngine("small"))
    router.add(StubEngine("large"), weight=3.0)
    assert Counter(one_call(router) for _ in range(400)) == {"small": 100, "large": 300}


def test_simultaneous_calls_follow_the_live_load_and_the_weights() -> None:
    router: Stubs = Router()
    router.add(StubEngine("small"))
    router.add(StubEngine("large"), weight=3.0)
    running = [_reserved(router) for _ in range(40)]
    assert Counter(r.engine.name for r in running) == {"small": 10, "large": 30}
    for reservation in running:
        if reservation.engine.name == "large":
            reservation.release(True)
    assert {_reserved(router).engine.name for _ in range(30)} == {"large"}


@pytest.mark.parametrize("width", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_engine_added_hot_gets_its_fair_share_of_what_follows(width: int, seed: int) -> None:
    router = router_of("a", "b")
    closed_loop(router, 10_000, width, seed)
    router.add(StubEngine("new"))
    placed = closed_loop(router, 5_000, width, seed + 100)
    assert placed == {name: pytest.approx(5_000 / 3, rel=0.05) for name in ("a", "b", "new")}


def test_engine_added_hot_takes_over_while_the_others_are_loaded() -> None:
    router = router_of("a", "b")
    running = [_reserved(router) for _ in range(20)]
    router.add(StubEngine("new"))
    assert [_reserved(router).engine.name for _ in range(10)] == ["new"] * 10
    assert len(running) == 20


def test_session_stays_on_its_engine() -> None:
    router = router_of("a", "b", "c")
    homes = {session: one_call(router, session) for session in map(str, range(30))}
    for _ in range(5):
        assert {session: one_call(router, session) for session in reversed(homes)} == homes
    assert Counter(homes.values()) == {"a": 10, "b": 10, "c": 10}


def test_session_leaves_an_engine_that_has_far_more_than_its_share() -> None:
    router = router_of("a", "b", spill_slack=2, spill_factor=1.25)
    home = one_call(router, "mine")
    other = "b" if home == "a" else "a"
    running = [_reserved(router, "mine") for _ in range(20)]
    spread = Counter(r.engine.name for r in running)
    assert spread[other] >= 5 and spread[home] >= 5, "neither all at home nor homeless"


def test_session_finds_a_new_home_when_its_engine_leaves() -> None:
    router = router_of("a", "b")
    home = one_call(router, "mine")
    router.remove(home)
    assert one_call(router, "mine") != home
    router.forget("mine")
    assert router.home("mine") is None


def test_pinned_session_stays_however_busy_its_engine_is_and_whatever_comes() -> None:
    router = router_of("a", "b", spill_slack=0, spill_factor=1.0)
    router.pin("mine", "b")
    running = [_reserved(router, "mine") for _ in range(20)]
    router.add(StubEngine("new"))
    running += [_reserved(router, "mine") for _ in range(20)]
    assert {each.engine.name for each in running} == {"b"}
    retried = router.reserve("mine", without=["b"])
    assert retried is not None and retried.engine.name == "b"
    assert one_call(router, "other") != "b"


def test_pinned_session_waits_for_room_and_leaves_only_an_engine_that_is_gone() -> None:
    router: Stubs = Router()
    router.add(StubEngine("a"))
    router.add(StubEngine("b"), max_in_flight=1)
    router.pin("mine", "b")
    with _reserved(router, "mine"):
        assert router.reserve("mine") is None
    router.remove("b")
    assert one_call(router, "mine") == "a"
    router.end("mine")
    assert router.home("mine") is None


async def test_pinned_session_returns_to_its_engine_when_that_is_back_in_service() -> None:
    router = router_of("a", "b")
    router.pin("mine", "b")
    await router.drain("b", timeout_s=0)
    assert one_call(router, "mine") == "a"
    router.undrain("b")
    assert [one_call(router, "mine") for _ in range(3)] == ["b"] * 3


async def test_call_of_a_pinned_session_that_waits_holds_up_no_other_call() -> None:
    router: Stubs = Router()
    for name in ("a", "b"):
        router.add(StubEngine(name), max_in_flight=1)
    router.pin("mine", "b")
    on_a, on_b = _reserved(router), _reserved(router, "mine")
    assert (on_a.engine.name, on_b.engine.name) == ("a", "b")
    pinned = asyncio.create_task(router.acquire("mine"))
    await asyncio.sleep(0)
    other = asyncio.create_task(router.acquire())
    await asyncio.sleep(0)
    on_a.release(True)
    async with asyncio.timeout(5):
        with await other as reservation:
            assert reservation.engine.name == "a"
    on_b.release(True)
    with await pinned as reservation:
        assert reservation.engine.name == "b"


def test_pin_to_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no engine 'c'; there are: a, b"):
        router_of("a", "b").pin("mine", "c")


def test_capacity_is_never_exceeded() -> None:
    router: Stubs = Router()
    router.add(StubEngine("a"), max_in_flight=2)
    held = [router.reserve() for _ in range(3)]
    assert [r is not None for r in held] == [True, True, False]


def test_release_counts_once() -> None:
    router = router_of("a")
    reservation = _reserved(router)
    for _ in range(3):
        reservation.release(True)
    assert router.status()[0].in_flight == 0


async def test_waiting_calls_are_served_in_order_of_arrival() -> None:
    router: Stubs = Router()
    router.add(StubEngine("a"), max_in_flight=1)
    first = _reserved(router)
    order: list[int] = []

    async def call(number: int) -> None:
        with await router.acquire():
            order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(call(number))
        await asyncio.sleep(0)
        assert order == []
        first.release(True)
    assert order == list(range(20)) and router.status()[0].in_flight == 0


async def test_place_is_given_back_when_a_waiting_call_is_cancelled_as_it_gets_one() -> None:
    router: Stubs = Router()
    router.add(StubEngine("a"), max_in_flight=1)
    held = _reserved(router)
    waiting = asyncio.create_task(router.acquire())
    await asyncio.sleep(0)
    held.release(True)  # the place is the waiter's now, which has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert router.status()[0].in_flight == 0 and router.reserve() is not None


async def test_call_fails_by_name_when_no_engine_has_room_in_time() -> None:
    router: Stubs = Router(RoutingConfig(queue_timeout_s=0.05))
    with pytest.raises(NoEngineError, match="'engines'"):
        await router.acquire()
    router.add(StubEngine("a"), max_in_flight=1)
    _reserved(router)
    with pytest.raises(NoEngineError, match="a up with 1 calls") as caught:
        await router.acquire()
    assert caught.value.retryable and caught.value.status == 503


async def test_drained_engine_gets_nothing_and_is_idle_when_its_calls_have_ended() -> None:
    router = router_of("a", "b")
    running = deque(_reserved(router) for _ in range(4))
    draining = asyncio.create_task(router.drain("a"))
    await asyncio.sleep(0)
    assert {one_call(router) for _ in range(10)} == {"b"} and not draining.done()
    while running:
        running.popleft().release(True)
    assert await draining
    router.undrain("a")
    placed = Counter(one_call(router) for _ in range(100))
    assert placed["a"] == pytest.approx(50, abs=1), "no catching up with what it missed"


async def test_drain_gives_up_after_its_timeout() -> None:
    router = router_of("a")
    _reserved(router)
    assert await router.drain("a", timeout_s=0.01) is False


async def test_waiting_call_is_served_when_an_engine_is_added() -> None:
    router: Stubs = Router()
    waiting = asyncio.create_task(router.acquire())
    await asyncio.sleep(0)
    router.add(StubEngine("a"))
    assert (await waiting).engine.name == "a"


async def test_engine_that_asks_to_wait_is_left_alone_until_then() -> None:
    clock = Clock()
    router: Stubs = Router(clock=clock)
    router.add(StubEngine("a"))
    router.add(StubEngine("b"))
    limited = _reserved(router)
    limited.release(EngineRateLimitedError("wait", retry_after_s=30.0))
    assert {one_call(router) for _ in range(10)} == {"b" if limited.engine.name == "a" else "a"}
    _reserved(router).release(EngineRateLimitedError("wait", retry_after_s=20.0))
    with pytest.raises(EngineRateLimitedError) as caught:
        await router.acquire()
    assert caught.value.retry_after_s == 20
    clock.now += 31
    assert {one_call(router) for _ in range(10)} == {"a", "b"}


@pytest.mark.parametrize("asked_s", [30.0, 999_999_999.0, math.inf, math.nan, -1.0])
async def test_engine_on_trial_that_asks_to_wait_is_asked_again_in_time_and_holds_nobody_up(asked_s: float) -> None:
    clock = Clock()
    router: Stubs = Router(clock=clock)
    router.add(StubEngine("a"))
    replica = router.replica("a")
    _reserved(router).release(EngineUnreachableError("gone"))
    router.probe_succeeded(replica)
    assert replica.health.state is HealthState.TRIAL
    _reserved(router).release(EngineRateLimitedError("wait", retry_after_s=asked_s))
    if asked_s > 0:
        with pytest.raises(EngineRateLimitedError) as caught:
            await router.acquire()
        assert 0 < (caught.value.retry_after_s or 0) <= RETRY_AFTER_AT_MOST_S
    clock.now += RETRY_AFTER_AT_MOST_S
    assert one_call(router) == "a"
    assert replica.health.state is HealthState.UP


def test_wrong_membership_changes_are_errors_that_name_the_engine() -> None:
    router = router_of("a")
    with pytest.raises(ConfigError, match="'a' already"):
        router.add(StubEngine("a"))
    with pytest.raises(ConfigError, match="there are: a"):
        router.remove("b")
    with pytest.raises(ConfigError, match="weight"):
        router.add(StubEngine("c"), weight=0)


async def test_calls_on_a_removed_engine_end_as_lost() -> None:
    router = router_of("a")

    async def call() -> None:
        with await router.acquire() as reservation:
            async with reservation.guard():
                await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    router.remove("a")
    with pytest.raises(EngineError, match="given up"):
        await task
