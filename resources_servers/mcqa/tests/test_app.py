"""Choices as policies write them, and rows that are none."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.contract.credentials import Role
from nemo_gym.environment import worker_pool
from resources_servers.mcqa.app import McqaEnvironment
from resources_servers.mcqa.extraction import Grading, choice
from tests.servers.stack import Stack, response, rollout, running_stack

ENV = "mcqa"
ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "example.jsonl").read_text().splitlines()]
OPTIONS = {"A": "Sydney", "B": "Canberra", "C": "An hour"}
STRICT, BOXED, COLON = Grading


@pytest.fixture
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        running.add(ENV, McqaEnvironment, Role.ENVIRONMENT, regex_timeout_s=2)
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


@pytest.mark.parametrize(
    ("mode", "text", "chosen"),
    [
        (STRICT, "so \\boxed{B}", "B"),
        (STRICT, "\\boxed{A}, no: \\boxed{ B }", "B"),
        (STRICT, "\\boxed{B}, then \\boxed{A", "B"),
        (STRICT, "\\boxed{b}", None),
        (STRICT, "\\boxed{\\text{B}}", "B"),
        (STRICT, "\\boxed{\\textbf{(B)}}", "B"),
        (STRICT, "\\boxed{(B)}", "B"),
        (STRICT, "\\boxed{B.}", "B"),
        (STRICT, "\\boxed{B: Canberra}", "B"),
        (STRICT, "\\boxed{B - Canberra}", "B"),
        (STRICT, "\\boxed{Canberra}", None),
        (STRICT, "\\boxed{\\text{(b)}}", None),
        (STRICT, "\\boxed{B or C}", None),
        (STRICT, "\\boxed{B, C}", None),
        (STRICT, "\\boxed{A-B}", None),
        (STRICT, "\\boxed{A) and B)}", None),
        (STRICT, "\\boxed{A: no, B}", None),
        (STRICT, "\\boxed{ABC}", None),
        (STRICT, "\\boxed{D}", None),
        (STRICT, "\\boxed{}", None),
        (STRICT, "B", None),
        (STRICT, "", None),
        (BOXED, "\\boxed{\\text{B}}", "B"),
        (BOXED, "\\boxed{(b)}", "B"),
        (BOXED, "\\boxed{\\mathbf{B}. Canberra}", "B"),
        (BOXED, "\\boxed{ canberra. }", "B"),
        (BOXED, "\\boxed{An hour}", "C"),
        (BOXED, "\\boxed{A century}", None),
        (BOXED, "\\boxed{Bonn}", None),
        (BOXED, "\\boxed{D}", None),
        (COLON, "Answer: B", "B"),
        (COLON, "**Answer:** (B) Canberra", "B"),
        (COLON, "Answer: A\nWait.\nFinal answer: B.", "B"),
        (COLON, "The answer is: Canberra", "B"),
        (COLON, "Answer:\nB", "B"),
        (COLON, "**Answer:**\n\n**B**", "B"),
        (COLON, "Answer:\nAnswer: B", "B"),
        (COLON, "Answer: B. (The answer is: Canberra, since the capital moved.)", "B"),
        (COLON, "Answer: \\boxed{B}", "B"),
        (COLON, "Answer: $\\boxed{\\text{B}}$", "B"),
        (COLON, "Answer: B (Canberra)", "B"),
        (COLON, "Answer: B - Canberra", "B"),
        (COLON, "Answer: b) Canberra", "B"),
        (COLON, "Answer: \\(B\\)", "B"),
        (COLON, "Answer: A (Canberra)", None),
        (STRICT, "\\boxed{\\(B\\)}", "B"),
        (COLON, "Answer: Brisbane", None),
        (COLON, "Answer:\nA city", None),
        (COLON, "Answer: B\nAnswer:", None),
        (COLON, "\\boxed{B}", None),
    ],
)
def test_choice_is_the_last_one_in_the_form_asked_for(mode: Grading, text: str, chosen: str | None) -> None:
    assert choice(text, OPTIONS, mode) == chosen


def test_text_of_an_option_is_compared_as_the_answer_is_where_both_are_latex() -> None:
    options = {"A": "$10\\text{ cm}$", "B": "$\\mathbf{v}$", "C": "\\(\\frac{1}{2}\\)"}
    chosen = [
        choice(f"\\boxed{{{said}}}", options, BOXED) for said in ("10\\text{ cm}", "\\mathbf{v}", "\\frac{1}{2}")
    ]
    assert chosen == ["A", "B", "C"]


def test_boxes_that_never_close_are_read_in_bounded_time() -> None:
    assert choice("\\boxed{" * 100_000, OPTIONS, STRICT) is None


def by_regex(patterns: Any) -> dict[str, Any]:
    return {**ROWS[0], "template_metadata": {"output_regex": patterns}}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (ROWS[0], "\\boxed{B}"),
        (ROWS[1], "\\boxed{\\text{Mercury}}"),
        (ROWS[2], "Answer: Iron"),
        (ROWS[4], "Answer: A. No, my mistake. Answer: B"),
        ({**ROWS[0], "options": ["Sydney", "Canberra"]}, "\\boxed{B}"),
        (by_regex("Answer:\\s*([A-D])"), "ANSWER: B"),
        (by_regex("Answer:\\s*([A-D])"), "answer: b"),
        (by_regex(["Choice: (.)", "Answer:\\s*([A-D])"]), "Choice: ? Answer: B"),
        (by_regex(["Choice: (.)", "Answer:\\s*([A-D])"]), "It is \\boxed{B}"),
        (by_regex([]), "\\boxed{B}"),
    ],
)
async def test_right_choice_is_rewarded_and_a_wrong_one_is_not(stack: Stack, row: dict[str, Any], text: str) -> None:
    judged = await verdict(stack, row, text)
    assert (judged["valid"], judged["reward"]) == (True, 1.0), judged
    assert judged["details"]["chosen"] == row["expected_answer"]


async def test_wrong_choice_is_worth_nothing(stack: Stack) -> None:
    judged = await verdict(stack, ROWS[0], "\\boxed{A}")
    assert (judged["valid"], judged["reward"], judged["details"]) == (True, 0.0, {"chosen": "A"})
    assert judged["reward_reason"] == "wrong choice"


async def test_answer_is_searched_again_when_the_search_was_broken_off(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off: list[int] = []
    asked = worker_pool._ask

    def stalls_once(turn: Any, process: subprocess.Popen[bytes], question: dict[str, Any], timeout_s: float) -> Any:
        if question.get("patterns") == ["Final: (.)"] and not broken_off:
            broken_off.append(process.pid)
            turn.end(worker_pool.Ending.TIMED_OUT)
        return asked(turn, process, question, timeout_s)

    monkeypatch.setattr(worker_pool, "_ask", stalls_once)
    row = {**ROWS[0], "template_metadata": {"output_regex": "Final: (.)"}}
    judged = await verdict(stack, row, f"Final: {ROWS[0]['expected_answer']}")
    assert broken_off and (judged["valid"], judged["reward"]) == (True, 1.0), judged


async def test_expression_that_never_ends_on_an_answer_chooses_nothing(stack: Stack) -> None:
    row = {**ROWS[0], "template_metadata": {"output_regex": "(x+x+)+y"}}
    judged = await verdict(stack, row, "x" * 5000)
    assert (judged["valid"], judged["reward"]) == (True, 0.0), judged


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("options", None),
        ("options", [{"A": "only one"}]),
        ("options", {"first": "a", "second": "b"}),
        ("expected_answer", "E"),
        ("expected_answer", None),
        ("grading_mode", "by_feel"),
        ("template_metadata", {"output_regex": "("}),
        ("template_metadata", {"output_regex": ["Answer: (.)", "("]}),
        ("template_metadata", {"output_regex": ["Answer: (.)", 5]}),
        ("template_metadata", {"output_regex": 5}),
    ],
)
async def test_row_is_refused_with_its_field_when_it_cannot_be_graded(stack: Stack, field: str, value: Any) -> None:
    status, answer = await seed(stack, {**ROWS[0], field: value})
    assert (status, answer["code"]) == (422, "row"), answer
    assert f"'{field}" in answer["detail"]


async def test_more_options_than_letters_are_refused_with_their_limit(stack: Stack) -> None:
    status, answer = await seed(stack, {**ROWS[0], "options": [f"option {number}" for number in range(27)]})
    assert status == 422 and "2 to 26 options" in answer["detail"], answer


async def test_agent_sees_question_and_options_and_never_the_answer(stack: Stack) -> None:
    status, seeded = await seed(stack, ROWS[0])
    assert status == 200
    assert "expected_answer" not in json.dumps({**seeded, "control_token": ""})
    public = stack.servers[ENV].public_row(ROWS[0])  # type: ignore[attr-defined]
    shown = public["responses_create_params"]["input"][0]["content"]
    assert ROWS[0]["question"] in shown and "B. Canberra" in shown and "\\boxed{}" in shown
    assert "expected_answer" not in json.dumps(public)


@pytest.mark.parametrize(
    "options",
    [
        [{"A": "Sydney", "B": None, "C": None}, {"A": None, "B": "Canberra", "C": None}],
        {"A": "Sydney", "B": "Canberra", "C": None},
    ],
)
async def test_letter_without_a_text_is_no_option(stack: Stack, options: Any) -> None:
    row = {**ROWS[0], "options": options, "grading_mode": BOXED}
    shown = stack.servers[ENV].public_row(row)["responses_create_params"]["input"][0]["content"]  # type: ignore[attr-defined]
    assert "\n\nA. Sydney\nB. Canberra\n\n" in shown
    status, answer = await seed(stack, {**row, "expected_answer": "C"})
    assert status == 422 and "'expected_answer'" in answer["detail"]
    assert (await verdict(stack, row, "\\boxed{Canberra}"))["reward"] == 1.0


async def test_own_prompt_of_a_row_is_left_as_it_is(stack: Stack) -> None:
    own = {**ROWS[0], "responses_create_params": {"input": "Tell me."}}
    public = stack.servers[ENV].public_row(own)  # type: ignore[attr-defined]
    assert public["responses_create_params"]["input"] == "Tell me."


async def test_gold_solution_is_not_sought_for_longer_than_a_verdict_would_be(stack: Stack) -> None:
    environment: Any = stack.servers[ENV]
    environment.config.regex_timeout_s = 0.5
    row = {**ROWS[0], "template_metadata": {"output_regex": "(?:[^!]|[^!]|[^!]|[^!])*!!"}}
    async with asyncio.timeout(20):
        assert await environment.gold_solution(row) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["task_id"])
async def test_gold_solution_is_rewarded(stack: Stack, row: dict[str, Any]) -> None:
    solution = await stack.servers[ENV].gold_solution(row)  # type: ignore[attr-defined]
    assert (await verdict(stack, row, solution["text"]))["reward"] == 1.0
