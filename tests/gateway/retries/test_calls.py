"""Calls find an engine that answers; retries are bounded per call and over all calls."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRateLimitedError,
    EngineRefusedError,
    EngineUnreachableError,
    Generation,
    Sampling,
    TokenDelta,
    TokenRequest,
    VllmEngine,
)
from nemo_gym.gateway.engines.calls import EngineCalls, RetryBudget, RetryConfig
from nemo_gym.gateway.engines.router import HealthState, Router, RoutingConfig
from nemo_gym_testing.gateway import CutOff, FakeVllmEngine, Hang, Status
from tests.gateway.stubs import StubEngine

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
Fleet = tuple[list[FakeVllmEngine], EngineCalls[VllmEngine]]
_ids = itertools.count()


def ask(engine: VllmEngine) -> Awaitable[Generation]:
    return engine.generate(TokenRequest(f"r{next(_ids)}", [1, 2, 3], Sampling(8)))


def ask_streaming(engine: VllmEngine) -> AsyncGenerator[TokenDelta | Generation, None]:
    return engine.stream(TokenRequest(f"r{next(_ids)}", [1, 2, 3], Sampling(8)))


@pytest.fixture
async def fleet(http: EngineConnections) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeVllmEngine()) for _ in range(4)]
        router: Router[VllmEngine] = Router()
        for number, fake in enumerate(fakes):
            router.add(VllmEngine(EngineEndpoint(f"e{number}", fake.url), http))
        yield fakes, EngineCalls(router, RetryConfig(first_backoff_s=0.001))


def sick(fleet: Fleet, session_id: str) -> FakeVllmEngine:
    """The engine a session lives on."""
    fakes, calls = fleet
    return fakes[int((calls.router.home(session_id) or "e0")[1:])]


@pytest.mark.parametrize("fault", [Status(500), Status(503), CutOff(), Status(429), Status(401)])
async def test_call_is_answered_by_another_engine(fleet: Fleet, fault: Status | CutOff) -> None:
    fakes, calls = fleet
    first = await calls.call("s", ask)
    sick(fleet, "s").faults.append(fault)
    second = await calls.call("s", ask)
    assert second.engine != first.engine
    assert sum(len(fake.calls) for fake in fakes) == 3


async def test_refused_request_is_tried_once(fleet: Fleet) -> None:
    fakes, calls = fleet
    fakes[0].faults.append(Status(400))
    with pytest.raises(EngineRefusedError):
        await calls.call("s", ask)
    assert sum(len(fake.calls) for fake in fakes) == 1


async def test_call_gives_up_after_its_bound(fleet: Fleet) -> None:
    fakes, calls = fleet
    for fake in fakes:
        fake.faults.extend([Status(500)] * 5)
    with pytest.raises(EngineFailedError):
        await calls.call("s", ask)
    assert Counter(len(fake.calls) for fake in fakes) == {1: 3, 0: 1}, "three tries, each on another engine"


async def test_no_session_is_lost_when_one_of_four_engines_is_killed(fleet: Fleet, eventually: Eventually) -> None:
    fakes, calls = fleet
    # With nothing saved up: moving off a dead engine must not need it. Two failures come before it is known as dead.
    calls.budget = RetryBudget(ratio=0, capacity=2)
    sessions = [f"s{number}" for number in range(40)]
    await asyncio.gather(*(calls.call(session, ask) for session in sessions))
    assert all(len(fake.calls) == 10 for fake in fakes)
    for fake in fakes:
        fake.gate.clear()
    running = [asyncio.create_task(calls.call(session, ask)) for session in sessions]
    await eventually(lambda: sum(len(fake.calls) for fake in fakes) == 80)
    await fakes[2].stop()
    for fake in fakes:
        fake.gate.set()
    answers = await asyncio.gather(*running)
    assert len(answers) == 40 and {answer.engine for answer in answers} == {"e0", "e1", "e3"}
    for _ in range(3):
        again = await asyncio.gather(*(calls.call(session, ask) for session in sessions))
        assert {answer.engine for answer in again} == {"e0", "e1", "e3"}
    assert all(status.in_flight == 0 for status in calls.router.status())


async def test_only_engine_is_waited_for_while_it_restarts(http: EngineConnections, eventually: Eventually) -> None:
    async with FakeVllmEngine() as fake:
        router: Router[VllmEngine] = Router()
        router.add(VllmEngine(EngineEndpoint("e0", fake.url), http))
        calls = EngineCalls(router, RetryConfig(first_backoff_s=0.001))
        await fake.stop()
        waiting = asyncio.create_task(calls.call("s", ask))
        await eventually(lambda: router.status()[0].state is HealthState.DOWN)
        await fake.start()
        router.probe_succeeded(router.replicas[0])
        assert (await waiting).engine == "e0"


async def test_rate_limit_is_passed_on_when_every_engine_asks_to_wait(fleet: Fleet) -> None:
    fakes, calls = fleet
    for fake in fakes:
        fake.faults.extend([Status(429, headers={"Retry-After": "9"})])
    for _ in range(2):
        with pytest.raises(EngineRateLimitedError) as caught:
            await calls.call("s", ask)
        assert caught.value.as_problem()["retry_after_s"] == 9
    assert all(len(fake.calls) <= 1 for fake in fakes), "an engine that asked to wait was left alone"


async def test_stream_starts_over_elsewhere_when_nothing_was_handed_on(fleet: Fleet) -> None:
    _, calls = fleet
    await calls.call("s", ask)
    sick(fleet, "s").faults.append(CutOff(0))
    *deltas, whole = [item async for item in calls.stream("s", ask_streaming)]
    assert isinstance(whole, Generation) and len(deltas) == 8


async def test_stream_fails_when_it_breaks_after_an_item(fleet: Fleet) -> None:
    fakes, calls = fleet
    await calls.call("s", ask)
    home = sick(fleet, "s")
    home.faults.append(CutOff(3))
    seen = []
    with pytest.raises(EngineLostError):
        async for item in calls.stream("s", ask_streaming):
            seen.append(item)
    assert len(seen) == 3 and sum(len(fake.calls) for fake in fakes) == 2
    assert all(status.in_flight == 0 for status in calls.router.status())


async def test_place_is_given_back_when_a_stream_is_left(fleet: Fleet, eventually: Eventually) -> None:
    fakes, calls = fleet
    fakes[0].event_gate = asyncio.Semaphore(1)
    stream = calls.stream("s", ask_streaming)
    await anext(stream)
    assert sum(status.in_flight for status in calls.router.status()) == 1
    await stream.aclose()
    assert sum(status.in_flight for status in calls.router.status()) == 0
    await eventually(lambda: fakes[0].calls[0].outcome == "cancelled")


async def test_cancelled_call_is_not_tried_again_and_says_nothing_about_the_engine(
    fleet: Fleet, eventually: Eventually
) -> None:
    fakes, calls = fleet
    for _ in range(8):
        fakes[0].faults.append(Hang())
        task = asyncio.create_task(calls.call("s", ask))
        await eventually(lambda: any(call.outcome == "sampling" for call in fakes[0].calls))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: all(call.outcome == "cancelled" for call in fakes[0].calls))
    assert len(fakes[0].calls) == 8 and sum(len(fake.calls) for fake in fakes) == 8
    assert calls.router.status()[0].state is HealthState.UP


async def test_retries_over_all_calls_stay_within_the_budget() -> None:
    router: Router[StubEngine] = Router(RoutingConfig(failures_to_down=10_000))
    router.add(StubEngine("a"))
    calls = EngineCalls(router, RetryConfig(max_tries=5, first_backoff_s=0, budget_ratio=0.1, budget_capacity=10))
    tries = 0

    async def failing(engine: StubEngine) -> None:
        nonlocal tries
        tries += 1
        raise EngineFailedError("500", retryable=True)

    for _ in range(1000):
        with pytest.raises(EngineError):
            await calls.call(None, failing)
    assert 1000 + 100 <= tries <= 1000 + 10 + 100


async def failing(engine: StubEngine) -> None:
    raise EngineFailedError("500", retryable=True)


async def test_retries_of_one_session_leave_those_of_the_others() -> None:
    router: Router[StubEngine] = Router(RoutingConfig(failures_to_down=10_000))
    router.add(StubEngine("a"))
    calls = EngineCalls(router, RetryConfig(first_backoff_s=0))
    for _ in range(100):
        with pytest.raises(EngineFailedError):
            await calls.call("bad", failing)
    faults = iter([EngineFailedError("500", retryable=True)])

    async def once(engine: StubEngine) -> str:
        if (error := next(faults, None)) is not None:
            raise error
        return "answer"

    assert await calls.call("good", once) == "answer"


async def test_session_that_only_fails_costs_engines_its_budget_and_one_try_for_each_call() -> None:
    router: Router[StubEngine] = Router(RoutingConfig(failures_to_down=10_000))
    router.add(StubEngine("a"))
    calls = EngineCalls(router, RetryConfig(first_backoff_s=0, budget_ratio=0.5, session_budget_capacity=4))
    calls.budget = RetryBudget(ratio=0.2, capacity=20)
    tries = 0

    async def counted(engine: StubEngine) -> None:
        nonlocal tries
        tries += 1
        await failing(engine)

    async def answered(engine: StubEngine) -> str:
        return "answer"

    def spent(error: EngineError) -> bool:
        return bool(error.details.get("retries_spent"))

    seen = []
    for _ in range(4):
        with pytest.raises(EngineFailedError) as raised:
            await calls.call("s", counted)
        seen.append((tries, spent(raised.value)))
    assert seen == [(3, False), (5, True), (6, True), (7, True)]
    for _ in range(2):
        await calls.call("s", answered)
    with pytest.raises(EngineFailedError) as raised:
        await calls.call("s", counted)
    assert (tries, spent(raised.value)) == (9, True), "answers earn one retry"
    calls.forget("s")
    with pytest.raises(EngineFailedError):
        await calls.call("s", counted)
    assert tries == 12


def test_budget_is_earned_by_calls_and_never_more_than_its_capacity() -> None:
    budget = RetryBudget(ratio=0.5, capacity=2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert budget.saved == 2


async def test_unreachable_engine_costs_later_calls_nothing(fleet: Fleet) -> None:
    fakes, calls = fleet
    await fakes[1].stop()
    tried: Counter[str] = Counter()

    async def counted(engine: VllmEngine) -> Generation:
        tried[engine.name] += 1
        return await ask(engine)

    for number in range(60):
        await calls.call(f"s{number}", counted)
    assert tried["e1"] == 1 and sum(tried.values()) == 61


def test_classes_agree_on_what_may_be_tried_elsewhere() -> None:
    assert not EngineRefusedError("x").elsewhere
    assert EngineUnreachableError("x").fatal and not EngineLostError("x").fatal


async def test_call_goes_back_to_the_engine_that_failed_it_when_the_other_one_goes_down(
    http: EngineConnections, eventually: Eventually
) -> None:
    async with FakeVllmEngine() as flaky, FakeVllmEngine() as full:
        router: Router[VllmEngine] = Router()
        router.add(VllmEngine(EngineEndpoint("flaky", flaky.url), http))
        router.add(VllmEngine(EngineEndpoint("full", full.url), http), max_in_flight=1)
        calls = EngineCalls(router, RetryConfig(first_backoff_s=0.001))
        taken = router.reserve(without={"flaky"})
        assert taken is not None
        flaky.faults.append(Status(500))
        call = asyncio.create_task(calls.call("s", ask))
        await eventually(lambda: router.waiting == 1)
        taken.release(EngineUnreachableError("gone"))
        async with asyncio.timeout(20):
            assert (await call).engine == "flaky"
