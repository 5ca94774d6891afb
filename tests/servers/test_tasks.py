"""Work that must end ends, whatever happens to whoever waits for it."""

from __future__ import annotations

import asyncio

import pytest

from nemo_gym._util.tasks import BackgroundTasks, finish, first_of


async def test_work_finishes_although_its_caller_is_cancelled_twice() -> None:
    done = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.set()

    caller = asyncio.create_task(finish(work()))
    for _ in range(2):
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_a_deadline_around_it_still_ends_as_a_timeout() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        done.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await finish(work())
    assert done


async def test_its_result_and_its_error_are_the_callers() -> None:
    async def fails() -> None:
        raise ValueError("no")

    assert await finish(asyncio.sleep(0, "yes")) == "yes"
    with pytest.raises(ValueError, match="no"):
        await finish(fails())


async def test_work_that_takes_too_long_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        await finish(hangs(), timeout_s=0.01)
    await asyncio.sleep(0)
    assert cancelled.is_set()


async def test_an_owner_waits_for_tasks_that_start_meanwhile() -> None:
    tasks, ended = BackgroundTasks(), []

    async def last() -> None:
        await asyncio.sleep(0.01)
        ended.append("last")

    async def first() -> None:
        await asyncio.sleep(0.01)
        tasks.start(last())
        ended.append("first")

    tasks.start(first())
    await tasks.join()
    assert ended == ["first", "last"]


async def test_an_owner_cancels_or_stops_waiting() -> None:
    tasks = BackgroundTasks()
    task = tasks.start(asyncio.sleep(60))
    await tasks.join(timeout_s=0.01)
    assert not task.done()
    await tasks.cancel()
    assert task.cancelled()


async def test_an_owner_hears_of_errors() -> None:
    async def fails() -> None:
        raise ValueError("no")

    heard: list[str] = []
    tasks = BackgroundTasks(lambda task, error: heard.append(f"{task.get_name()}: {error}"))
    tasks.start(fails(), name="job")
    await tasks.join()
    await asyncio.sleep(0)
    assert heard == ["job: no"]


async def _grouped(*errors: Exception) -> None:
    async def one(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(one(error))


async def test_error_of_a_task_group_is_raised_in_its_place_unless_it_hides_another() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await _grouped(KeyError("a"), KeyError("b"))
    assert first_of(caught.value, LookupError).args == ("a",)
    with pytest.raises(ExceptionGroup) as caught:
        await _grouped(KeyError("a"), ValueError("b"))
    for kind in (KeyError, OSError):
        with pytest.raises(ExceptionGroup) as raised:
            first_of(caught.value, kind)
        assert raised.value is caught.value
