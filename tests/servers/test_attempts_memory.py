"""The store of attempts holds a bounded number of them in memory."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.errors import FencedError
from nemo_gym.contract.session import RolloutIdentity
from nemo_gym.environment import attempts
from nemo_gym.environment.attempts import AttemptStore, RowStore, Seed, StoredRow, StoredVerdict


def rollout(name: str) -> RolloutIdentity:
    return RolloutIdentity(rollout_id=name, task_id="t1", group_id="t1", attempt=1)


async def play(store: AttemptStore, name: str, *, ends: bool) -> None:
    who = rollout(name)
    reply = {"reward": 1.0, "valid": True, "details": {"log": f"{name} " * 200}}
    await store.enter(who)
    await store.keep_seed(who, Seed("d", {"descriptor": reply}, {"cookie": name}))
    await store.require_live(who.run_id, name, 1)
    if ends:
        await store.keep_verdict(who, StoredVerdict("d", True, reply))
        await store.close(who)


async def growth(play: Callable[[int], Awaitable[None]], *, first: int, more: int, at_once: int) -> int:
    """Bytes that Python holds after ``more`` plays beyond what it held after the ``first``."""

    async def held_after(numbers: range) -> int:
        for n in numbers[::at_once]:
            await asyncio.gather(*(play(m) for m in range(n, n + at_once)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before = await held_after(range(first))
    return await held_after(range(first, first + more)) - before


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """One process for these tests: in their own, leftovers of other tests allocate while one measures."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def run_measure(measure: Callable[..., Coroutine[Any, Any, int]], *args: Any) -> int:
    return asyncio.run(measure(*args))


async def attempts_growth(path: Path | None, ends: bool) -> int:
    attempts.MAX_KNOWN = 100
    store = AttemptStore(path)
    grown = await growth(lambda n: play(store, f"r{n}", ends=ends), first=200, more=1000, at_once=50)
    assert len(store._known) == 100
    if ends:
        verdict = await store.verdict_of(rollout("r0"))
        assert verdict is not None and verdict.reply["details"]["log"].startswith("r0 ")
        with pytest.raises(FencedError):
            await store.require_live(rollout("r0").run_id, "r0", 1)
    else:
        assert (await store.session_of(rollout("r0").run_id, "r0", 1)) == {"cookie": "r0"}
    await store.aclose()
    return grown


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("ends", [True, False], ids=["finished", "abandoned"])
def test_memory_does_not_grow_with_the_number_of_rollouts(
    process: ProcessPoolExecutor, tmp_path: Path, on_disk: bool, ends: bool
) -> None:
    path = tmp_path / "a.sqlite" if on_disk else None
    assert process.submit(run_measure, attempts_growth, path, ends).result() < 150_000, "1,000 rollouts of 2 kB each"


async def rows_growth() -> int:
    store = AttemptStore()
    rows = RowStore(store)
    refs: list[str] = []

    async def put(n: int) -> None:
        row = {"question": f"r{n}", "answer": "x" * 2000}
        refs.append(await rows.put(StoredRow(row, rollout(f"r{n}"))))

    grown = await growth(put, first=200, more=1000, at_once=1)
    await store.aclose()
    return grown


def test_memory_does_not_grow_with_the_rows_of_attempts_that_nobody_closes(process: ProcessPoolExecutor) -> None:
    assert process.submit(run_measure, rows_growth).result() < 250_000, "1,000 rows of 2 kB each"
