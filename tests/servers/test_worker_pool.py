"""Questions to processes that hang, crash, or are no longer waited for."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.contract.errors import ContractError, VerifierError
from nemo_gym.environment.worker_pool import Ending, WorkerPool

FUNCTION = f"{__name__}:answer"
LONG_S = 60.0


def answer(what: str, value: Any = None) -> Any:
    """What the processes of these tests do."""
    match what:
        case "pid":
            return os.getpid()
        case "echo":
            return value
        case "hang":
            Path(value).write_bytes(b"!")  # a pipe, whose reader now knows
            re.match(r"(a|aa)+$", "a" * 100 + "b")  # holds the interpreter's lock for ever
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise IndexError("list index out of range")
        case "refuse":
            raise ContractError("not this one")
        case "fill":
            return len(b"x" * value)
        case "print":
            os.write(1, b"noise where the answers go")
            return "said"
    return None


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    made = WorkerPool(FUNCTION, workers=2, warm_up={"what": "echo"}, missing="install it", memory_bytes=1024**3)
    yield made
    await asyncio.to_thread(made.close)
    assert not processes()


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if FUNCTION in child.cmdline()]


async def test_process_is_used_again_when_it_has_answered(pool: WorkerPool) -> None:
    text = "é\udc80\u2028\x00" * 100_000
    assert (await pool.ask({"what": "echo", "value": text}, timeout_s=LONG_S)).value == text
    pids = {(await pool.ask({"what": "pid"}, timeout_s=LONG_S)).value for _ in range(5)}
    assert len(pids) == 1
    assert (await pool.ask({"what": "print"}, timeout_s=LONG_S)).value == "said"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A pipe that can be read once a hanging question has begun."""
    os.mkfifo(tmp_path / "begun")
    return tmp_path / "begun"


async def test_hanging_question_is_killed_and_holds_up_nobody_else(pool: WorkerPool, begun: Path) -> None:
    hanging = asyncio.ensure_future(pool.ask({"what": "hang", "value": str(begun)}, timeout_s=LONG_S))
    await asyncio.to_thread(begun.read_bytes)
    answers = [await pool.ask({"what": "echo", "value": n}, timeout_s=LONG_S) for n in range(3)]
    assert [said.value for said in answers] == [0, 1, 2] and not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    ended = await pool.ask({"what": "hang", "value": os.devnull}, timeout_s=0.2)
    assert ended.ending is Ending.TIMED_OUT
    assert (await pool.ask({"what": "echo", "value": "next"}, timeout_s=LONG_S)).value == "next"


async def test_process_is_killed_when_its_caller_leaves(pool: WorkerPool, begun: Path) -> None:
    asked = asyncio.ensure_future(pool.ask({"what": "hang", "value": str(begun)}, timeout_s=LONG_S))
    await asyncio.to_thread(begun.read_bytes)
    (process,) = processes()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await asyncio.to_thread(process.wait, 20)


async def test_failures_of_the_function_are_told_apart_from_the_end_of_its_process(pool: WorkerPool) -> None:
    failed = await pool.ask({"what": "raise"}, timeout_s=LONG_S)
    assert (failed.ending, failed.said) == (Ending.FAILED, "IndexError: list index out of range")
    filled = await pool.ask({"what": "fill", "value": 2 * 1024**3}, timeout_s=LONG_S)
    assert filled.ending is Ending.FAILED and filled.said.startswith("MemoryError")
    assert (await pool.ask({"what": "crash"}, timeout_s=LONG_S)).ending is Ending.DIED
    with pytest.raises(VerifierError, match="not this one"):
        await pool.ask({"what": "refuse"}, timeout_s=LONG_S)


async def test_waiting_process_is_replaced_when_it_was_killed(pool: WorkerPool) -> None:
    first = (await pool.ask({"what": "pid"}, timeout_s=LONG_S)).value
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert (await pool.ask({"what": "pid"}, timeout_s=LONG_S)).value != first


def test_pool_serves_threads_without_an_event_loop_and_starts_again_when_it_was_closed() -> None:
    pool = WorkerPool(FUNCTION, workers=1, warm_up={"what": "echo"}, missing="install it")
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(pool.ask_now({"what": "pid"}, timeout_s=LONG_S).value))
    thread.start()
    thread.join()
    assert [process.pid for process in processes()] == said
    pool.close()
    assert not processes()
    assert pool.ask_now({"what": "pid"}, timeout_s=LONG_S).value not in said
    pool.close()


async def test_error_names_the_remedy_when_the_function_cannot_be_imported() -> None:
    pool = WorkerPool("no_such_module:answer", workers=1, warm_up={}, missing="install requirements.txt")
    with pytest.raises(VerifierError, match=r"No module named 'no_such_module'; install requirements.txt"):
        await pool.ask({}, timeout_s=LONG_S)
