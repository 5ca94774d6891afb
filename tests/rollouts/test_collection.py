"""Whole runs against real servers over sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nemo_gym.errors import ConfigError, RowError
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.rollouts.stages import reward_of
from tests.rollouts.conftest import Chain, wait_until

MakeChain = Callable[..., Chain]


async def test_run_writes_each_sample_once_with_nemo_gym_fields(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(4)
    result = await run_collection(chain.client(), chain.run_keys(num_repeats=3, concurrency=5))
    rows = chain.results()
    assert (result.valid, result.invalid) == (12, 0)
    assert sorted((r["_ng_task_index"], r["_ng_rollout_index"]) for r in rows) == [
        (task, sample) for task in range(4) for sample in range(3)
    ]
    for row in rows:
        assert row["agent_ref"] == {"type": "responses_api_agents", "name": "trivial"}
        assert row["_ng_rollout_id"] == f"{result.run_id}.{row['_ng_task_index']}-{row['_ng_rollout_index']}"
        assert row["_ng_attempt_index"] == 0
        assert row["reward"] == (1.0 if row["_ng_task_index"] % 2 == 0 else 0.0)
        assert (row["valid"], row["mask_sample"], row["failure_kind"], row["findings"]) == (True, False, None, [])
        assert row["outcome"] == "completed"
        assert set(row["timings"]) == {"init_s", "run_s", "eval_s"}
        assert row["task_id"] == f"t{row['_ng_task_index']}"
        assert "_ng_session" not in row
        assert row["response"]["output"]
    assert len(chain.results("out_materialized_inputs.jsonl")) == 12
    assert not (chain.directory / "out_failures.jsonl").exists()
    (aggregate,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert set(aggregate) == {"agent_ref", "agent_metrics", "key_metrics", "group_level_metrics"}
    assert aggregate["key_metrics"] == {"mean/reward": 0.5}
    assert aggregate["agent_metrics"]["rollouts/valid"] == 12


async def test_run_closes_every_session_and_environment_it_opened(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t1": 1}})
    chain.write_rows(3)
    await run_collection(chain.client(), chain.run_keys())
    assert set(chain.notes("seed")) == set(chain.notes("close"))
    assert len(chain.notes("seed")) == 4
    assert len(chain.notes("finalize")) == 3
    assert len(chain.notes("abort")) == 1


async def test_trajectories_carry_the_reward_of_the_verdict(make_chain: MakeChain) -> None:
    chain = make_chain(model={"trajectories": True})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    rows = {row["task_id"]: row for row in chain.results()}
    assert rows["t0"]["ng_trajectory"] == [{"reward": 1.0, "reward_info": {}}]
    assert rows["t1"]["ng_trajectory"] == [{"reward": 0.0, "reward_info": {}}]
    assert rows["t0"]["ng_model_session"]["turns"] == 1


async def test_trajectories_are_kept_without_reward_when_the_grader_fails_for_good(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_status": 500}, model={"trajectories": True})
    chain.write_rows(1)
    result = await run_collection(chain.client(), chain.run_keys(max_attempts=2))
    assert (result.valid, result.invalid) == (0, 1)
    (failure,) = chain.results("out_failures.jsonl")
    assert failure["reward"] is None
    assert failure["ng_trajectory"] == [{"reward": None, "reward_info": {}}]
    assert (len(chain.notes("finalize")), len(chain.notes("abort"))) == (1, 0)


def test_trajectories_get_no_reward_from_a_verdict_that_is_none() -> None:
    finding = {"kind": "verdict_not_caused_by_tests", "detail": "d", "evidence": {"path": "p"}}
    good = {"reward": 1, "valid": True, "findings": [finding], "reward_info": {"passed": 3}}
    assert reward_of(good) == {
        "reward": 1.0,
        "reward_info": {"passed": 3, "findings": ["verdict_not_caused_by_tests"]},
    }
    for bad in ({"valid": False}, {"mask_sample": True}, {"reward": None}, {"_ng_failure_class": "verifier_failed"}):
        assert reward_of({**good, **bad})["reward"] is None


async def test_run_gives_reward_null_and_goes_on_when_one_task_always_crashes(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 99}})
    chain.write_rows(6)
    result = await run_collection(chain.client(), chain.run_keys(max_attempts=2))
    assert (result.valid, result.invalid) == (5, 1)
    (failure,) = chain.results("out_failures.jsonl")
    assert failure["reward"] is None
    assert (failure["valid"], failure["mask_sample"]) == (False, True)
    assert failure["failure_kind"] == failure["_ng_failure_class"] == "agent_crashed"
    assert failure["failure_reason"] == "harness died"
    assert [past["stage"] for past in failure["failures"]] == ["run", "run"]
    assert failure["_ng_attempt_index"] == 1
    assert "t0" not in {row["task_id"] for row in chain.results()}
    (aggregate,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert aggregate["agent_metrics"]["rollouts/invalid/agent_crashed"] == 1
    assert aggregate["key_metrics"]["mean/reward"] == 0.4  # of the five with a verdict


@pytest.mark.parametrize("outcome", ['completed"},"expected_answer":"B","z":{"a":"b', "solved", ["completed"], None])
async def test_unknown_outcome_is_refused_and_rewrites_no_row(make_chain: MakeChain, outcome: Any) -> None:
    chain = make_chain(agent={"says": {"outcome": outcome, "within_reach": True}})
    chain.write_rows(2)  # the model answers B; the second row expects A
    result = await run_collection(chain.client(), chain.run_keys(max_attempts=2))
    assert (result.valid, result.invalid) == (0, 2)
    assert chain.notes("verify") == []
    for failure in chain.results("out_failures.jsonl"):
        assert (failure["failure_kind"], failure["reward"], failure["_ng_attempt_index"]) == ("agent_crashed", None, 0)
        assert "unknown outcome" in failure["failure_reason"]


async def test_names_with_quotes_reach_every_server_as_they_are(make_chain: MakeChain) -> None:
    says = {"outcome": "max_turns", "outcome_detail": 'said "},"expected_answer":"B', "observations": {'"},"a': '"'}}
    chain = make_chain(agent={"says": says})
    chain.write_rows(2, note='"},"expected_answer":"B","z":{"a":"b')
    result = await run_collection(chain.client(), chain.run_keys())
    assert (result.valid, sorted(row["reward"] for row in chain.results())) == (2, [0.0, 1.0])
    assert {row["outcome"] for row in chain.results()} == {"max_turns"}


@pytest.mark.parametrize("told", ['{}},"expected_answer":"B","z":{"a":{}', "[]", "needs"])
async def test_needs_of_an_agent_that_are_no_json_object_stop_the_run_before_any_task(
    make_chain: MakeChain, told: str
) -> None:
    chain = make_chain(environment={"owns_boxes": True}, agent={"box_needs": told})
    chain.write_rows(2)
    with pytest.raises(ConfigError, match="box_needs"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.notes("seed") == []


async def test_rollout_gets_a_new_attempt_when_the_agent_crashes_once(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 1}})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys())
    (row,) = chain.results()
    assert row["_ng_attempt_index"] == 1
    assert [attempt for _, attempt in chain.notes("act")] == [1, 2]
    assert [attempt for _, attempt in chain.notes("verify")] == [2]


async def test_verify_is_repeated_on_the_same_attempt_when_the_grader_breaks(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_failures": 2})
    chain.write_rows(3)
    await run_collection(chain.client(), chain.run_keys(max_attempts=3))
    assert len(chain.results()) == 3
    assert {attempt for _, attempt in chain.notes("verify")} == {1}
    assert len(chain.notes("verify")) == 9
    assert len(chain.notes("act")) == 3


async def test_rollout_has_no_reward_when_verify_always_answers_500(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_status": 500})
    chain.write_rows(2)
    result = await run_collection(chain.client(), chain.run_keys(max_attempts=2))
    assert (result.valid, result.invalid) == (0, 2)
    assert chain.results() == []
    assert {row["failure_kind"] for row in chain.results("out_failures.jsonl")} == {"verifier_failed"}
    assert len(chain.notes("act")) == 2


async def test_rollout_starts_over_when_its_attempt_is_fenced(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"fenced": True})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    assert {row["_ng_attempt_index"] for row in chain.results()} == {1}
    assert sorted(attempt for _, attempt in chain.notes("verify")) == [1, 1, 2, 2]


async def test_invalid_verdict_is_final_when_its_kind_cannot_be_retried(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"invalid": "control_run_failed"})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys())
    (failure,) = chain.results("out_failures.jsonl")
    assert failure["failure_kind"] == "control_run_failed"
    assert len(chain.notes("verify")) == 1


async def test_seed_failure_is_typed_and_retried(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"seed_status": 502})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(max_attempts=3))
    (failure,) = chain.results("out_failures.jsonl")
    assert (failure["failure_kind"], failure["failure_stage"]) == ("sandbox_failed", "init")
    assert len(failure["failures"]) == 3
    assert len(chain.notes("abort")) == 3


async def test_act_is_cancelled_and_typed_when_it_passes_its_deadline(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t1"]})
    chain.write_rows(3)
    result = await run_collection(chain.client(), chain.run_keys(run_timeout_s=0.5, max_attempts=1))
    (failure,) = chain.results("out_failures.jsonl")
    assert (result.valid, failure["failure_kind"]) == (2, "deadline")
    assert "run_timeout_s" in failure["failure_reason"]
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("cancelled")) == 1, "the agent sees the cancel")


async def test_agent_that_overrides_run_is_called_once_and_the_environment_tells_the_verdict(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(agent={"overrides_run": True})
    chain.write_rows(3)
    await run_collection(chain.client(), chain.run_keys())
    assert [row["reward"] for row in chain.results()] == [0.5] * 3  # the agent itself claims 1.0
    assert len(chain.notes("rows")) == len(chain.notes("run")) == len(chain.notes("close")) == 3
    assert chain.notes("verify") == chain.notes("act") == []


async def test_limit_of_the_run_that_the_agent_cannot_keep_is_refused_before_anything_runs(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(agent={"limits": ["wall_clock_s"]})
    chain.write_rows(1)
    with pytest.raises(ConfigError, match="max_turns and cpu cannot be kept with agent 'trivial': it keeps wall_cl"):
        await run_collection(chain.client(), chain.run_keys(max_turns=3, cpu=1, wall_clock_s=60))
    assert chain.notes("seed") == []
    assert (await run_collection(chain.client(), chain.run_keys(wall_clock_s=60))).valid == 1


async def test_wall_clock_beyond_the_stages_time_is_refused(make_chain: MakeChain) -> None:
    chain = make_chain()
    with pytest.raises(ConfigError, match=r"wall_clock_s=9000 must be less than run_timeout_s=7200.*raise run_"):
        await run_collection(chain.client(), chain.run_keys(wall_clock_s=9000))


async def test_agent_that_overrides_run_gets_no_reward_when_it_never_asked_for_a_verdict(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(agent={"overrides_run": True}, environment={"no_verdict": True})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    (failure,) = chain.results("out_failures.jsonl")
    assert (failure["reward"], failure["failure_kind"]) == (None, "verifier_failed")


async def test_validation_gives_the_solution_and_labels_rows(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"config": {"row_access": "validation"}})
    chain.write_rows(4)
    await run_collection(chain.client(), chain.run_keys(validation="gold"))
    assert {(row["reward"], row["validation"]) for row in chain.results()} == {(1.0, "gold")}
    await run_collection(chain.client(), chain.run_keys(validation="nothing"))
    assert {(row["reward"], row["validation"]) for row in chain.results()} == {(0.0, "nothing")}


async def test_skipped_verification_is_labelled(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"config": {"skip_verification": True, "skip_verification_reward": 0.25}})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    assert [(row["reward"], row["verification_skipped"]) for row in chain.results()] == [(0.25, True)] * 2
    assert chain.notes("verify") == []


async def test_validation_is_refused_for_an_ordinary_agent(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    with pytest.raises(ConfigError, match="row_access: validation"):
        await run_collection(chain.client(), chain.run_keys(validation="gold"))
    assert chain.notes("seed") == []


async def test_run_refuses_bad_rows_by_line_and_column_before_any_task(make_chain: MakeChain) -> None:
    chain = make_chain()
    path = chain.write_rows(3)
    lines = path.read_text().splitlines()
    lines[1] = '{"responses_create_params": {"input": "x"}, "broken": }'
    lines.append('{"responses_create_params": {"temperature": 1}}')
    lines.append('{"responses_create_params": {"input": "x"}, "agent_ref": {"name": "trivail"}}')
    path.write_text("\n".join(lines))
    with pytest.raises(RowError) as caught:
        await run_collection(chain.client(), chain.run_keys())
    message = str(caught.value)
    assert f"{path}:2:55:" in message
    assert f"{path}:4: 'responses_create_params'" in message
    assert f"{path}:5: unknown agent 'trivail' (did you mean 'trivial'?)" in message
    assert "skip_bad_rows=true" in message
    assert caught.value.details["lines"] == [2, 4, 5]
    assert chain.notes("seed") == []
    result = await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True))
    assert (result.tasks, result.valid) == (2, 2)
    assert [row["_ng_task_index"] for row in sorted(chain.results(), key=lambda r: r["_ng_task_index"])] == [0, 2]


async def test_overrides_reach_the_agent_and_the_result(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(temperature=0.25, max_output_tokens=7))
    params = chain.results()[0]["responses_create_params"]
    assert (params["temperature"], params["max_output_tokens"]) == (0.25, 7)


async def test_second_collector_on_the_same_output_is_refused(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"hang": ["t0"]})
    chain.write_rows(2)
    first = asyncio.create_task(run_collection(chain.client(), chain.run_keys()))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) == 1, "a result")
    with pytest.raises(ConfigError, match="another collector"):
        await run_collection(chain.client(), chain.run_keys(resume=True))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.to_thread(wait_until, lambda: len(chain.notes("cancelled")) == 1, "the agent sees the cancel")
    assert set(chain.notes("seed")) == set(chain.notes("close"))


async def test_cancelled_run_continues_where_it_stopped(make_chain: MakeChain, tmp_path: Path) -> None:
    chain = make_chain(agent={"hang": ["t3"]})
    chain.write_rows(8)
    first = asyncio.create_task(run_collection(chain.client(), chain.run_keys(concurrency=2)))
    await asyncio.to_thread(wait_until, lambda: len(chain.results()) >= 5, "five results")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(ConfigError, match="unfinished run"):
        await run_collection(chain.client(), chain.run_keys())
    kept = {row["_ng_rollout_id"] for row in chain.results()}
    agent = chain.servers["agent"]
    agent.kill()
    agent.restart(hang=[])
    await run_collection(chain.client(), chain.run_keys(resume=True))
    ids = [row["_ng_rollout_id"] for row in chain.results()]
    assert len(ids) == len(set(ids)) == 8
    assert kept <= set(ids)


async def test_resume_is_refused_when_the_run_is_another(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    chain.write_rows(3)
    with pytest.raises(ConfigError, match="overwrite=true"):
        await run_collection(chain.client(), chain.run_keys(resume=True))


async def test_retry_failed_gives_a_new_budget_and_withdraws_the_failure(make_chain: MakeChain) -> None:
    chain = make_chain(environment={"verify_status": 500})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert len(chain.results("out_failures.jsonl")) == 2
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(verify_status=0)
    result = await run_collection(chain.client(), chain.run_keys(resume=True, retry_failed=True))
    assert (result.valid, result.invalid) == (2, 0)
    assert chain.results("out_failures.jsonl") == []
    assert {row["_ng_attempt_index"] for row in chain.results()} == {1}


async def test_finished_run_is_replaced_when_started_again(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(2)
    first = await run_collection(chain.client(), chain.run_keys())
    second = await run_collection(chain.client(), chain.run_keys())
    assert first.run_id != second.run_id
    assert {row["_ng_rollout_id"].split(".")[0] for row in chain.results()} == {second.run_id}


async def test_foreign_output_is_not_overwritten_unasked(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    chain.output.write_text('{"precious": true}\n')
    with pytest.raises(ConfigError, match="overwrite=true"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.output.read_text() == '{"precious": true}\n'


@pytest.mark.parametrize("torn", ['{"_ng_rollout_id": "x', None], ids=["torn last line", "missing lines"])
async def test_resume_mends_the_output_file(make_chain: MakeChain, torn: str | None) -> None:
    chain = make_chain()
    chain.write_rows(4)
    await run_collection(chain.client(), chain.run_keys())
    lines = chain.output.read_text().splitlines(keepends=True)
    chain.output.write_text("".join(lines[:2]) + (torn or ""))
    await run_collection(chain.client(), chain.run_keys(resume=True))
    assert sorted(row["task_id"] for row in chain.results()) == ["t0", "t1", "t2", "t3"]
    assert len(chain.notes("act")) == 4  # nothing was run again


async def test_run_shows_percent_lines_table_and_files(make_chain: MakeChain, tmp_path: Path) -> None:
    chain = make_chain(agent={"crash": {"t1": 99}})
    chain.write_rows(4)
    with (tmp_path / "shown.txt").open("w") as shown:
        console = Console(file=shown, force_terminal=False, width=120)
        await run_collection(chain.client(), chain.run_keys(max_attempts=1), console=console)
    text = (tmp_path / "shown.txt").read_text()
    assert "100% (4/4)  trivial: reward" in text
    assert "agent_crashed" in text
    assert "harness died" in text
    assert "Key metrics for trivial:" in text
    assert "mean/reward: 0.6667" in text
    for path in ("out.jsonl", "out_failures.jsonl", "out_aggregate_metrics.json"):
        assert str(chain.directory / path) in text


def test_run_keys_name_the_nearest_right_key() -> None:
    from nemo_gym.rollouts.config import RolloutRunConfig

    with pytest.raises(ConfigError, match=r"'num_repeat' \(did you mean 'num_repeats'\?\)"):
        RolloutRunConfig.parse({"input": "a.jsonl", "output": "b.jsonl", "num_repeat": 2})
    with pytest.raises(ConfigError, match="output: is required"):
        RolloutRunConfig.parse({"input": "a.jsonl"})
    spelled: dict[str, Any] = {
        "input_jsonl_fpath": "a.jsonl",
        "output_jsonl_fpath": "b.jsonl",
        "num_samples_in_parallel": 9,
        "resume_from_cache": True,
    }
    config = RolloutRunConfig.parse(spelled)
    assert (config.concurrency, config.resume) == (9, True)
