"""The suite's own handlers, with its own agents and environments behind them and scripted models as LLM servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from nemo_gym.contract.errors import InvalidBodyError, ModelError, RowError
from nemo_gym.http.client import close_global_aiohttp_client
from nemo_gym.prorl import composed
from nemo_gym.prorl.async_server import OpenHandsServer
from nemo_gym.prorl.handlers import SuiteHandler
from nemo_gym.prorl.registry import register_agent_handler
from nemo_gym.stack.endpoints import StackEntry, health_of, running_stacks
from tests.prorl.llm import CountingModel, llm_server

ROOT = Path(__file__).resolve().parents[2]
MATH = ROOT / "resources_servers/math/data"
SIMPLE = str(ROOT / "responses_api_agents/simple_agent/data/scripted_tools.yaml")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def two_llms() -> Iterator[list[tuple[str, CountingModel]]]:
    script = str(MATH / "scripted_policy.yaml")
    with llm_server(script, SIMPLE) as first, llm_server(script, SIMPLE) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def server(two_llms: list[tuple[str, CountingModel]]) -> Iterator[OpenHandsServer]:
    with OpenHandsServer([url for url, _ in two_llms], max_init_workers=8, max_run_workers=8) as running:
        yield running


def test_math_rows_are_run_and_graded_by_their_environment(
    server: OpenHandsServer, two_llms: list[tuple[str, CountingModel]]
) -> None:
    questions = [{**row, "data_source": "math"} for row in rows(MATH / "example.jsonl")]
    params = {"model": "hosted_vllm/any", "temperature": 0.25, "max_output_tokens": 64, "max_iterations": 3}
    params |= {"custom_tokenizer": "x", "api_key": "dummy_key"}
    for _, model in two_llms:
        model.asked.clear()

    with ThreadPoolExecutor(64) as threads:
        results = list(threads.map(lambda row: server.process(row, params), questions * 11))
    assert [result["error"] for result in results if result["error"]] == []
    rewards = {(result["instance_id"], result["reward"]) for result in results}
    assert rewards == {
        *((name, 1.0) for name in ("garden", "two-dice", "distance", "expand", "absolute-value")),
        ("interval", 0.0),
    }
    assert Counter(result["llm_server"] for result in results) == dict.fromkeys((url for url, _ in two_llms), 33)
    for url, model in two_llms:
        assert len(model.asked) == 33, f"{url} answers the jobs that were given to it"
        assert {(body["temperature"], body["model"]) for body in model.asked} == {(0.25, "any")}
    one = results[0]
    assert one["messages"][0]["role"] == "user" and "\\boxed{46}" in one["messages"][-1]["content"]
    assert one["eval_results"]["resolved"] is True and one["eval_results"]["valid"] is not False
    assert "expected_answer" not in one["eval_results"]
    assert one["eval_results"]["ng_trajectory"][0]["reward"] == 1.0
    assert one["finish"] is True and one["git_patch"] == ""


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "Two fair dice are thrown. At least 10?", "answer": "1/6"},
        {
            "prompt": [{"role": "user", "content": "Two fair dice are thrown. At least 10?"}],
            "reward_model": {"ground_truth": "\\frac{1}{6}", "style": "rule"},
        },
        {
            "responses_create_params": {"input": "Two fair dice are thrown. At least 10?"},
            "expected_answer": "1/6",
        },
    ],
)
def test_math_rows_of_other_data_sets_are_understood(server: OpenHandsServer, row: dict[str, Any]) -> None:
    result = server.process({**row, "data_source": "math"}, {})
    assert (result["error"], result["reward"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"data_source": "math", "id": "q", "question": "?"}, "'q': the expected answer is missing"),
        ({"data_source": "math", "expected_answer": "1"}, "the question is missing; give 'question', or a 'prompt'"),
        ({"instance_id": "a__b-1"}, "'a__b-1': 'problem_statement' is missing"),
        ({"problem_statement": "x"}, "'instance_id' is missing"),
    ],
)
def test_row_that_cannot_be_used_is_refused_at_submission(
    server: OpenHandsServer, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(RowError, match=said):
        server.process(row, {})
    assert server.status()["total"] == 0


def test_parameter_that_cannot_be_meant_is_refused_at_submission(server: OpenHandsServer) -> None:
    row = {"data_source": "math", "question": "?", "expected_answer": "1"}
    with pytest.raises(InvalidBodyError, match="'temperature' is -1; it must be at least 0"):
        server.process(row, {"temperature": -1})


def test_llm_server_that_does_not_answer_is_named_at_submission_and_the_rest_goes_on() -> None:
    row = {"data_source": "math", "question": "?", "expected_answer": "1"}
    with OpenHandsServer(["http://127.0.0.1:9"]) as alone:
        with pytest.raises(ModelError, match=r"LLM server http://127\.0\.0\.1:9 does not answer"):
            alone.process(row, {})
        assert alone.status()["total"] == 0


def test_llm_server_that_never_answers_is_named_at_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "ANSWER_TIMEOUT_S", 0.2)
    row = {"data_source": "math", "question": "?", "expected_answer": "1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with OpenHandsServer([url]) as alone, pytest.raises(ModelError, match=r"does not answer within 0\.2 s: http"):
            alone.process(row, {})


async def test_llm_server_that_comes_back_with_another_model_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "MODELS_FOR_S", 0.0)
    listed = ["step-1"]

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": listed[0]}]}, status=200 if listed[0] else 503)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    servers = composed.ComposedServers(["agent=simple_agent"])
    seen = []
    try:
        for listed[0] in ("step-1", "step-2", ""):  # the last one answers with an error for now
            seen.append((await servers.access({"base_url": f"http://127.0.0.1:{runner.addresses[0][1]}"})).model)
    finally:
        await runner.cleanup()
        await close_global_aiohttp_client()
    assert seen == ["step-1", "step-2", "step-2"]


@pytest.mark.full
def test_job_that_is_cancelled_while_its_servers_start_leaves_them_to_the_next(
    two_llms: list[tuple[str, CountingModel]],
) -> None:
    row = {"data_source": "math", "question": "Two fair dice are thrown. At least 10?", "expected_answer": "1/6"}
    before_fresh = len(own_stacks())
    with OpenHandsServer([two_llms[0][0]]) as fresh, ThreadPoolExecutor(1) as threads:
        first = threads.submit(fresh.process, row, {}, "first")
        deadline = time.monotonic() + 60
        while fresh.status()["active_init"] != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        fresh.cancel_job("first")
        assert first.result(60)["failure"]["kind"] == "cancelled"
        assert fresh.process(row, {})["reward"] == 1.0
        assert len(own_stacks()) == 1 + before_fresh, "they were started once"
    assert len(own_stacks()) == before_fresh


def own_stacks() -> list[StackEntry]:
    return [stack for stack in running_stacks() if stack.pid == os.getpid()]


def is_up(stack: StackEntry) -> bool:
    return set(asyncio.run(health_of(stack)).values()) == {"ok"}


def test_gateway_that_restarts_is_told_of_the_llm_servers_again(server: OpenHandsServer) -> None:
    row = {"data_source": "math", "question": "Two fair dice are thrown. At least 10?", "expected_answer": "1/6"}
    assert server.process(row, {})["reward"] == 1.0
    (stack,) = own_stacks()
    pid = stack.server("policy_model").pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not is_up(stack := own_stacks()[0]) or stack.server("policy_model").pid == pid:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    results = [server.process(row, {}) for _ in range(4)]
    assert [(result["error"], result["reward"]) for result in results] == [(None, 1.0)] * 4
    assert len({result["llm_server"] for result in results}) == 2


def test_handler_over_servers_that_run_already_uses_them(server: OpenHandsServer) -> None:
    row = {"question": "Two fair dice are thrown. At least 10?", "expected_answer": "1/6"}
    assert server.process({**row, "data_source": "math"}, {})["reward"] == 1.0
    (stack,) = own_stacks()
    register_agent_handler(SuiteHandler("questions", run_dir=stack.run_dir))
    register_agent_handler(SuiteHandler("nowhere", run_dir="/nonexistent"))
    assert server.process({**row, "data_source": "questions"}, {})["reward"] == 1.0
    assert "no stack runs in /nonexistent" in server.process({**row, "data_source": "nowhere"}, {})["error"]


def test_composition_that_cannot_be_is_the_jobs_error(server: OpenHandsServer) -> None:
    register_agent_handler(SuiteHandler("wrong", ["agent=nobody", "environment=math", "model=gateway"]))
    result = server.process({"data_source": "wrong", "question": "?"}, {})
    assert result["failure"]["stage"] == "init" and "nobody" in result["error"] and result["reward"] is None


def test_question_that_the_model_cannot_answer_ends_with_an_error_and_no_reward(server: OpenHandsServer) -> None:
    row = {"data_source": "math", "question": "Nobody wrote a script for this.", "expected_answer": "1"}
    result = server.process(row, {})
    assert result["failure"]["stage"] == "run" and result["reward"] is None
    assert "model_" in result["failure"]["kind"]
