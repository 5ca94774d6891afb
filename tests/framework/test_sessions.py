"""Prompts in, scored trajectories out: the gates of the published framework, over real gateways."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from nemo_gym.contract.errors import RowError, ServerError
from nemo_gym.framework import AllSessionsFailedError, SessionHandle
from nemo_gym.framework.batch import PromptSample
from nemo_gym.framework.verl import AgentFrameworkWorker
from nemo_gym.gateway.tokens.trajectories import Trajectory, read_jsonl
from tests.framework import runners
from tests.framework.conftest import Stage, prompts
from tests.servers.stack import until

RUNNERS = "tests.framework.runners"


async def test_each_session_is_written_with_the_published_columns(stage: Stage) -> None:
    await stage.start()
    columns = {
        "data_source": ["math", "code"],
        "reward_model": [{"ground_truth": "4"}, {"ground_truth": "5"}],
        "extra_info": [{"index": 0}, {"index": 1}],
        "tools_kwargs": [{"a": 1}, None],
        "agent_name": "calls",
    }
    await stage.framework().generate_sequences(prompts(2, **columns))
    assert sorted(stage.sink.rows) == ["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"]
    assert {*stage.sink.partitions.values()} == {"train"}
    assert [stage.sink.status(uid) for uid in ("u0", "u1")] == [["running", "finished"]] * 2
    row = stage.sink.rows["u1_1_0"]
    fields = row.fields
    prompt, response = len(fields["prompts"]), len(fields["responses"])
    assert prompt > 0 and response > 0
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "loss_mask"):
        assert fields[name].dtype == np.int64, name
    assert fields["input_ids"].tolist() == [*fields["prompts"], *fields["responses"]]
    assert fields["attention_mask"].tolist() == [1] * (prompt + response)
    assert fields["position_ids"].tolist() == [*range(prompt + response)]
    assert fields["response_mask"].tolist() == fields["loss_mask"].tolist() == [1] * response
    assert fields["rm_scores"].dtype == fields["rollout_log_probs"].dtype == np.float32
    assert fields["rm_scores"].tolist() == [0.0] * (response - 1) + [1.0]
    sampled = next(call for call in stage.engine.calls if call.token_ids == tuple(fields["responses"].tolist()))
    assert fields["rollout_log_probs"].tolist() == pytest.approx(list(sampled.logprobs))
    assert fields["num_turns"] == 3
    assert (fields["session_id"], fields["global_steps"], fields["uid"]) == (1, 3, "u1")
    assert fields["raw_prompt"] == [{"role": "user", "content": "prompt 1"}]
    assert (fields["data_source"], fields["extra_info"]) == ("code", {"index": 1})
    assert fields["reward_model"] == {"ground_truth": "5"}
    assert fields["extra_fields"] == {"reward_extra_info": {}, "min_global_steps": 3, "max_global_steps": 3}
    assert row.tag == {
        "status": "success",
        "uid": "u1",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": 3,
        "min_global_steps": 3,
        "max_global_steps": 3,
        "reward_source": "runner",
    }
    assert stage.live_sessions() == []


async def test_runner_gets_the_prompt_and_the_tools_of_its_sample_and_not_the_agent_name(stage: Stage) -> None:
    await stage.start()
    batch = prompts(2, tools_kwargs=[{"a": 1}, None], agent_name=["calls", "calls"])
    runner = {"runner_fqn": f"{RUNNERS}:calls", "runner_kwargs": {"flavour": "x"}}
    await stage.framework({"calls": runner}, rollout={"n": 1}).generate_sequences(batch)
    first, second = sorted(runners.calls_seen, key=lambda call: call["sample_index"])
    assert first["tools_kwargs"] == {"a": 1}
    assert "tools_kwargs" not in second and "agent_name" not in first
    assert (first["flavour"], first["raw_prompt"]) == ("x", [{"role": "user", "content": "prompt 0"}])
    handle: SessionHandle = first["session"]
    assert handle.base_url.endswith("/v1") and handle.complete_url.endswith("/complete")
    assert "token" not in repr(handle)


async def test_samples_go_to_the_runner_that_agent_name_names(stage: Stage) -> None:
    await stage.start()
    both = {
        "one": {"runner_fqn": f"{RUNNERS}.Counting", "runner_kwargs": {"label": "one", "turns": 1}},
        "two": {"runner_fqn": f"{RUNNERS}.Counting", "runner_kwargs": {"label": "two", "turns": 2}},
    }
    batch = prompts(5, agent_name=["two", "one", "three", 7, None])
    await stage.framework(both, rollout={"n": 1}).generate_sequences(batch)
    seen = {call["sample_index"]: call["label"] for call in runners.calls_seen}
    assert seen == {0: "two", 1: "one"}
    assert [stage.sink.status(f"u{number}")[-1] for number in range(5)] == ["finished"] * 2 + ["failure"] * 3
    summary = await stage.framework(both, rollout={"n": 1}).run_batch(batch)
    told = "\n".join(summary.reasons)
    assert "agent_name 'three' is no runner" in told
    assert "agent_name must be a string, got 7" in told
    assert "agent_name is missing for uid 'u4'" in told


async def test_failed_session_aborts_itself_and_no_sibling(stage: Stage) -> None:
    await stage.start()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.fails_once_per_prompt"}}, rollout={"n": 3})
    summary = await framework.run_batch(prompts(2))
    assert (summary.sessions, summary.failed_sessions, summary.trajectories) == (6, 2, 4)
    assert {key.split("_")[0] for key in stage.sink.rows} == {"u0", "u1"}
    assert [stage.sink.tags[uid][-1] for uid in ("u0", "u1")] == [{"status": "finished", "failed_sessions": 1}] * 2
    assert stage.live_sessions() == []


async def test_prompt_fails_when_all_its_sessions_do_and_others_are_kept(stage: Stage) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.fails_for", "runner_kwargs": {"failing": [1]}}
    await stage.framework({"calls": runner}).generate_sequences(prompts(3))
    assert [stage.sink.status(f"u{number}")[-1] for number in range(3)] == ["finished", "failure", "finished"]
    assert stage.sink.rows["u0_0_0"].fields["reward_extra_info"] == {"acc": 0.5}
    failing = {"runner_fqn": f"{RUNNERS}.fails_for", "runner_kwargs": {"failing": [0, 1]}}
    with pytest.raises(AllSessionsFailedError, match=r"all 4 sessions of 2 prompts failed.*the agent broke"):
        await stage.framework({"calls": failing}).generate_sequences(prompts(2))


async def test_validation_has_its_own_partition_sessions_and_sampling(stage: Stage) -> None:
    await stage.start()
    rollout = {"n": 3, "val_kwargs": {"n": 2, "temperature": 0.0, "top_p": 1.0, "top_k": -1}, "response_length": 9}
    batch = prompts(1, validate=True)
    del batch["global_steps"]
    await stage.framework(rollout=rollout).generate_sequences(batch)
    assert sorted(stage.sink.partitions.items()) == [("u0_0_0", "val"), ("u0_1_0", "val")]
    asked = stage.engine.calls[0].body
    assert (asked["temperature"], asked["top_p"], asked["max_tokens"]) == (0.0, 1.0, 9)


@pytest.mark.parametrize(("validate", "partition"), [(True, "val"), (False, "train")])
async def test_prompts_of_a_refused_batch_fail_in_the_partition_that_the_trainer_polls(
    stage: Stage, validate: bool, partition: str
) -> None:
    await stage.start()
    with pytest.raises(RowError, match="__rollout_n__"):
        await stage.framework().run_batch(prompts(1, validate=validate, __rollout_n__=[0]))
    assert (stage.sink.tagged, stage.sink.status("u0")) == ({(partition, "u0")}, ["failure"])


async def test_batch_runs_although_consumed_trajectories_cannot_be_removed(stage: Stage) -> None:
    class FullSink:
        async def forget_consumed(self) -> None:
            raise ServerError("archive cannot be written: the disk is full")

    await stage.start()
    worker: Any = AgentFrameworkWorker({}, None, [])  # type: ignore[arg-type]
    worker._sink, worker._framework = FullSink(), stage.framework()
    await worker.generate_sequences(prompts(1))
    assert stage.sink.status("u0")[-1] == "finished"


async def test_sampling_of_the_trainer_holds_whatever_a_runner_asks_for(stage: Stage) -> None:
    await stage.start()
    framework = stage.framework({"own": {"runner_fqn": f"{RUNNERS}.asks_for_its_own"}}, rollout={"n": 1})
    await framework.generate_sequences(prompts(1))
    asked = stage.engine.calls[-1].body
    assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.9, 0.8, 7)
    await framework.generate_sequences(prompts(1, __do_sample__=[False]))
    asked = stage.engine.calls[-1].body
    assert (asked["temperature"], asked["top_p"]) == (0.0, 1.0)


async def test_score_of_a_session_goes_to_all_its_trajectories(stage: Stage) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.two_conversations"}
    await stage.framework({"calls": runner}, rollout={"n": 1}).generate_sequences(prompts(1))
    assert sorted(stage.sink.rows) == ["u0_0_0", "u0_0_1"]
    for row in stage.sink.rows.values():
        assert row.fields["rm_scores"][-1] == 0.25
        assert row.fields["rm_scores"][:-1].sum() == 0
    assert [row.fields["num_turns"] for _, row in sorted(stage.sink.rows.items())] == [3, 5]
    stage.sink.rows.clear()
    longest = {**runner, "trajectory_selection": "longest"}
    await stage.framework({"calls": longest}, rollout={"n": 1}).generate_sequences(prompts(1))
    (row,) = stage.sink.rows.values()
    assert row.fields["num_turns"] == 5


async def test_session_without_a_reward_is_no_success_with_a_reward_of_0(stage: Stage) -> None:
    await stage.start()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.posts_nothing"}}, rollout={"n": 1})
    summary = await framework.run_batch(prompts(1))
    assert (summary.trajectories, summary.failed_sessions) == (0, 1)
    assert "NoRewardError" in summary.reasons[0]
    assert (stage.sink.rows, stage.sink.status("u0")) == ({}, ["running", "failure"])


async def test_reward_worker_scores_the_final_trajectory_of_sessions_that_posted_nothing(stage: Stage) -> None:
    await stage.start()
    asked: list[tuple[Trajectory, PromptSample, dict[str, Any]]] = []

    async def scorer(trajectory: Trajectory, sample: PromptSample, info: Any) -> tuple[float, dict[str, Any]]:
        asked.append((trajectory, sample, dict(info)))
        return 0.75, {"acc": 1}

    parts = {"scorer": scorer}
    silent = {"calls": {"runner_fqn": f"{RUNNERS}.two_conversations", "runner_kwargs": {"reward_info": {"steps": 2}}}}
    await stage.framework(silent, rollout={"n": 1}, parts=parts).generate_sequences(prompts(1))
    ((trajectory, sample, info),) = asked
    assert (trajectory.index, sample.uid, info) == (1, "u0", {"steps": 2})
    for row in stage.sink.rows.values():
        assert row.fields["rm_scores"][-1] == 0.75
        assert row.fields["reward_extra_info"] == {"acc": 1}
        assert row.tag["reward_source"] == "reward_worker"
    await stage.framework(rollout={"n": 1}, parts=parts).generate_sequences(prompts(1))
    assert len(asked) == 1  # a posted reward wins
    off = stage.framework(silent, rollout={"n": 1}, parts=parts, use_reward_loop_worker=False)
    assert (await off.run_batch(prompts(1))).trajectories == 0


@pytest.mark.parametrize(("info", "reward"), [({"reward": 0.5, "score": 1}, 0.5), ({"score": 2}, 2.0)])
async def test_reward_and_score_are_both_read(stage: Stage, info: dict[str, Any], reward: float) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.calls", "runner_kwargs": {"reward_info": info}}
    await stage.framework({"calls": runner}, rollout={"n": 1}).generate_sequences(prompts(1))
    (row,) = stage.sink.rows.values()
    assert row.fields["rm_scores"][-1] == reward


async def test_posted_reward_that_is_no_number_fails_its_session(stage: Stage) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.calls", "runner_kwargs": {"reward_info": {"score": "high"}}}
    summary = await stage.framework({"calls": runner}, rollout={"n": 1}).run_batch(prompts(1))
    assert summary.trajectories == 0
    assert "reward_info.score must be a finite number, got 'high'" in summary.reasons[0]


@pytest.mark.parametrize(
    ("said", "masking", "trained"), [(False, True, False), (False, False, True), (None, True, True)]
)
async def test_unfinished_episode_is_masked_where_that_is_asked_for_and_keeps_its_reward(
    stage: Stage, said: bool | None, masking: bool, trained: bool
) -> None:
    await stage.start()
    info = {"reward": 1.0} if said is None else {"reward": 1.0, "finished": said}
    runner = {"runner_fqn": f"{RUNNERS}.calls", "runner_kwargs": {"reward_info": info}}
    framework = stage.framework({"calls": runner}, rollout={"n": 1}, mask_unfinished_episode=masking)
    summary = await framework.run_batch(prompts(1))
    assert summary.unfinished_sessions == (said is False)
    (row,) = stage.sink.rows.values()
    assert bool(row.fields["loss_mask"].any()) == bool(row.fields["response_mask"].any()) == trained
    assert row.fields["rm_scores"][-1] == 1.0
    assert row.tag.get("masked", False) == (not trained)
    assert "finished" not in row.fields["reward_extra_info"]


async def test_session_without_a_model_call_fails(stage: Stage) -> None:
    await stage.start()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.says_nothing"}}, rollout={"n": 1})
    summary = await framework.run_batch(prompts(1))
    assert "without a single model call" in summary.reasons[0]


async def test_cap_holds_one_runner_and_no_other(stage: Stage) -> None:
    await stage.start()
    both = {
        "capped": {
            "runner_fqn": f"{RUNNERS}.Counting",
            "runner_kwargs": {"label": "capped"},
            "max_concurrent_sessions": 2,
        },
        "free": {
            "runner_fqn": f"{RUNNERS}.Counting",
            "runner_kwargs": {"label": "free"},
            "max_concurrent_sessions": 0,
        },
    }
    stage.engine.gate.clear()  # the first calls wait, so all sessions that may run are under way together
    batch = prompts(8, agent_name=["capped", "free"] * 4)
    running = asyncio.create_task(stage.framework(both).run_batch(batch))
    await until(lambda: runners.in_flight.get("free", 0) == 8 and runners.in_flight.get("capped", 0) == 2)
    stage.engine.gate.set()
    assert (await running).trajectories > 0
    assert runners.most == {"capped": 2, "free": 8}


async def test_runner_that_blocks_the_loop_works(stage: Stage) -> None:
    await stage.start()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.blocks"}}, rollout={"n": 3})
    summary = await framework.run_batch(prompts(2))
    assert (summary.trajectories, summary.failed_sessions) == (6, 0)
    assert {row.fields["rm_scores"][-1] for row in stage.sink.rows.values()} == {1.0}


async def test_cancelled_batch_aborts_its_sessions_and_leaves_every_prompt_with_a_state(stage: Stage) -> None:
    await stage.start(2)
    pool = stage.pool()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.hangs"}}, pool=pool)
    running = asyncio.create_task(framework.generate_sequences(prompts(3)))
    await until(lambda: len(runners.calls_seen) == 6)
    assert len(stage.live_sessions()) == 6
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.live_sessions() == []
    assert [*pool.counts.values()] == [0, 0]
    assert [stage.sink.status(f"u{number}")[-1] for number in range(3)] == ["failure"] * 3


async def test_session_whose_rows_cannot_be_stored_fails_alone(stage: Stage) -> None:
    await stage.start()
    stage.sink.refuse = lambda rows: rows[0].key == "u0_1_0"
    summary = await stage.framework().run_batch(prompts(2))
    assert (summary.trajectories, summary.failed_sessions) == (3, 1)
    assert stage.sink.tags["u0"][-1] == {"status": "finished", "failed_sessions": 1}


async def test_trajectories_are_logged_for_people(stage: Stage) -> None:
    await stage.start()
    await stage.framework(rollout={"n": 1}, log_dir=str(stage.folder / "log")).generate_sequences(prompts(1))
    (file,) = (stage.folder / "log" / "step_3").glob("*/trajectories.jsonl")
    (trajectory,) = read_jsonl(file)
    assert trajectory.reward == 1.0


async def test_tokens_of_a_session_are_in_no_log(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    await stage.start()
    framework = stage.framework({"calls": {"runner_fqn": f"{RUNNERS}.quotes_its_addresses"}}, rollout={"n": 1})
    summary = await framework.run_batch(prompts(1))
    said = "".join(capsys.readouterr()) + summary.reasons[0]
    assert "/token/***/v1" in said and "/token/***/complete" in said
    for token in runners.calls_seen[0]["tokens"]:
        assert token not in said
