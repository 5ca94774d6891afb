"""Rollouts through the command and the suite's own servers, with plugins that the core has never seen."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.testing.processes import tiny_engine
from tests.rollouts.conftest import wait_until

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
DEADLINE_S = 120.0


def ng_run(directory: Path, *words: str) -> subprocess.Popen[str]:
    command = [
        str(Path(sys.executable).with_name("ng_run")),
        "model=instant",
        *words,
        f"input={directory / 'in.jsonl'}",
        f"output={directory / 'out.jsonl'}",
        f"run_dir={directory / 'run'}",
    ]
    env = {**os.environ, "NEMO_GYM_EXTRA_ROOTS": str(PLUGINS), "NEMO_GYM_CACHE_DIR": str(directory / "cache")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=directory
    )


def write_rows(directory: Path, count: int) -> None:
    rows = (
        {
            "id": f"q{number}",
            "responses_create_params": {"input": [{"role": "user", "content": "A or B?"}]},
            "expected_answer": "AB"[number % 2],
        }
        for number in range(count)
    )
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def results(directory: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(process: subprocess.Popen[str]) -> str:
    shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, shown
    return shown


def test_ng_run_prints_the_table_and_writes_the_files(tmp_path: Path) -> None:
    write_rows(tmp_path, 4)
    shown = finish(ng_run(tmp_path, "agent=one_shot", "environment=choice_questions", "num_repeats=2"))
    rows = results(tmp_path)
    assert len(rows) == 8
    assert {(row["task_id"], row["reward"]) for row in rows} == {("q0", 0.0), ("q1", 1.0), ("q2", 0.0), ("q3", 1.0)}
    assert {row["topology"] for row in rows} == {"none"}
    assert {row["ng_model_session"]["turns"] for row in rows} == {1}
    (aggregate,) = json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    assert aggregate["agent_metrics"]["mean/reward"] == 0.5
    for text in ("100% (8/8)", "8 rollouts of 4 tasks", "Key metrics for one_shot:", str(tmp_path / "out.jsonl")):
        assert text in shown


@pytest.mark.parametrize(
    ("agent", "environment", "hints"),
    [
        ("runs_itself", "verify_only", 1),  # NeMo Gym's style on both sides
        ("one_shot", "verify_only", 0),
    ],
)
def test_agents_and_environments_of_either_style_work_together(
    tmp_path: Path, agent: str, environment: str, hints: int
) -> None:
    write_rows(tmp_path, 4)
    finish(ng_run(tmp_path, f"agent={agent}", f"environment={environment}"))
    rows = results(tmp_path)
    assert sorted((row["task_id"], row["reward"]) for row in rows) == [
        ("q0", 0.0),
        ("q1", 1.0),
        ("q2", 0.0),
        ("q3", 1.0),
    ]
    assert {row["hints_taken"] for row in rows} == {hints}
    assert {row["ng_model_session"]["turns"] for row in rows} == {1}
    assert {row["valid"] for row in rows} == {True}


def test_run_of_an_agents_own_is_sampled_as_the_run_says_and_gives_its_tokens(tmp_path: Path) -> None:
    write_rows(tmp_path, 2)
    with tiny_engine(tmp_path, "rules:\n  - name: answer\n    steps:\n      - {say: '[B]'}\n") as url:
        engine = (f"policy_base_url={url}", "policy_model_name=tiny", f"policy_path={tmp_path / 'policy'}")
        limit = "++policy_model.responses_api_models.gateway.policy.max_context_tokens=8192"
        words = ("agent=runs_itself", "environment=verify_only", "model=vllm", *engine, limit, "temperature=0.5")
        finish(ng_run(tmp_path, *words))
    rows = results(tmp_path)
    assert sorted((row["task_id"], row["reward"]) for row in rows) == [("q0", 0.0), ("q1", 1.0)]
    for row in rows:
        (chain,) = row["ng_trajectory"]
        (message,) = row["response"]["output"]
        assert message["prompt_token_ids"] == chain["prompt_ids"]
        assert message["generation_token_ids"] == chain["response_ids"]
        assert row["response"]["temperature"] == 0.5


HISTORY = [{"type": "output_text", "text": "A, I think."}], "A, I think."
"""The same earlier answer twice; the first as datasets hold it, without an endpoint's id, status and annotations."""


def write_histories(directory: Path) -> None:
    with (directory / "in.jsonl").open("w") as file:
        for said in HISTORY:
            turns = [("user", "A or B?"), ("assistant", said), ("user", "Sure?")]
            params = {"input": [{"role": role, "content": content} for role, content in turns]}
            file.write(json.dumps({"responses_create_params": params, "expected_answer": "B"}) + "\n")


def results_of_histories(directory: Path) -> list[dict[str, Any]]:
    rows = sorted(results(directory), key=lambda row: int(row["_ng_task_index"]))
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert [row["responses_create_params"]["input"][1]["content"] for row in rows] == [*HISTORY]
    return rows


def test_earlier_answer_in_a_row_may_be_bare_parts_of_text(tmp_path: Path) -> None:
    write_histories(tmp_path)
    with tiny_engine(tmp_path, "rules:\n  - name: answer\n    steps:\n      - {say: '[B]'}\n") as url:
        engine = (f"policy_base_url={url}", "policy_model_name=tiny", f"policy_path={tmp_path / 'policy'}")
        limit = "++policy_model.responses_api_models.gateway.policy.max_context_tokens=8192"
        finish(ng_run(tmp_path, "agent=simple_agent", "environment=verify_only", "model=vllm", *engine, limit))
    parts, text = ([chain["prompt_ids"] for chain in row["ng_trajectory"]] for row in results_of_histories(tmp_path))
    assert parts == text and parts[0]


def test_agent_and_model_of_nemo_gyms_style_take_an_earlier_answer_as_bare_parts_of_text(tmp_path: Path) -> None:
    write_histories(tmp_path)
    finish(ng_run(tmp_path, "agent=runs_itself", "environment=verify_only"))
    results_of_histories(tmp_path)


def test_each_result_stands_once_when_ng_run_was_killed_and_resumed(tmp_path: Path) -> None:
    write_rows(tmp_path, 400)
    words = ("agent=one_shot", "environment=choice_questions", "concurrency=4")
    with ng_run(tmp_path, *words) as process:
        wait_until(lambda: len(results_so_far(tmp_path)) >= 20, "results", DEADLINE_S)
        process.kill()
    before = results_so_far(tmp_path)
    assert len(before) < 400
    finish(ng_run(tmp_path, *words))
    ids = [row["_ng_rollout_id"] for row in results(tmp_path)]
    assert len(ids) == len(set(ids)) == 400
    assert before <= set(ids)
    database = sqlite3.connect(tmp_path / "out_store.sqlite")
    assert database.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall() == [("done", 400)]
    database.close()


def results_so_far(directory: Path) -> set[str]:
    """Ids of whole lines; the last one may be in the making."""
    path = directory / "out.jsonl"
    if not path.exists():
        return set()
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    return {json.loads(line)["_ng_rollout_id"] for line in lines}
