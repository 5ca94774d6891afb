"""What an engine gets of calls that belong to sessions: decided by counts and a seeded order, not by time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter

import pytest

from nemo_gym.gateway.engines import EngineLostError, EngineUnreachableError
from nemo_gym.gateway.engines.pool import Prober
from nemo_gym.gateway.engines.router import HealthState, Reservation, Router
from tests.gateway.stubs import StubEngine

Stubs = Router[StubEngine]


class ClosedLoop:
    """Sessions of eight turns, so many at a time, each call about as long as any other."""

    def __init__(self, router: Stubs, width: int, seed: int, turns: int = 8) -> None:
        self._router, self._turns = router, turns
        self._chance = random.Random(seed)
        self._names, self._ties = itertools.count(), itertools.count()
        self._running: list[tuple[float, int, Reservation[StubEngine], str, int]] = []
        self.placed: Counter[str] = Counter()
        for _ in range(width):
            self._call(self._chance.random(), f"s{next(self._names)}", self._chance.randrange(turns))

    def _call(self, now: float, session_id: str, left: int) -> None:
        reservation = self._router.reserve(session_id)
        assert reservation is not None
        self.placed[reservation.engine.name] += 1
        end = now + self._chance.uniform(0.8, 1.2)
        heapq.heappush(self._running, (end, next(self._ties), reservation, session_id, left))

    def calls(self, count: int) -> Counter[str]:
        """So many more, by engine."""
        before = Counter(self.placed)
        for _ in range(count):
            now, _, reservation, session_id, left = heapq.heappop(self._running)
            reservation.release(True)
            if left == 0:
                self._router.forget(session_id)
                session_id, left = f"s{next(self._names)}", self._turns
            self._call(now, session_id, left - 1)
        return self.placed - before


def three() -> Stubs:
    router: Stubs = Router()
    for name in "abc":
        router.add(StubEngine(name))
    return router


@pytest.mark.parametrize("width", [4, 16, 48, 96])
@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
async def test_engine_added_to_sticky_sessions_gets_its_share_of_the_calls(width: int, weight: float) -> None:
    router = three()
    loop = ClosedLoop(router, width, seed=width)
    loop.calls(500)
    router.add(StubEngine("new"), weight=weight)
    placed = loop.calls(6000)
    assert placed["new"] / 6000 == pytest.approx(weight / (3 + weight), rel=0.05), placed


async def test_sessions_that_never_end_are_shared_with_an_engine_that_joins() -> None:
    router = three()
    loop = ClosedLoop(router, 48, seed=1, turns=1_000_000)
    loop.calls(200)
    router.add(StubEngine("new"))
    assert loop.calls(2400) == {name: pytest.approx(600, rel=0.05) for name in ("a", "b", "c", "new")}


async def test_only_as_many_sessions_move_as_the_new_engine_needs() -> None:
    router = three()
    for number in range(30):
        router.reserve(f"s{number}").release(True)  # type: ignore[union-attr]
    before = {f"s{number}": router.home(f"s{number}") for number in range(30)}
    router.add(StubEngine("new"))
    moved = {name for name, home in before.items() if router.home(name) != home}
    assert len(moved) in (7, 8) and {router.home(name) for name in moved} == {"new"}


async def test_changed_weight_moves_sessions_both_ways() -> None:
    router = three()
    for number in range(40):
        router.reserve(f"s{number}").release(True)  # type: ignore[union-attr]
    router.set_weight("a", 2.0)
    assert Counter(router.home(f"s{n}") for n in range(40)) == {"a": 20, "b": 10, "c": 10}
    router.set_weight("a", 0.5)
    assert Counter(router.home(f"s{n}") for n in range(40)) == {"a": 8, "b": 16, "c": 16}


async def test_engine_that_was_down_gets_its_sessions_back_after_its_trial() -> None:
    router = three()
    for number in range(30):
        router.reserve(f"s{number}").release(True)  # type: ignore[union-attr]
    router.reserve(without={"b", "c"}).release(EngineUnreachableError("gone"))  # type: ignore[union-attr]
    for number in range(30):
        router.reserve(f"s{number}").release(True)  # type: ignore[union-attr]
    assert {router.home(f"s{n}") for n in range(30)} == {"b", "c"}
    await Prober(router).round()
    router.reserve(without={"b", "c"}).release(True)  # type: ignore[union-attr]
    assert Counter(router.home(f"s{n}") for n in range(30)) == {"a": 10, "b": 10, "c": 10}


async def test_trial_ends_with_the_first_token_and_the_next_failure_ends_the_probation() -> None:
    router = three()
    router.reserve(without={"b", "c"}).release(EngineUnreachableError("gone"))  # type: ignore[union-attr]
    await Prober(router).round()
    trial = router.reserve(without={"b", "c"})
    assert trial is not None and router.reserve(without={"b", "c"}) is None
    trial.answering()
    second = router.reserve(without={"b", "c"})
    assert second is not None, "an answer of minutes holds nobody back"
    trial.release(EngineLostError("broke off"))
    assert router.replica("a").health.state is HealthState.DOWN
    second.release(EngineLostError("broke off"))
    assert router.replica("a").health.state is HealthState.DOWN


async def test_long_trial_ends_while_probes_succeed() -> None:
    router = three()
    router.reserve(without={"b", "c"}).release(EngineUnreachableError("gone"))  # type: ignore[union-attr]
    prober = Prober(router)
    await prober.round()
    trial = router.reserve(without={"b", "c"})
    assert trial is not None
    waiting = asyncio.create_task(router.acquire(avoid={"b", "c"}))
    for _ in range(2):
        assert not waiting.done()
        await prober.round()
    with await waiting:
        assert router.replica("a").health.state is HealthState.UP
    trial.release(True)


async def test_engine_that_answers_a_call_after_its_trial_is_judged_like_any_other() -> None:
    router = three()
    router.reserve(without={"b", "c"}).release(EngineUnreachableError("gone"))  # type: ignore[union-attr]
    await Prober(router).round()
    trial = router.reserve(without={"b", "c"})
    assert trial is not None
    trial.answering()
    trial.release(True)
    for _ in range(2):
        router.reserve(without={"b", "c"}).release(EngineLostError("broke off"))  # type: ignore[union-attr]
    assert router.replica("a").health.state is HealthState.UP
