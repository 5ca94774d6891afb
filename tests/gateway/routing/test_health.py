"""An engine out of service gets probes and nothing else; one that is back proves itself with a single call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from nemo_gym.gateway.engines import (
    EngineConnections,
    EngineEndpoint,
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    VllmEngine,
)
from nemo_gym.gateway.engines.pool import Prober
from nemo_gym.gateway.engines.router import HealthState, Router, RoutingConfig
from nemo_gym_testing.gateway import FakeVllmEngine
from tests.gateway.stubs import StubEngine


def two() -> tuple[Router[StubEngine], StubEngine, StubEngine]:
    router: Router[StubEngine] = Router()
    sick, well = StubEngine("sick"), StubEngine("well")
    router.add(sick)
    router.add(well)
    return router, sick, well


def fail(router: Router[StubEngine], error: EngineError, name: str = "sick") -> None:
    reservation = router.reserve(without={other.name for other in router.replicas} - {name})
    assert reservation is not None, f"{name} is out of service"
    reservation.release(error)


def state(router: Router[StubEngine], name: str = "sick") -> HealthState:
    return next(status.state for status in router.status() if status.name == name)


def calls(router: Router[StubEngine], count: int) -> Counter[str]:
    placed: Counter[str] = Counter()
    for _ in range(count):
        with router.reserve() as reservation:  # type: ignore[union-attr]
            placed[reservation.engine.name] += 1
    return placed


def test_engine_is_out_at_once_when_it_cannot_be_reached() -> None:
    router, _, _ = two()
    fail(router, EngineUnreachableError("gone"))
    assert state(router) is HealthState.DOWN and calls(router, 50) == {"well": 50}


@pytest.mark.parametrize("error", [EngineFailedError("500"), EngineLostError("reset"), EngineTimeoutError("late")])
def test_engine_is_out_after_three_failures_in_a_row(error: EngineError) -> None:
    router, _, _ = two()
    for _ in range(2):
        fail(router, error)
    assert state(router) is HealthState.UP
    fail(router, error)
    assert state(router) is HealthState.DOWN


def test_answers_between_failures_keep_an_engine_in_service() -> None:
    router, _, _ = two()
    for _ in range(10):
        fail(router, EngineFailedError("500"))
        with router.reserve(without={"well"}):  # type: ignore[union-attr]
            pass
    assert state(router) is HealthState.UP


def test_refused_requests_never_speak_against_an_engine() -> None:
    router, _, _ = two()
    for _ in range(20):
        fail(router, EngineRefusedError("too long"))
    assert state(router) is HealthState.UP


async def test_dead_engine_gets_one_probe_per_round_and_no_call() -> None:
    router, sick, _ = two()
    sick.probe_error = EngineUnreachableError("gone")
    fail(router, EngineUnreachableError("gone"))
    for round_number in range(1, 11):
        assert calls(router, 20) == {"well": 20}
        await Prober(router).round()
        assert sick.probes == round_number


async def test_engine_that_is_back_gets_one_call_until_that_succeeds() -> None:
    router, _, _ = two()
    fail(router, EngineUnreachableError("gone"))
    await Prober(router).round()
    assert state(router) is HealthState.TRIAL
    held = [router.reserve() for _ in range(10)]
    assert sum(r is not None and r.engine.name == "sick" for r in held) == 1
    for reservation in held:
        assert reservation is not None
        reservation.release(True)
    assert state(router) is HealthState.UP
    after = calls(router, 100)
    assert after["sick"] == pytest.approx(50, abs=2), "its fair share, without catching up"


async def test_engine_that_answers_probes_but_cannot_sample_gets_one_request_per_interval() -> None:
    router, sick, _ = two()
    fail(router, EngineUnreachableError("gone"))
    tried = 0
    prober = Prober(router)
    for _ in range(10):
        await prober.round()
        for _ in range(20):
            reservation = router.reserve()
            assert reservation is not None
            if reservation.engine is sick:
                tried += 1
                reservation.release(EngineFailedError("500"))
            else:
                reservation.release(True)
    assert tried == 5 and sick.probes == 5, "probe and trial in one interval, neither in the next"


def test_late_news_from_before_an_outage_changes_nothing() -> None:
    router, _, _ = two()
    old = router.reserve(without={"well"})
    older = router.reserve(without={"well"})
    assert old is not None and older is not None
    fail(router, EngineUnreachableError("gone"))
    old.release(True)
    assert state(router) is HealthState.DOWN
    router.probe_succeeded(router.replicas[0])
    older.release(EngineLostError("reset"))
    assert state(router) is HealthState.TRIAL


async def test_busy_engine_is_not_probed_and_a_silent_one_is() -> None:
    router, sick, well = two()
    await Prober(router).round()
    with router.reserve(without={"sick"}):  # type: ignore[union-attr]
        pass
    await Prober(router).round()
    assert (sick.probes, well.probes) == (2, 1)


async def test_calls_on_an_engine_that_vanished_end_when_its_probe_says_so() -> None:
    router, sick, _ = two()

    async def hang() -> None:
        reservation = router.reserve(without={"well"})
        assert reservation is not None
        with reservation:
            async with reservation.guard():
                await asyncio.Event().wait()

    hanging = [asyncio.create_task(hang()) for _ in range(3)]
    await asyncio.sleep(0)
    sick.probe_error = EngineTimeoutError("silent")
    for _ in range(3):
        assert not any(task.done() for task in hanging)
        await Prober(router).round()
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(error) for error in ended] == [EngineLostError] * 3
    assert router.status()[0].in_flight == 0


async def test_guard_leaves_the_callers_own_timeouts_alone() -> None:
    router, _, _ = two()
    with router.reserve() as reservation:  # type: ignore[union-attr]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                async with reservation.guard():
                    await asyncio.Event().wait()


async def test_prober_brings_a_restarted_server_back(http: EngineConnections, eventually) -> None:  # type: ignore[no-untyped-def]
    router: Router[VllmEngine] = Router(RoutingConfig(probe_interval_s=0.02))
    async with FakeVllmEngine() as fake:
        engine = VllmEngine(EngineEndpoint("e0", fake.url), http)
        router.add(engine)
        prober = asyncio.create_task(Prober(router).run())
        try:
            await eventually(lambda: fake.probes > 0)
            await fake.stop()
            await eventually(lambda: router.status()[0].state is HealthState.DOWN)
            await fake.start()
            await eventually(lambda: router.status()[0].state is HealthState.TRIAL)
        finally:
            prober.cancel()


async def test_defect_of_one_adapter_does_not_end_the_probes_of_the_others() -> None:
    router, sick, well = two()

    async def broken() -> None:
        raise KeyError("a defect")

    sick.probe = broken  # type: ignore[method-assign]
    prober = Prober(router)
    for _ in range(3):
        await prober.round()
    assert state(router) is HealthState.DOWN and well.probes == 3 and state(router, "well") is HealthState.UP


async def test_probe_that_fails_while_answers_come_says_nothing() -> None:
    router, sick, _ = two()

    async def answered_meanwhile() -> None:
        router.replica("sick").heard_from = True
        raise EngineTimeoutError("busy")

    sick.probe = answered_meanwhile  # type: ignore[method-assign]
    prober = Prober(router)
    for _ in range(8):
        await prober.round()
    assert state(router) is HealthState.UP


def poison(router: Router[StubEngine], session_id: str, times: int) -> None:
    """A session's requests, which the only engine answers with 500."""
    for _ in range(times):
        reservation = router.reserve(session_id)
        assert reservation is not None, "out of service"
        reservation.release(EngineFailedError("500"))


