"""Whole runs against real servers over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from rich.console import Console

from nemo_gym.cli.profile import aggregate, profile
from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.rollout import reward_of
from nemo_gym.rollouts import report, results
from nemo_gym.rollouts.collection import run_collection
from nemo_gym.rollouts.interfaces import SameFailureError
from nemo_gym.rollouts.results import RunFiles
from nemo_gym.rollouts.trajectories import trajectories_of_rows
from nemo_gym.view import live
from tests.rollouts.chain import message
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
    (metrics,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert set(metrics) == {"agent_ref", "agent_metrics", "key_metrics", "group_level_metrics"}
    key = metrics["key_metrics"]
    assert (key["mean/reward"], key["pass@1"], key["pass@3"], key["rollouts/invalid"]) == (0.5, 50, 50, 0)
    assert metrics["agent_metrics"]["rollouts/valid"] == 12


async def test_run_closes_every_session_and_environment_it_opened(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t1": 1}})
    chain.write_rows(3)
    await run_collection(chain.client(), chain.run_keys())
    assert set(chain.notes("seed")) == set(chain.notes("close"))
    assert len(chain.notes("seed")) == 4
    assert len(chain.notes("finalize")) == 3
    assert len(chain.notes("abort")) == 1


async def test_what_is_under_way_stands_beside_the_output_until_the_run_ends(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "WRITE_EVERY_S", 0.05)
    chain = make_chain(agent={"hang": ["t1"]})
    chain.write_rows(3)
    path = chain.directory / "out_running.json"
    run = asyncio.create_task(run_collection(chain.client(), chain.run_keys(concurrency=2)))

    def stays() -> bool:
        running = results.read_running(path) or []
        return [(each["task_id"], each["stage"], each["works"]) for each in running] == [("t1", "run", True)]

    await asyncio.to_thread(wait_until, stays, "the one that hangs to be told")
    (told,) = results.read_running(path) or []
    assert (told["agent"], told["server"], told["attempt"]) == ("trivial", "trivial", 1)
    assert told["url"].startswith("http://127.0.0.1:") and told["seconds"] >= told["stage_seconds"]
    files = RunFiles(chain.directory / "out.jsonl")

    def ended() -> bool:
        return (live.progress(files) or {}).get("ended") == 2

    await asyncio.to_thread(wait_until, ended, "the others to end")
    progress = live.progress(files)
    assert progress is not None and progress["collecting"] and progress["per_minute"] > 0
    assert [(each["task_id"], each["stage"]) for each in progress["running"]] == [("t1", "run")]
    with contextlib.closing(sqlite3.connect(files.store, isolation_level=None, timeout=30)) as store:
        store.execute("UPDATE jobs SET finished_at = finished_at - 60 WHERE job_id LIKE '%.0-0'")
    with monkeypatch.context() as patch:  # the system's clock is set back an hour
        earlier = time.time() - 3600.0
        patch.setattr(live.time, "time", lambda: earlier)
        progress = live.progress(files)
    assert progress is not None and 1 < progress["per_minute"] < 3
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not path.exists()
    path.write_text('{"at": 5, "running": []}')
    assert results.read_running(path) is None, "of a run that was killed"


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


@pytest.mark.parametrize("text", ["<p>ok</p>", "[]"])
async def test_run_ends_when_a_grader_and_then_the_finalize_of_the_session_fail(
    make_chain: MakeChain, text: str
) -> None:
    chain = make_chain(environment={"verify_status": 500}, model={"end_text": text})
    chain.write_rows(1)
    async with asyncio.timeout(30):
        await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    (failure,) = chain.results("out_failures.jsonl")
    assert failure["failure_stage"] == "eval"
    assert failure["ng_model_session"]["error"]


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
    (metrics,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert metrics["agent_metrics"]["rollouts/invalid/agent_crashed"] == 1
    assert metrics["key_metrics"]["mean/reward"] == 0.4  # of the five with a verdict


async def test_metrics_of_the_files_are_those_of_the_run(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 99}}, environment={"says": {"t1": {"findings": [{"kind": "k"}]}}})
    chain.write_rows(4, expected=7)
    await run_collection(chain.client(), chain.run_keys(num_repeats=2, max_attempts=1))
    (of_run,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert of_run["agent_metrics"]["rollouts/invalid/agent_crashed"] == 2
    assert await asyncio.to_thread(profile, ["--rollouts", str(chain.output)]) == 0
    (of_files,) = json.loads((chain.directory / "out_agent_metrics.json").read_text())
    assert of_files == {**of_run["agent_metrics"], "agent_ref": {"name": "trivial"}}
    assert of_run["key_metrics"].items() <= of_files.items()
    profiled = chain.results("out_reward_profiling.jsonl")
    samples = [group.pop("sample") for group in profiled]
    assert profiled == [{"agent_ref": {"name": "trivial"}, **group} for group in of_run["group_level_metrics"]]
    inputs = chain.results("out_materialized_inputs.jsonl")
    firsts = [row for row in inputs if row["_ng_rollout_index"] == 0]
    indices = ("_ng_task_index", "_ng_rollout_index")
    assert samples == [{key: row[key] for key in row if key not in indices} for row in firsts]
    assert await asyncio.to_thread(aggregate, [str(chain.output), "-o", str(chain.directory / "both.json")]) == 0
    (aggregated,) = json.loads((chain.directory / "both.json").read_text())
    assert {**aggregated, "agent_ref": of_run["agent_ref"]} == of_run


async def test_number_that_a_verdict_changes_is_a_metric_of_all_rows_and_the_datasets_own_are_none(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(environment={"says": {"t3": {"score": 0.0}}})
    chain.write_rows(4, score=1.0, expected=7)  # as if these rows were the results of an earlier run
    (of_run,) = (await run_collection(chain.client(), chain.run_keys())).aggregates
    assert of_run["key_metrics"]["mean/score"] == 0.75
    assert [group["mean/score"] for group in of_run["group_level_metrics"]] == [1.0, 1.0, 1.0, 0.0]
    assert "mean/expected" not in of_run["agent_metrics"]
    alone = chain.directory / "alone.jsonl"
    alone.write_bytes(chain.output.read_bytes())  # its dataset rows are not beside it
    metrics = chain.directory / "metrics.json"
    assert await asyncio.to_thread(aggregate, [str(chain.output), str(alone), "-o", str(metrics)]) == 0
    (of_files,) = json.loads(metrics.read_text())
    assert of_files["key_metrics"]["mean/score"] == 0.75
    assert "mean/expected" not in of_files["agent_metrics"]


async def test_metrics_of_an_environment_that_fails_are_those_of_every_environment(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SLOW_METRICS_S", 0.05)
    chain = make_chain(environment={"metrics_s": 0.3})
    chain.write_rows(2)
    with structlog.testing.capture_logs() as logged:
        await run_collection(chain.client(), chain.run_keys())
    (entry,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert entry["error"] == "env/aggregate_metrics: compute_metrics raised ValueError"
    assert entry["agent_metrics"]["mean/reward"] == entry["key_metrics"]["mean/reward"] == 0.5
    assert [group["mean/reward"] for group in entry["group_level_metrics"]] == [1, 0]
    told = [line for line in logged if "metrics" in line["event"]]
    assert [line["event"] for line in told] == [
        "waiting for a server's metrics",
        "a server's own metrics are missing",
    ]
    assert told[1]["error"] == entry["error"]


@pytest.mark.parametrize("row_access", ["public", "full"])
async def test_metrics_of_an_agent_are_added_and_it_sees_no_more_of_a_row_than_before(
    make_chain: MakeChain, row_access: str
) -> None:
    chain = make_chain(agent={"metrics": {"steps": 7}, "config": {"row_access": row_access}})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    (entry,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert "error" not in entry
    assert (entry["agent_metrics"]["steps"], entry["agent_metrics"]["mean/reward"]) == (7, 0.5)
    assert entry["key_metrics"]["mean/reward"] == 0.5  # the environment's own stay
    seen = set(entry["agent_metrics"]["keys"])
    assert {"_ng_task_index", "_ng_rollout_index", "reward", "valid"} <= seen
    assert ("expected_answer" in seen) is (row_access == "full")


async def test_metrics_of_an_agent_that_fails_leave_those_of_its_environment(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"metrics": 500})
    chain.write_rows(2)
    await run_collection(chain.client(), chain.run_keys())
    (entry,) = json.loads((chain.directory / "out_aggregate_metrics.json").read_text())
    assert entry["error"] == "trivial/aggregate_metrics: compute_metrics raised KeyError"
    assert entry["agent_metrics"]["mean/reward"] == 0.5


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
    with pytest.raises(ConfigError, match=r"agent 'trivial' cannot enforce max_turns and cpu \(it enforces wall_cl"):
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


@pytest.mark.parametrize(
    "fails",
    [
        {"run_status": 500},
        {"run_says": {"mask_sample": True}},
        {"run_says": {"valid": False, "reward": None}},
        {"run_text": "no JSON"},
        {"run_hangs": True},
    ],
)
async def test_agent_that_fails_when_it_has_its_verdict_buys_no_second_try(
    make_chain: MakeChain, fails: dict[str, Any]
) -> None:
    chain = make_chain(agent={"overrides_run": True, **fails})
    chain.write_rows(1)
    deadline = {"run_timeout_s": 0.5} if "run_hangs" in fails else {}
    await run_collection(chain.client(), chain.run_keys(max_attempts=3, **deadline))
    (row,) = chain.results()
    assert (row["reward"], row["valid"], row["outcome"]) == (0.5, True, "crashed")
    assert chain.notes("run") == [(row["_ng_rollout_id"], 1)]


async def test_run_of_an_agents_own_that_hangs_without_a_verdict_fails_at_its_deadline(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"overrides_run": True, "run_hangs": True}, environment={"no_verdict": True})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(run_timeout_s=0.5, max_attempts=2))
    (failure,) = chain.results("out_failures.jsonl")
    assert (failure["reward"], failure["failure_kind"], len(failure["failures"])) == (None, "deadline", 2)
    assert "0.5 s (run_timeout_s)" in failure["failure_reason"]


@pytest.mark.parametrize("agent", [{}, {"overrides_run": True}])
@pytest.mark.parametrize(
    "declared",
    [
        {"_ng_failure_class": "agent_crashed", "_ng_failure_terminal": True},
        {"_ng_no_persist": True},
        {"mask_sample": True},
        {"mask_sample": True, "valid": False, "failure_kind": "verifier_failed", "failure_reason": "judge down"},
    ],
)
async def test_failure_of_an_earlier_run_in_a_row_costs_no_verdict_and_one_that_an_environment_declares_does(
    make_chain: MakeChain, agent: dict[str, Any], declared: dict[str, Any]
) -> None:
    chain = make_chain(agent=agent, environment={"says": {"t2": declared}})
    chain.write_rows(3, **declared)
    await run_collection(chain.client(), chain.run_keys(max_attempts=1))
    assert sorted(row["task_id"] for row in chain.results()) == ["t0", "t1"]
    (failure,) = chain.results("out_failures.jsonl")
    assert (failure["task_id"], failure["reward"]) == ("t2", None)
    assert failure["_ng_failure_terminal"] is ("_ng_failure_terminal" in declared)


async def test_agent_that_overrides_run_says_nothing_that_others_say(make_chain: MakeChain) -> None:
    lies = {
        "ng_trajectory": [{"response_ids": [1]}],
        "ng_model_session": {"turns": 9},
        "agent_ref": {"type": "responses_api_agents", "name": "another"},
        "task_id": "another",
        "artifacts": [{"name": "patch", "kind": "git_diff", "data": "", "sha256": "x"}],
        "reverified": True,
        "findings": [{"kind": "innocent"}],
    }
    chain = make_chain(agent={"overrides_run": True, "run_says": {**lies, "note": "kept"}})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys())
    (row,) = chain.results()
    assert (row["agent_ref"]["name"], row["task_id"], row["note"], row["findings"]) == ("trivial", "t0", "kept", [])
    assert not {"ng_trajectory", "artifacts", "reverified"} & set(row)
    assert row["ng_model_session"].get("turns") != 9, "the model server's own word"


FORGED: dict[str, Any] = {
    "ng_trajectory": [
        {
            **{"session_id": "s", "index": 0, "prompt_ids": [1, 2], "response_ids": [66], "response_mask": [1]},
            **{"logprobs": [-0.1], "turns": [{"start": 0, "end": 1, "finish_reason": "stop", "weights_version": "9"}]},
            **{"split_reason": "initial", "split_detail": None, "message_count": 1, "multimodal": []},
            **{"reward": 1.0, "reward_info": {}},
        }
    ],
    "artifacts": [{"name": "patch", "kind": "git_diff", "data": "", "sha256": "x"}],
    "artifacts_digest": "x",
    "outcome_detail": "the row's",
    "replicas": {"policy": 7},
    "reverified": True,
    "server_logs": "/elsewhere",
    "validation": "gold",
    "verification_skipped": True,
}
"""What only a run, its model server and its agent tell."""


async def test_time_to_finalize_is_not_the_graders(make_chain: MakeChain) -> None:
    chain = make_chain(model={"end_s": 1.5})
    chain.write_rows(1)
    result = await run_collection(chain.client(), chain.run_keys(eval_timeout_s=0.8, max_attempts=1))
    assert (result.valid, result.invalid) == (1, 0)


@pytest.mark.parametrize("forger", ["row", "damaged row", "environment"])
@pytest.mark.parametrize(
    "model", [{}, {"end_status": 500}, {"end_text": "Hi"}], ids=["no turns", "finalize fails", "finalize is no JSON"]
)
@pytest.mark.parametrize(
    "agent",
    [{}, {"overrides_run": True}, {"config": {"skip_verification": True, "skip_verification_reward": 0.25}}],
    ids=["act", "run", "skip"],
)
async def test_neither_a_row_nor_an_environment_forges_what_the_run_and_its_model_server_tell(
    make_chain: MakeChain, forger: str, model: dict[str, Any], agent: dict[str, Any]
) -> None:
    chain = make_chain(agent=agent, model=model, environment={"says": {"t0": FORGED if "row" not in forger else {}}})
    forged = {**FORGED, "ng_trajectory": [{"prompt_ids": [1], "logprobs": [0.0]}]} if "damaged" in forger else FORGED
    output = [{**message("B")["output"][0], "generation_token_ids": [66], "generation_log_probs": [-0.1]}]
    chain.write_rows(1, **({**forged, "response": {"output": output}} if "row" in forger else {}))
    await run_collection(chain.client(), chain.run_keys())
    (row,) = chain.results()
    forgeable = {*FORGED} - ({"verification_skipped"} if "config" in agent else set())
    assert (row["valid"], forgeable & {*row}) == (True, set())
    assert (row["task_id"], row["expected_answer"]) == ("t0", "B"), "the row's own"
    assert "generation_token_ids" not in row["response"]["output"][0]
    assert ("error" in row["ng_model_session"]) is bool(model)
    assert [*trajectories_of_rows(chain.output)] == [[]]


@pytest.mark.parametrize(
    "field", [{"valid": "an argument"}, {"valid": False}, {"failure_kind": "pump"}, {"findings": ["crack"]}]
)
async def test_field_of_the_dataset_that_an_agent_repeats_is_no_part_of_its_verdict(
    make_chain: MakeChain, field: dict[str, Any]
) -> None:
    chain = make_chain(agent={"overrides_run": True, "config": {"resources_server": None}})
    chain.write_rows(1, **field)
    assert (await run_collection(chain.client(), chain.run_keys())).valid == 1
    (row,) = chain.results()
    assert (row["reward"], row["valid"], row["failure_kind"], row["findings"]) == (1.0, True, None, [])


async def test_agent_without_an_environment_returns_its_row_and_no_trajectory_of_it(make_chain: MakeChain) -> None:
    chain = make_chain(
        agent={"overrides_run": True, "run_says": {"note": "kept"}, "config": {"resources_server": None}}
    )
    chain.write_rows(1, **FORGED)
    await run_collection(chain.client(), chain.run_keys())
    (row,) = chain.results()
    assert (row["reward"], row["reward_source"], row["note"]) == (1.0, "agent", "kept")
    assert (row["agent_ref"]["name"], row["task_id"]) == ("trivial", "t0")
    assert not (FORGED.keys() - {"outcome_detail"}) & {*row}


@pytest.mark.parametrize(
    ("says", "key"),
    [
        ({"observations": {"x": "a" * 300_000}}, "larger than 100000 bytes"),
        ({"observations": {"x": [[]] * 2000}}, "more than 1000 JSON values"),
    ],
)
async def test_answer_of_an_agent_server_has_a_bound(
    make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch, says: dict[str, Any], key: str
) -> None:
    monkeypatch.setattr("nemo_gym.http.peers.MAX_AGENT_REPLY_BYTES", 100_000)
    monkeypatch.setattr("nemo_gym.http.peers.MAX_AGENT_REPLY_VALUES", 1000)
    chain = make_chain(agent={"says": says, "compressed": True})
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(max_attempts=2))
    (failure,) = chain.results("out_failures.jsonl")
    assert (failure["failure_kind"], failure["_ng_attempt_index"]) == ("agent_crashed", 0)
    assert key in failure["failure_reason"]


async def test_validation_gives_the_solution_and_labels_rows(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"config": {"row_access": "validation"}})
    chain.write_rows(4)
    await run_collection(chain.client(), chain.run_keys(validation="gold"))
    assert {(row["reward"], row["validation"]) for row in chain.results()} == {(1.0, "gold")}
    await run_collection(chain.client(), chain.run_keys(validation="nothing", overwrite=True))
    assert {(row["reward"], row["validation"]) for row in chain.results()} == {(0.0, "nothing")}


async def test_model_session_enforces_the_rows_sampling_for_an_agent_that_asks_for_it(make_chain: MakeChain) -> None:
    sampling = {"temperature": 0.0, "top_p": 0.5}
    chain = make_chain(agent={"enforce_row_sampling": True}, model={"sampling": sampling})
    chain.write_rows(1)
    params = {"temperature": 0.0, "truncation": "disabled"}
    await run_collection(chain.client(), chain.run_keys(responses_create_params=params, top_p=0.5))
    assert [row["reward"] for row in chain.results()] == [1.0]


@pytest.mark.parametrize("agent", [{}, {"overrides_run": True}], ids=["act", "run"])
async def test_skipped_verification_is_labelled(make_chain: MakeChain, agent: dict[str, Any]) -> None:
    skips = {"skip_verification": True, "skip_verification_reward": 0.25}
    chain = make_chain(agent={**agent, "config": skips}, environment={"no_verdict": True})
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


@pytest.mark.parametrize("key", ["_ng_task_index", "_ng_rollout_index"])
async def test_index_that_no_store_holds_is_refused_by_line_and_can_be_left_out(
    make_chain: MakeChain, key: str
) -> None:
    chain = make_chain()
    path = chain.write_rows(2)
    row = json.loads(path.read_text().splitlines()[0])
    largest, beyond, far_beyond = (json.dumps({**row, key: index}) for index in (2**31 - 1, 2**31, 2**63))
    path.write_text("\n".join((largest, beyond, far_beyond)))
    with pytest.raises(RowError, match=rf"in\.jsonl:3: '{key}' must be a whole number from 0 to 2147483647") as caught:
        await run_collection(chain.client(), chain.run_keys())
    assert caught.value.details["lines"] == [2, 3]
    result = await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True))
    assert (result.valid, [row[key] for row in chain.results()]) == (1, [2**31 - 1])


@pytest.mark.parametrize(
    "params",
    [{"input": ""}, {"input": " \n"}, {"input": []}, {"input": [{"role": "user", "content": " "}]}, None],
    ids=["empty", "blank", "no message", "blank message", "no parameters"],
)
async def test_rows_without_a_prompt_are_refused_by_line_before_any_task(make_chain: MakeChain, params: Any) -> None:
    chain = make_chain()
    path = chain.write_rows(2)
    asks_nothing = {"expected_answer": "B", **({"responses_create_params": params} if params else {})}
    path.write_text(path.read_text() + json.dumps(asks_nothing) + "\n")
    with pytest.raises(RowError, match=r"in\.jsonl:3: the row has no prompt"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.notes("seed") == []
    with structlog.testing.capture_logs() as logged:
        result = await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True))
    assert (result.tasks, result.rollouts, result.valid, result.invalid) == (2, 2, 2, 0)
    (told,) = [line["error"] for line in logged if line["event"] == "row left out"]
    assert told.startswith(f"{path}:3: the row has no prompt")
    text = await shown_by(chain, skip_bad_rows=True, overwrite=True)
    assert f"Left out: 1 row of {path}\n  {path}:3: the row has no prompt" in text
    assert (len(chain.results("out_materialized_inputs.jsonl")), len(chain.notes("seed"))) == (2, 4)
    assert (await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True))).seconds is None


async def test_rows_whose_prompt_the_run_blanks_are_refused(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    with pytest.raises(RowError, match=r"in\.jsonl:1: the row has no prompt"):
        await run_collection(chain.client(), chain.run_keys(responses_create_params={"input": " "}))
    assert chain.notes("seed") == []


async def test_rows_whose_environment_words_the_prompt_are_run_and_those_it_cannot_are_refused(
    make_chain: MakeChain,
) -> None:
    chain = make_chain(environment={"words_prompts": True})
    path = chain.directory / "in.jsonl"
    path.write_text('{"question": "A or B?", "expected_answer": "B"}\n{"expected_answer": "B"}\n')
    with pytest.raises(RowError, match=r"in\.jsonl:2: no question"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.notes("seed") == []
    result = await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True, num_repeats=2))
    assert (result.tasks, result.valid, result.invalid) == (1, 2, 0)
    assert {row["_ng_task_index"] for row in chain.results()} == {0}
    path.write_text('{"expected_answer": "B"}\n')
    with pytest.raises(ConfigError, match="holds no usable rows"):
        await run_collection(chain.client(), chain.run_keys(skip_bad_rows=True, overwrite=True))
    assert len(chain.results()) == 2


async def test_overrides_reach_the_agent_and_the_result(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.write_rows(1)
    await run_collection(chain.client(), chain.run_keys(temperature=0.25, max_output_tokens=7))
    params = chain.results()[0]["responses_create_params"]
    assert (params["temperature"], params["max_output_tokens"]) == (0.25, 7)


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


async def shown_by(chain: Chain, **keys: Any) -> str:
    shown = io.StringIO()
    await run_collection(chain.client(), chain.run_keys(**keys), console=Console(file=shown, width=160))
    return shown.getvalue()


async def test_table_puts_what_needs_looking_at_first_and_names_every_reason_however_long_the_run(
    make_chain: MakeChain,
) -> None:
    finding = {"reward": 0.0, "findings": [{"kind": "forged_markers", "detail": "x"}]}
    says = {"t70": finding, "t74": {"reward": 0.0, "reward_reason": "2 of 4 tests fail"}}
    crash = {"t79": 9, "t73": 9}
    chain = make_chain(environment={"says": says}, agent={"crash": crash})
    chain.write_rows(80, expected_answer="B")
    text = await shown_by(chain, max_attempts=1)
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│ t")]
    assert rows[:6] == ["t73", "t79", "t70", "t74", "t0", "t1"]
    assert "… and 20 more in the output file" in text
    assert "  2 × no verdict, agent_crashed: harness died (t73 #0, t79 #0)" in text
    assert "  1 × findings forged_markers (t70 #0)" in text
    assert "  1 × reward 0: 2 of 4 tests fail (t74 #0)" in text
    assert [line for line in text.splitlines() if "invalid" in line] == ["  rollouts/invalid: 2"]


async def test_reasons_that_differ_in_numbers_and_names_only_are_one() -> None:
    from nemo_gym.rollouts.result_rows import same_way

    first = same_way("deadline", "t1: took 12.5 s at 0x7f3a (box 8f3ac9d01e22)", ["t1-0"])
    assert first == same_way("deadline", "t22: took 98.25 s at 0x99 (box 77aa01bb3c4d5e)", []).replace("t22", "t1")
    images = ("no image for 'A__b-1' (ng.a_b-1.88f4e962f41a)", "no image for 'A__c-2' (ng.a_c-2.93bdceb52c54)")
    assert same_way("sandbox_failed", images[0], ["A__b-1"]) == same_way("sandbox_failed", images[1], ["A__c-2"])
    assert same_way("model_refused", "answered 401") != same_way("model_refused", "answered 404")


async def test_metrics_have_one_count_of_invalid_pass_at_k_the_models_tokens_and_no_private_number(
    make_chain: MakeChain,
) -> None:
    usage = {"input_tokens": 26, "output_tokens": 55, "total_tokens": 81}
    chain = make_chain(model={"usage": usage}, agent={"crash": {"t1": 9}}, environment={"says": {"t2": {"score": 7}}})
    chain.write_rows(4, year=1999, expected_answer=4)
    says = {name: {"reward": float(name in ("t0", "t3")), "score": 7} for name in ("t0", "t2", "t3")}
    environment = chain.servers["environment"]
    environment.kill()
    environment.restart(says=says)
    result = await run_collection(chain.client(), chain.run_keys(num_repeats=2, max_attempts=1))
    (metrics,) = result.aggregates
    key, agent = metrics["key_metrics"], metrics["agent_metrics"]
    assert key["mean/input_tokens"] == 26 and key["mean/output_tokens"] == 55
    assert key["mean/score"] == 7
    assert not [name for name in (*key, *agent) if "year" in name or "expected_answer" in name]
    assert [name for name in key if "invalid" in name] == ["rollouts/invalid"]
    assert key["rollouts/invalid"] == 2 and "invalid/count" not in agent
    assert (key["pass@1"], key["pass@2"]) == (pytest.approx(200 / 3), pytest.approx(200 / 3))
    assert key["pass@1/std_err"] == pytest.approx(100 / 3)
    assert (key["tasks/total"], key["tasks/solved"], agent["tasks/without_verdict"]) == (4, 2, 1)
    by_task = {group["task_id"]: group for group in metrics["group_level_metrics"]}
    assert (by_task["t1"]["num_rollouts"], by_task["t1"]["invalid/count"]) == (2, 2)
    assert "mean/reward" not in by_task["t1"] and by_task["t0"]["mean/reward"] == 1


@pytest.mark.parametrize(("chars", "kept"), [(None, "x" * 65533 + "end"), (3, "end"), (0, None)])
async def test_log_of_each_evaluation_is_kept_in_a_file_of_bounded_size(
    make_chain: MakeChain, chars: int | None, kept: str | None
) -> None:
    says = {"t0": {"evaluation_log": "x" * 100_000 + "end"}}
    chain = make_chain(environment={"says": says})
    chain.write_rows(2)
    keys = {} if chars is None else {"evaluation_log_chars": chars}
    await run_collection(chain.client(), chain.run_keys(**keys))
    rows = {row["task_id"]: row for row in chain.results()}
    assert "evaluation_log" not in rows["t1"]
    if kept is None:
        assert "evaluation_log" not in rows["t0"] and not (chain.directory / "out_logs").exists()
    else:
        assert rows["t0"]["evaluation_log"] == "out_logs/0-0-t0.log"
        assert (chain.directory / rows["t0"]["evaluation_log"]).read_text() == kept


async def test_failure_and_table_name_the_log_of_an_evaluation_without_a_verdict(make_chain: MakeChain) -> None:
    masked = {"reward": None, "valid": False, "failure_kind": "control_run_failed", "failure_reason": "gold fails too"}
    chain = make_chain(environment={"says": {"t0": {**masked, "evaluation_log": "E  assert 1 == 2"}, "t1": masked}})
    chain.write_rows(3, evaluation_log="the row's own")
    text = await shown_by(chain)
    rows = {row["task_id"]: row for row in chain.results("out_failures.jsonl")}
    assert (rows["t0"]["evaluation_log"], "evaluation_log" in rows["t1"]) == ("out_logs/0-0-t0.log", False)
    assert (chain.directory / "out_logs/0-0-t0.log").read_text() == "E  assert 1 == 2"
    log_file = chain.directory / "out_logs/0-0-t0.log"
    assert f"2 × no verdict, control_run_failed: gold fails too (t0 #0, t1 #0; log: {log_file})" in text
    assert "the row's own" not in text


async def test_first_of_many_failures_says_why_it_is_tried_again(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {"t0": 1, "t1": 1, "t2": 1}})
    chain.write_rows(3)
    with structlog.testing.capture_logs() as logged:
        await run_collection(chain.client(), chain.run_keys())
    told = [line["reason"] for line in logged if line["event"] == "attempt failed, trying again"]
    assert sorted(told) == ["harness died", "the same as before", "the same as before"]


async def test_run_stops_with_its_reason_when_attempt_after_attempt_fails_the_same_way(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"outcome": "model_refused", "detail": "the engine answered 401"})
    chain.write_rows(60)
    with pytest.raises(SameFailureError, match=r"20 attempts in a row .*model_refused: the engine answered 401"):
        await run_collection(chain.client(), chain.run_keys(concurrency=2, max_attempts=1))
    assert 20 <= len(chain.notes("failed")) <= 22
    assert set(chain.notes("seed")) == set(chain.notes("close"))
    agent = chain.servers["agent"]
    agent.kill()
    agent.restart(outcome=None)
    result = await run_collection(chain.client(), chain.run_keys(retry_failed=True))
    assert (result.valid, result.invalid) == (60, 0)


async def test_run_goes_on_when_failures_are_of_single_rows_or_the_stop_is_switched_off(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"crash": {f"t{number}": 9 for number in range(40) if number % 3}})
    chain.write_rows(40)
    result = await run_collection(chain.client(), chain.run_keys(max_attempts=1, concurrency=1))
    assert result.invalid == 26
    agent = chain.servers["agent"]
    agent.kill()
    agent.restart(outcome="crashed", detail="no")
    keys = chain.run_keys(max_attempts=1, overwrite=True, stop_after_same_failure=0)
    assert (await run_collection(chain.client(), keys)).invalid == 40


async def test_engines_are_asked_before_the_first_rollout(make_chain: MakeChain) -> None:
    check = {"engine": "e", "problem": None, "unreachable": None, "context_tokens": 4096, "warning": None}
    chain = make_chain(model={"preflight": [check, {**check, "problem": "engine 'f' refused its API key (401)"}]})
    chain.write_rows(2)
    with pytest.raises(ConfigError, match=r"model server 'policy': engine 'f' refused its API key"):
        await run_collection(chain.client(), chain.run_keys())
    assert chain.notes("seed") == []
    model = chain.servers["model"]
    model.kill()
    model.restart(preflight=[check, {**check, "engine": "f", "unreachable": "engine 'f' cannot be reached"}])
    text = await shown_by(chain)
    assert "policy: engine 'e' has a context of 4096 tokens" in text
    assert "engine 'f' cannot be reached; the run starts anyway" in text


async def test_run_warns_when_first_requests_do_not_fit_the_context(make_chain: MakeChain) -> None:
    chain = make_chain(agent={"outcome": "context_exceeded", "detail": "4096 tokens"})
    chain.write_rows(3)
    text = await shown_by(chain)
    assert "Warning: the first request of 3 of 3 rollouts does not fit the model's context." in text
    assert "  3 × no verdict, context_exceeded: 4096 tokens" in text
    assert len(chain.notes("failed")) == 3  # it would not fit the next time either


def test_run_keys_name_the_nearest_right_key() -> None:
    from nemo_gym.config.run import RolloutRunConfig

    with pytest.raises(ConfigError, match=r"'num_repeat' \(did you mean 'num_repeats'\?\)"):
        RolloutRunConfig.parse({"input": "a.jsonl", "output": "b.jsonl", "num_repeat": 2})
    with pytest.raises(ConfigError, match="output is required"):
        RolloutRunConfig.parse({"input": "a.jsonl"})
    spelled: dict[str, Any] = {
        "input_jsonl_fpath": "a.jsonl",
        "output_jsonl_fpath": "b.jsonl",
        "num_samples_in_parallel": 9,
        "resume_from_cache": True,
    }
    config = RolloutRunConfig.parse(spelled)
    assert (config.concurrency, config.resume) == (9, True)
