"""Answers as policies write them, and what happens to those that symbolic algebra cannot finish."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.environment import worker_pool
from resources_servers.math.app import COMPARE, MathEnvironment, _expected
from resources_servers.math.comparison import compare
from tests.servers.stack import Stack, response, rollout, running_stack

ENV = "math"
ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "example.jsonl").read_text().splitlines()]
ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        running.add(ENV, MathEnvironment, Role.ENVIRONMENT, timeout_s=3, workers=1)
        yield running


async def seed(stack: Stack, row: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = {**row, "_ng_session": {"rollout": rollout().model_dump()}}
    reply = await stack.client().post(ENV, "/seed_session", json=body)
    return reply.status, await reply.json()


async def verdict(stack: Stack, row: dict[str, Any], text: str) -> dict[str, Any]:
    status, seeded = await seed(stack, row)
    assert status == 200, seeded
    body = {**row, "response": response(text), "_ng_session": {"rollout": rollout().model_dump()}}
    headers = {"X-NeMo-Gym-Control-Token": seeded["control_token"]}
    reply: dict[str, Any] = await (await stack.client().post(ENV, "/verify", json=body, headers=headers)).json()
    return reply


def row(expected: Any) -> dict[str, Any]:
    return {"task_id": "t1", "question": "How much?", "expected_answer": expected}


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if COMPARE in child.cmdline()]


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        ("46", "so the fence is \\boxed{46} metres long", 1.0),
        (46, "It is 46.", 1.0),
        (0.00001, "\\boxed{10^{-5}}", 1.0),
        (0.00001, "\\boxed{0.00001}", 1.0),
        ("3 1/2", "\\boxed{3.5}", 1.0),
        ("3 1/2", "\\boxed{2}", 0.0),
        ("$46$", "\\boxed{46}", 1.0),
        ("\\frac{1}{6}", "six of 36, that is \\boxed{6/36}", 1.0),
        ("3\\sqrt{5}", "$\\sqrt{45}$", 1.0),
        ("x^3+4x^2-3x-18", "\\boxed{(x-2)(x+3)^2}", 1.0),
        ("\\{5,-2\\}", "\\boxed{\\{-2, 5\\}}", 1.0),
        ("(-3,2)", "\\boxed{[-3,2)}", 0.0),
        ("46", "\\boxed{45}, no: \\boxed{46}", 0.0),
        ("46", "I first had 46, and then \\boxed{47}", 0.0),
        ("46", "I do not know.", 0.0),
        ("46", "", 0.0),
        ("46", "\\boxed{", 0.0),
    ],
)
async def test_answer_is_right_when_it_is_mathematically_equal(
    stack: Stack, expected: Any, answer: str, reward: float
) -> None:
    judged = await verdict(stack, row(expected), answer)
    assert (judged["valid"], judged["reward"]) == (True, reward), judged


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        (0.00001, ["0.00001", "10^{-5}", "1e-05"], ["e-5", "0.0001"]),
        (1e16, ["10^{16}", "10000000000000000"], ["10^{15}"]),
        (6.022e23, ["6.022\\times10^{23}", "602200000000000000000000"], ["6.03\\times10^{23}"]),
        ("1.5e-3", ["0.0015", "1.5\\times 10^{-3}", "1.5e-3"], ["1.5e", "0.015"]),
        ("2E+5", ["200000", "2\\cdot10^5"], ["2"]),
        ("2e-1", ["0.2", "2e-1"], ["0.1"]),
        ("3 1/2", ["3.5", "3\\frac12", "\\frac72", "3 1/2"], ["2", "3"]),
        ("-3 1/2", ["-3.5"], ["-2.5", "3.5"]),
        ("pi/4", ["\\frac{\\pi}{4}", "pi/4"], ["\\pi"]),
        ("2*pi", ["2\\pi"], ["2"]),
        ("x**2", ["x^2", "x**2"], ["2x"]),
        ("2*x**-1", ["\\frac{2}{x}"], ["2x"]),
        ("(x+1)**(1/2)", ["\\sqrt{x+1}"], ["x+1"]),
        ("exp(2)", ["e^2"], ["2"]),
        ("log(2)", ["\\log 2"], ["2"]),
        ("sin(pi*x)", ["\\sin(\\pi x)"], ["\\sin x"]),
        ("20%", ["20\\%", "20", "0.2", "20%"], ["2", "0.02"]),
        ("5.", ["5", "5."], ["0.5"]),
        ("18 dollars", ["18", "18 dollars", "18\\text{ dollars}"], ["1", "19"]),
        ("3/4 cup", ["\\frac34", "0.75"], ["3"]),
        ("5 million", ["5 million"], ["5"]),
        ("1,234", ["1234", "1,234", "\\$1,234"], ["1", "234"]),
        ("$18", ["18", "\\$18", "18.00"], ["1"]),
        ("-3", ["-3"], ["3"]),
        ("0.5", ["\\frac12", "0.5", ".5"], ["5"]),
        ("2e - 5", ["2e-5"], ["0.00002"]),
        ("1.6e-19", ["1.6\\times10^{-19}", "1.6000\\times10^{-19}"], ["0.0", "9\\times10^{-19}", "10^{-20}"]),
        ("6.67\\times10^{-11}", ["6.67\\cdot 10^{-11}", "0.667\\times10^{-10}"], ["0.0", "0.000000000066"]),
        ("E=6.67\\times10^{-11}", ["6.67\\times 10^{-11}"], ["0.0"]),
        ("\\frac{1}{8100}", ["\\frac{1}{90^2}", "0.0001235"], ["0.000123", "0.0"]),
        ("10^{-20}", ["\\frac{1}{10^{20}}"], ["10^{-21}", "0.0"]),
    ],
)
def test_answer_to_an_expected_one_in_plain_notation_is_judged_by_its_value(
    expected: Any, right: list[str], wrong: list[str]
) -> None:
    judged = {said: compare(_expected(row(expected)), f"So \\boxed{{{said}}}.")["right"] for said in right + wrong}
    assert judged == {said: said in right for said in right + wrong}


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("0.0015", ["1.5e-3", "0.15%", "0.15\\%"], ["1.5e-2", "1.5"]),
        ("6.67\\times10^{-11}", ["6.67e-11", "6.67E-11"], ["6.68e-11", "6.67e-10"]),
        ("\\frac{7}{2}", ["3 1/2", "3.5", "7/2"], ["3 1/3"]),
        ("2", ["2."], ["3 1/2"]),
        ("2\\pi", ["2*pi", "2pi"], ["pi"]),
        ("x^2", ["x**2"], ["x*2"]),
        ("50", ["50%", "50\\%", "50 \\%"], ["5\\%", "0.5"]),
        ("50\\%", ["50", "0.5", "\\frac12", "50%", "50\\%"], ["5", "500\\%"]),
        ("18", ["18 dollars", "18."], ["8 dollars", "18 million"]),
        (
            "3",
            ["3 times", "3 turnovers"],
            ["3 plus four", "3 minus two", "3 times ten", "3 over four", "3 choose two"],
        ),
    ],
)
def test_answer_in_plain_notation_or_percent_is_judged_by_its_value(
    expected: str, right: list[str], wrong: list[str]
) -> None:
    judged = {said: compare(_expected(row(expected)), f"So \\boxed{{{said}}}.")["right"] for said in right + wrong}
    assert judged == {said: said in right for said in right + wrong}


@pytest.mark.parametrize("expected", ["46", "\\frac{1}{2}", "1,000", "\\{1,2\\}", "50\\%", "12 cm", "x=3", "C"])
@pytest.mark.parametrize("said", ["So it is \\boxed{%s} metres.", "First $x=7$. $$\\boxed{%s}$$ Or $8$?", " \n"])
async def test_answer_in_the_words_of_the_expected_one_is_judged_as_by_a_comparison_and_without_one(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, expected: str, said: str
) -> None:
    answer = said.replace("%s", expected)
    assert (await seed(stack, row(expected)))[0] == 200
    monkeypatch.setattr(MathEnvironment, "_compare", None)
    judged = await verdict(stack, row(expected), answer)
    assert (judged["valid"], judged["reward"]) == (True, float(compare(expected, answer)["right"])), judged


@pytest.mark.parametrize(
    "answer", ["\\boxed{45}, no: \\boxed{46}", "\\fbox{45} \\boxed{46}", "\\boxed{46", "46", "\\boxed{ 46}"]
)
async def test_answer_is_compared_where_it_says_more_or_says_it_otherwise(stack: Stack, answer: str) -> None:
    assert (await seed(stack, row("46")))[0] == 200
    assert stack.servers[ENV]._obvious("46", answer) is None  # type: ignore[attr-defined]
    assert stack.servers[ENV]._obvious("47", "\\boxed{47}") is None, "nobody found 47 to accept itself"  # type: ignore[attr-defined]


async def test_answer_that_never_ends_is_wrong_and_the_next_one_is_compared(stack: Stack) -> None:
    judged = await verdict(stack, row("46"), ENDLESS)
    assert (judged["valid"], judged["reward"], judged["details"]["comparison"]) == (True, 0.0, "timed_out")
    assert not workers(), "the processes that computed without an end are gone"
    assert (await stack.servers[ENV]._compare("46", "\\boxed{40+6}")).right  # type: ignore[attr-defined]


@pytest.mark.parametrize("ending", [worker_pool.Ending.DIED, worker_pool.Ending.TIMED_OUT])
async def test_answer_is_compared_again_when_its_comparison_was_broken_off(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, ending: worker_pool.Ending
) -> None:
    broken_off: list[int] = []
    asked = worker_pool._ask

    def breaks_off(turn: Any, process: subprocess.Popen[bytes], question: dict[str, Any], timeout_s: float) -> Any:
        if question.get("answer") == "\\boxed{40+6}" and not broken_off:
            broken_off.append(process.pid)
            turn.end(ending)
        return asked(turn, process, question, timeout_s)

    monkeypatch.setattr(worker_pool, "_ask", breaks_off)
    judged = await verdict(stack, row("46"), "\\boxed{40+6}")
    assert broken_off and (judged["valid"], judged["reward"]) == (True, 1.0), judged


@pytest.mark.parametrize("ending", [worker_pool.Ending.DIED, worker_pool.Ending.TIMED_OUT])
async def test_seed_may_be_tried_again_when_the_comparison_with_itself_was_broken_off(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, ending: worker_pool.Ending
) -> None:
    broken_off: list[int] = []
    asked = worker_pool._ask

    def breaks_off(turn: Any, process: subprocess.Popen[bytes], question: dict[str, Any], timeout_s: float) -> Any:
        if "answer" in question and not broken_off:
            broken_off.append(process.pid)
            turn.end(ending)
        return asked(turn, process, question, timeout_s)

    monkeypatch.setattr(worker_pool, "_ask", breaks_off)
    status, answer = await seed(stack, row("46"))
    assert (status, answer["code"], answer["retryable"]) == (502, "verifier", True), answer
    assert "'expected_answer'" in answer["detail"] and "timeout_s" in answer["detail"]
    assert (await seed(stack, row("46")))[0] == 200


async def test_verdict_is_invalid_when_the_expected_answer_cannot_be_compared_any_more(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, seeded = await seed(stack, row("46"))
    assert status == 200
    asked = worker_pool._ask

    def has_no_time(turn: Any, process: subprocess.Popen[bytes], question: dict[str, Any], timeout_s: float) -> Any:
        if "answer" in question:
            turn.hold(process)
            turn.end(worker_pool.Ending.TIMED_OUT)
        return asked(turn, process, question, timeout_s)

    monkeypatch.setattr(worker_pool, "_ask", has_no_time)
    body = {**row("46"), "response": response("46"), "_ng_session": {"rollout": rollout().model_dump()}}
    headers = {"X-NeMo-Gym-Control-Token": seeded["control_token"]}
    judged = await (await stack.client().post(ENV, "/verify", json=body, headers=headers)).json()
    assert (judged["valid"], judged["reward"], judged["failure_kind"]) == (False, None, "control_run_failed"), judged


async def test_verdict_is_no_reward_when_the_checker_cannot_start(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_comparison.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(stack.servers[ENV]._comparers, "function", "broken_comparison:compare")  # type: ignore[attr-defined]
    status, answer = await seed(stack, row("46"))
    assert status >= 500
    assert "No module named 'a_package_that_nobody_has'" in answer["detail"]
    assert "requirements.txt" in answer["detail"]


@pytest.mark.parametrize("expected", [None, "", True, "}", "\\text{}"])
async def test_row_is_refused_when_its_own_answer_would_not_be_accepted(stack: Stack, expected: Any) -> None:
    status, answer = await seed(stack, row(expected))
    assert (status, answer["code"]) == (422, "row"), answer
    assert "'expected_answer'" in answer["detail"]
    assert "text{" not in answer["detail"], "the answer is private"


async def test_agent_sees_the_question_and_never_the_answer(stack: Stack) -> None:
    status, seeded = await seed(stack, ROWS[0])
    shown = json.dumps({key: value for key, value in seeded.items() if key != "control_token"})
    assert status == 200
    assert seeded["descriptor"]["placement"]["topology"] == "none"
    assert seeded["descriptor"]["sandbox"] is None
    assert "expected_answer" not in shown and "46" not in seeded["descriptor"]
    public = stack.servers[ENV].public_row(ROWS[0])  # type: ignore[attr-defined]
    assert ROWS[0]["question"] in json.dumps(public)
    assert "expected_answer" not in json.dumps(public)


async def test_own_prompt_of_a_row_is_left_as_it_is(stack: Stack) -> None:
    own = {**ROWS[0], "responses_create_params": {"input": "Tell me."}}
    public = stack.servers[ENV].public_row(own)  # type: ignore[attr-defined]
    assert public["responses_create_params"]["input"] == "Tell me."


async def test_worker_has_no_credential_and_ends_with_its_server(tmp_path: Path) -> None:
    with running_stack() as stack:
        stack.add(ENV, MathEnvironment, Role.ENVIRONMENT)
        assert (await seed(stack, ROWS[0]))[0] == 200
        (worker,) = workers()
        assert set(worker.environ()) <= {"LANG", "LC_CTYPE"}
    deadline = time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_comparison_says_what_it_read() -> None:
    assert compare("46", "\\boxed{40+6}") == {"right": True, "read": "40+6"}
    assert compare("46", "no idea") == {"right": False, "read": None}
    assert compare("1", "é \u2028 1") == {"right": True, "read": "1"}