def one(**config: float) -> tuple[Router[StubEngine], StubEngine]:
    router: Router[StubEngine] = Router(RoutingConfig(**config))  # type: ignore[arg-type]
    engine = StubEngine("sick")
    router.add(engine)
    return router, engine


async def test_failures_that_one_session_alone_sees_are_a_reason_to_ask_and_none_to_leave() -> None:
    router, _ = one()
    asked: list[str] = []
    router.ask_now = lambda replica: asked.append(replica.name)
    poison(router, "bad", 2)
    assert not asked
    poison(router, "bad", 5)
    assert state(router) is HealthState.UP and {*asked} == {"sick"}
    await Prober(router).round()
    poison(router, "bad", 2)
    poison(router, "good", 1)
    assert state(router) is HealthState.DOWN, "another session sees it as well"


async def test_engine_that_one_session_sees_fail_is_out_once_its_probe_fails_too() -> None:
    router, engine = one()
    poison(router, "bad", 3)
    engine.probe_error = EngineTimeoutError("late")
    router.probe_failed(router.replica("sick"), engine.probe_error)
    assert state(router) is HealthState.DOWN


async def test_poisonous_session_cannot_keep_an_engine_on_trial_from_the_others() -> None:
    router, _ = one()
    prober = Prober(router)
    router.probe_failed(router.replica("sick"), EngineUnreachableError("restarts"))
    running = []
    for _ in range(3):  # each a short failure of the one, and a long answer of another that has begun
        while state(router) is not HealthState.UP:
            await prober.round()
            if (reservation := router.reserve("good")) is not None:
                reservation.answering()
                running.append(reservation)
        poison(router, "bad", 1)
        assert state(router) is HealthState.DOWN, "it may be the engine"
    for reservation in running:
        reservation.release(True)
    await prober.round()
    await prober.round()
    assert state(router) is HealthState.TRIAL
    for _ in range(5):
        poison(router, "bad", 1)
    trial = router.reserve("good")
    assert trial is not None
    trial.answering()
    poison(router, "bad", 5)
    assert state(router) is HealthState.UP
    trial.release(True)
    poison(router, "other", 2)
    poison(router, "good", 1)
    assert state(router) is HealthState.DOWN, "others are heard"


async def test_running_prober_asks_an_engine_that_answers_with_failures_at_once(
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    router, engine = one(probe_interval_s=3600)
    probing = asyncio.create_task(Prober(router).run())
    await eventually(lambda: engine.probes == 1)
    poison(router, "bad", 3)
    await eventually(lambda: engine.probes == 2)
    assert state(router) is HealthState.UP
    for session_id in ("bad", "good", "other"):
        poison(router, session_id, 1)
    assert state(router) is HealthState.DOWN
    await eventually(lambda: state(router) is HealthState.TRIAL)
    poison(router, "good", 1)
    assert state(router) is HealthState.DOWN
    assert (engine.probes, router.replica("sick").health.rests) == (3, 1), "and no sooner than others after a trial"
    probing.cancel()
    await asyncio.wait({probing})


async def test_engine_that_fails_now_and_then_a_call_is_out_though_its_probes_succeed() -> None:
    router, _, _ = two()
    prober = Prober(router)
    for failures in range(3):
        assert state(router) is HealthState.UP, f"after {failures} failures"
        fail(router, EngineFailedError("500"))
        if failures < 2:
            await prober.round()
    assert state(router) is HealthState.DOWN
