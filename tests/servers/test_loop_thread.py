"""A loop on a thread of its own: results, errors, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym._util.tasks import LoopThread


async def test_work_runs_on_the_thread_and_its_errors_reach_the_caller() -> None:
    thread = LoopThread("test")

    async def is_here() -> bool:
        return thread.is_here

    async def fails() -> None:
        raise KeyError("said")

    assert await asyncio.to_thread(lambda: thread.run(is_here())) and not thread.is_here
    with pytest.raises(KeyError, match="said"):
        await asyncio.to_thread(lambda: thread.run(fails()))
    thread.close()
    thread.close()


def test_work_that_is_given_up_or_left_is_cancelled_before_the_thread_ends() -> None:
    thread, ended = LoopThread("test"), []

    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(name)

    with pytest.raises(TimeoutError):
        thread.run(waits("given up"), timeout_s=0.2)
    thread.start(waits("left"))
    thread.run(asyncio.sleep(0.01))  # by then it waits
    thread.close()
    assert sorted(ended) == ["given up", "left"]
    assert thread.loop.is_closed()
