"""The bridge between the package's synchronous loop and the server's event loop."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_gym.contract.errors import AgentError
from responses_api_agents.mini_swe_agent.loop import await_from_loop, run_synchronous

ROLLOUT = contextvars.ContextVar("rollout", default="none")


async def after_a_moment(value: str) -> str:
    await asyncio.sleep(0)
    return f"{value} of {ROLLOUT.get()}"


async def fails() -> None:
    await asyncio.sleep(0)
    raise KeyError("what it raised")


async def test_synchronous_code_gets_results_in_the_context_of_its_task() -> None:
    def work(name: str) -> list[str]:
        return [await_from_loop(after_a_moment(name)) for _ in range(2)]

    async def attempt(number: int) -> list[str]:
        ROLLOUT.set(f"r{number}")
        return await run_synchronous(work, f"turn {number}")

    answers = await asyncio.gather(*(attempt(number) for number in range(20)))
    assert answers == [[f"turn {number} of r{number}"] * 2 for number in range(20)]


async def test_synchronous_code_meets_what_it_awaited_raises_and_may_handle_it() -> None:
    def work() -> str:
        with pytest.raises(KeyError, match="what it raised"):
            await_from_loop(fails())
        return await_from_loop(after_a_moment("handled"))

    assert await run_synchronous(work) == "handled of none"


async def test_cancelled_loop_ends_where_it_waits_and_is_refused_what_it_asks_for_then() -> None:
    met: list[type[BaseException]] = []

    def work() -> None:
        try:
            await_from_loop(asyncio.sleep(600))
        except asyncio.CancelledError as error:
            met.append(type(error))
            try:
                await_from_loop(after_a_moment("clean up"))
            except AgentError as refused:
                met.append(type(refused))
            raise

    task = asyncio.create_task(run_synchronous(work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert met == [asyncio.CancelledError, AgentError]


def test_import_leaves_no_settings_directory(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("MSWEA_GLOBAL_CONFIG_DIR", None)  # set by this process's own import
    command = [sys.executable, "-c", "import responses_api_agents.mini_swe_agent.loop"]
    subprocess.run(command, env=environment, check=True)
    assert not list(tmp_path.iterdir())
