"""The server object, driven as the published examples drive it, with handlers of a test's own."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from nemo_gym.contract.errors import ConfigError, ContractError
from nemo_gym.prorl.async_server import NoLlmServerError, NotRunningError, OpenHandsServer
from nemo_gym.prorl.registry import JobDetails, UnknownDataSourceError, register_agent_handler
from tests.prorl.conftest import LLM, Echo

INSTANCE = {"instance_id": "one", "data_source": "echo"}
LONG_S = 60.0


def registered(**options: Any) -> Echo:
    handler = Echo(**options)
    register_agent_handler(handler)
    return handler


def until(condition: Any) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_process_drives_one_instance_through_its_handler() -> None:
    handler = registered()
    server = OpenHandsServer(llm_server_addresses=[LLM], max_init_workers=4, max_run_workers=4)
    server.start()
    params = {"temperature": 0.7, "max_iterations": 30}
    result = server.process(INSTANCE, params)
    server.stop()
    assert params == {"temperature": 0.7, "max_iterations": 30}, "the caller's own"
    job_id = result["job_id"]
    assert job_id.startswith("one-") and len(job_id) == len("one-") + 32
    assert handler.log == [
        f"run {job_id}",
        f"close {job_id}",
        f"eval {job_id} as eval_{job_id} skip=False runtime=None",
        f"release {job_id}",
    ]
    assert result["git_patch"] == "x" and result["max_iterations"] == 30
    assert result["llm"] == {"temperature": 0.7, "base_url": LLM} and result["llm_server"] == LLM
    assert (result["success"], result["error"], result["reward"], result["resolved"]) == (True, None, 1.0, True)
    assert result["eval_results"] == {"resolved": True}
    assert set(result["timing"]) == {"init_s", "run_s", "eval_s"}
    details = handler.seen[job_id]
    assert isinstance(details, JobDetails) and details.event.is_set()
    assert details.instance is INSTANCE
    assert details.start_run_time is not None and details.start_eval_time is not None
    assert details.start_time <= details.start_run_time <= details.start_eval_time


def test_max_iterations_are_two_by_default() -> None:
    registered()
    with OpenHandsServer([LLM]) as server:
        assert server.process(INSTANCE, {})["max_iterations"] == 2


def test_sixty_four_threads_have_a_job_each_and_no_stage_has_more_than_its_workers() -> None:
    handlers = [registered(name="echo"), registered(name="other")]
    with OpenHandsServer([LLM], max_init_workers=3, max_run_workers=5, max_eval_workers=2) as server:

        def one(number: int) -> dict[str, Any]:
            return server.process({"instance_id": "same", "data_source": ("echo", "other")[number % 2]}, {})

        with ThreadPoolExecutor(64) as threads:
            results = list(threads.map(one, range(256)))
        assert server.status()["total"] == 0
    assert len({result["job_id"] for result in results}) == 256
    assert Counter(result["data_source"] for result in results) == {"echo": 128, "other": 128}
    assert all(result["success"] for result in results)
    for stage, workers in (("init", 3), ("run", 5), ("eval", 2)):
        assert all(handler.most[stage] <= workers for handler in handlers)
    for handler in handlers:
        assert Counter(line.split()[0] for line in handler.log) == dict.fromkeys(
            ("run", "close", "eval", "release"), 128
        )


def test_jobs_are_spread_over_llm_servers_by_weight_and_each_keeps_its_own() -> None:
    registered()
    with OpenHandsServer([("http://a:1", 3.0), "http://b:1"], max_init_workers=4) as server:
        with ThreadPoolExecutor(16) as threads:
            results = list(threads.map(lambda _: server.process(INSTANCE, {}), range(80)))
        assert Counter(result["llm_server"] for result in results) == {"http://a:1": 60, "http://b:1": 20}
        assert server.add_llm_server_address("http://c:1/") and not server.add_llm_server_address("http://c:1")
        later = Counter(server.process(INSTANCE, {})["llm_server"] for _ in range(50))
        assert later == {"http://a:1": 30, "http://b:1": 10, "http://c:1": 10}, "a share, and no catching up"
        server.clear_llm_server_addresses()
        with pytest.raises(NoLlmServerError, match="there is no LLM server"):
            server.process(INSTANCE, {})


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_error_of_a_stage_completes_the_job_with_it_and_with_no_reward(stage: str) -> None:
    handler = registered(fails=stage)
    with OpenHandsServer([LLM]) as server:
        result = server.process(INSTANCE, {})
        assert server.status()["total"] == 0
        handler.fails = ""
        assert server.process(INSTANCE, {})["success"], "the pool goes on"
    assert result["success"] is False and result["reward"] is None and result["resolved"] is None
    assert result["error"] == f"{stage}: RuntimeError: {stage} broke"
    assert result["failure"]["stage"] == stage
    first = [line for line in handler.log if result["job_id"] in line]
    closed = [line for line in first if line.startswith("close")]
    assert len(closed) == (stage != "init"), "the runtime is closed once"
    assert first[-1] == f"release {result['job_id']}"


def test_handler_that_ends_the_program_fails_its_own_job_alone() -> None:
    class Leaving(Echo):
        async def eval(self, *args: Any, **options: Any) -> dict[str, Any]:
            sys.exit(2)  # as the main function of a grading script does

    register_agent_handler(Leaving("leaving"))
    registered()
    with OpenHandsServer([LLM]) as server:
        result = server.process({"data_source": "leaving"}, {}, timeout=LONG_S)
        assert server.process(INSTANCE, {})["success"], "the server goes on"
    assert (result["success"], result["reward"]) == (False, None)
    assert result["error"] == "eval: RuntimeError: sys.exit(2) was called in a server"


def test_data_source_without_a_handler_is_refused_at_submission() -> None:
    with OpenHandsServer([LLM]) as server:
        with pytest.raises(UnknownDataSourceError, match=r"'codeforces'; registered: math, swebench"):
            server.process({"data_source": "codeforces"}, {})
        assert server.status()["total"] == 0


def test_server_that_does_not_run_says_so() -> None:
    server = OpenHandsServer([LLM])
    with pytest.raises(NotRunningError, match=r"start\(\) it first"):
        server.process(INSTANCE, {})
    server.stop()
    server.start()
    with pytest.raises(ConfigError, match="is running already"):
        server.start()
    server.stop()
    server.start()
    registered()
    assert server.process(INSTANCE, {})["success"]
    server.stop()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"sampling_params": [1]}, "sampling_params must be a mapping, not a list"),
        ({"sampling_params": {"max_iterations": 0}}, "max_iterations must be a whole number from 1, got 0"),
        ({"job_id": "a b"}, "job_id must be a letter or digit"),
        ({"job_id": "x" * 101}, "job_id must be a letter or digit"),
        ({"timeout": -1}, "timeout must be a number of seconds above 0, got -1"),
    ],
)
def test_call_that_cannot_be_meant_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    registered()
    with OpenHandsServer([LLM]) as server, pytest.raises(ConfigError, match=said):
        server.process(INSTANCE, **asked)


def test_same_id_is_the_same_job_and_another_body_is_refused_with_both_digests() -> None:
    handler = registered(hangs="run")
    with OpenHandsServer([LLM]) as server, ThreadPoolExecutor(4) as threads:
        first = threads.submit(server.process, INSTANCE, {"temperature": 1}, "mine")
        assert handler.reached.wait(LONG_S)
        second = threads.submit(server.process, dict(INSTANCE), {"temperature": 1}, "mine")
        with pytest.raises(ContractError, match=r"'mine' is another job's: .* digest \w{16}, these have \w{16};"):
            server.process(INSTANCE, {"temperature": 2}, "mine")
        until(lambda: handler.inside["run"] == 1)
        assert server.status()["total"] == 1
        server.cancel_job("mine")
        assert first.result(LONG_S) == second.result(LONG_S)
        handler.hangs = ""
        again = server.process(INSTANCE, {"temperature": 1}, "mine")
        assert again["success"], "a job that was cancelled may be submitted again"
        assert server.process(INSTANCE, {"temperature": 1}, "mine") == again
        assert sum(line == "run mine" for line in handler.log) == 1


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_cancelled_job_ends_with_that_and_releases_what_it_holds(stage: str) -> None:
    handler = registered(hangs=stage)
    with OpenHandsServer([LLM]) as server, ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(server.process, INSTANCE, {}, "mine")
        until(lambda: server.status()[f"active_{stage}"] == 1)
        assert server.cancel_job("mine", "not wanted") >= 0
        result = under_way.result(LONG_S)
        assert (
            result["failure"]["kind"] == "cancelled" and "not wanted" in result["error"] and result["reward"] is None
        )
        assert handler.log[-1] == "release mine" and handler.log.count("close mine") == (stage != "init")
        with pytest.raises(ContractError, match="no job 'mine' is under way"):
            server.cancel_job("mine")


def test_job_that_waits_is_cancelled_at_once_and_status_says_where_jobs_are() -> None:
    handler = registered(hangs="run")
    with OpenHandsServer([LLM], max_init_workers=1, max_run_workers=1) as server, ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(server.process, INSTANCE, {}, f"job-{n}") for n in range(6)]
        until(lambda: server.status()["total"] == 6 and server.status()["run_queue"] == 2)
        until(lambda: server.status()["init_queue"] == 3)
        assert server.status() == {
            "init_queue": 3,
            "run_queue": 2,  # one in the queue, and one that an init worker holds until there is room
            "eval_queue": 0,
            "active_init": 0,
            "active_run": 1,
            "active_eval": 0,
            "total": 6,
        }
        for number in range(6):
            server.cancel_job(f"job-{number}")
        assert {job.result(LONG_S)["failure"]["kind"] for job in jobs} == {"cancelled"}
        assert server.status()["total"] == 0
        handler.hangs = ""
        assert server.process(INSTANCE, {})["success"], "no worker is lost"
    released = [line for line in handler.log if line.startswith("release job-")]
    assert len(released) == 6
    closed = [line.removeprefix("close ") for line in handler.log if line.startswith("close")]
    assert len(handler.made) >= 3 and sorted(closed) == sorted(handler.made), "each runtime once, ran or only prepared"


def test_stop_ends_what_is_under_way_and_releases_it() -> None:
    handler = registered(hangs="run")
    server = OpenHandsServer([LLM], max_init_workers=2, max_run_workers=2)
    server.start()
    with ThreadPoolExecutor(16) as threads:
        jobs = [threads.submit(server.process, INSTANCE, {}) for _ in range(12)]
        until(lambda: server.status()["total"] == 12 and server.status()["active_run"] == 2)
        server.stop()
        results = [job.result(LONG_S) for job in jobs]
    assert {result["error"] for result in results} == {"init: the server was stopped"}
    assert {result["reward"] for result in results} == {None}
    closed = [line.removeprefix("close ") for line in handler.log if line.startswith("close")]
    assert sorted(closed) == sorted(handler.made) and len(handler.made) >= 2
    assert {line for line in handler.log if line.startswith("release")} == {f"release {r['job_id']}" for r in results}
    assert threading.active_count() < 20


def test_timeout_counts_what_is_done_and_not_what_is_waited_for() -> None:
    handler = registered(hangs="run")
    with OpenHandsServer([LLM], max_run_workers=1, timeout_s=0.3) as server, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: server.process(INSTANCE, {}), range(4)))
        assert {result["failure"]["kind"] for result in results} == {"deadline"}
        assert all("took longer than its 0.3 s" in result["error"] for result in results), "each had its own 0.3 s"
        handler.hangs = ""
        assert server.process(INSTANCE, {}, timeout=LONG_S)["success"]


def test_caller_that_leaves_cancels_its_job() -> None:
    handler = registered(hangs="run")

    async def leave(server: OpenHandsServer) -> None:
        call = asyncio.ensure_future(server.aprocess(INSTANCE, {}, "mine"))
        await asyncio.to_thread(until, lambda: handler.inside["run"] == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with OpenHandsServer([LLM]) as server:
        asyncio.run(leave(server))
        until(lambda: server.status()["total"] == 0)
    assert handler.log == ["close mine", "release mine"]


def test_caller_that_comes_back_while_its_job_is_being_cancelled_gets_it_run_again() -> None:
    released = threading.Event()

    class Slow(Echo):
        async def release(self, job_details: JobDetails) -> None:
            await asyncio.to_thread(released.wait, LONG_S)
            await super().release(job_details)

    handler = Slow(hangs="run")
    register_agent_handler(handler)

    async def leave_and_come_back(server: OpenHandsServer) -> dict[str, Any]:
        left = asyncio.ensure_future(server.aprocess(INSTANCE, {}, "mine"))
        await asyncio.to_thread(until, lambda: handler.inside["run"] == 1)
        left.cancel()
        await asyncio.to_thread(until, lambda: handler.inside["run"] == 0)
        handler.hangs = ""
        back = asyncio.ensure_future(server.aprocess(INSTANCE, {}, "mine"))
        await asyncio.to_thread(server.status)  # it has been looked at by then
        released.set()
        return await back

    with OpenHandsServer([LLM]) as server:
        result = asyncio.run(leave_and_come_back(server))
    assert (result["success"], result["reward"]) == (True, 1.0)
    assert handler.log.count("release mine") == 2


async def test_aprocess_does_not_block_its_loop() -> None:
    registered()
    with OpenHandsServer([LLM], max_run_workers=8, max_init_workers=8) as server:
        async with asyncio.timeout(LONG_S):
            results = await asyncio.gather(*(server.aprocess(INSTANCE, {}) for _ in range(50)))
    assert all(result["success"] for result in results)


@pytest.mark.parametrize(
    ("stage", "returned", "said"),
    [
        ("init", {"a": 1}, r"init must return \(runtime, metadata, config\), not a dict"),
        ("run", None, "run must return a mapping, not None"),
        ("eval", [1], "eval must return a mapping, not a list"),
        ("eval", {"report": {"reward": float("nan")}}, "eval's 'reward' must be a finite number, not nan"),
        ("eval", {"report": {"reward": "0.5"}}, "eval's 'reward' must be a finite number, not '0.5'"),
        ("eval", {"reward": [1.0]}, "eval's 'reward' must be a finite number, not \\[1.0\\]"),
        ("eval", {"report": 1}, "eval must return a mapping, not a int"),
    ],
)
def test_handler_that_returns_something_else_is_named(stage: str, returned: Any, said: str) -> None:
    handler = registered()

    async def wrong(*args: Any, **options: Any) -> Any:
        return returned

    setattr(handler, stage, wrong)
    with OpenHandsServer([LLM]) as server:
        result = server.process(INSTANCE, {})
    assert re.search(said, result["error"])


def test_handler_that_blocks_the_servers_own_loop_by_process_is_told() -> None:
    handler = registered()

    async def run(*args: Any) -> Any:
        return server.process(INSTANCE, {})

    handler.run = run  # type: ignore[method-assign]
    with OpenHandsServer([LLM]) as server:
        assert "await server.aprocess" in server.process(INSTANCE, {})["error"]


def test_handler_of_another_class_needs_no_more_than_its_stages() -> None:
    class Foreign:
        name = "foreign"

        async def init(self, instance: Any, llm_config: Any = None, sid: Any = None, max_iterations: int = 1) -> Any:
            return None, None, None

        async def run(self, runtime: Any, metadata: Any, config: Any, instance: Any) -> dict[str, Any]:
            return {}

        async def eval(self, job_details: Any, sid: Any = None, allow_skip: bool = True) -> dict[str, Any]:
            return {"reward": 0.25}

    register_agent_handler(Foreign())  # type: ignore[arg-type]
    with OpenHandsServer([LLM]) as server:
        result = server.process({"data_source": "foreign"}, {})
    assert (result["error"], result["reward"], result["resolved"]) == (None, 0.25, None)


def test_caller_gets_the_error_that_kept_its_job_from_being_completed() -> None:
    handler = registered(fails="run")
    before = structlog.get_config()
    with OpenHandsServer([LLM]) as server, ThreadPoolExecutor() as callers:
        with suppress(OSError), Path("/dev/full").open("w") as full:  # its close fails, too
            structlog.configure(logger_factory=structlog.PrintLoggerFactory(full))
            try:
                with pytest.raises(OSError, match="No space left"):
                    callers.submit(server.process, INSTANCE, {}).result(LONG_S)
            finally:
                structlog.configure(**before)
        handler.fails = ""
        assert server.process(INSTANCE, {})["success"], "the pool goes on"
