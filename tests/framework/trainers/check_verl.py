"""With the real Ray, TransferQueue and verl, in the environment of `scripts/install-trainers verl`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from nemo_gym.contract.errors import ConfigError
from nemo_gym.framework.batch import PromptSample, read_batch
from nemo_gym.framework.samples import Score, trajectory_row
from nemo_gym.framework.transfer_queue import TrajectoryArchive, TransferQueueSink
from nemo_gym.framework.verl import AgentFrameworkRolloutAdapter, RewardLoopScorer
from nemo_gym.gateway.tokens.trajectories import Trajectory, TrajectoryTurn
from nemo_gym.stack import background
from responses_api_models.gateway.tests.conftest import FAMILY, Teller
from tests.framework.conftest import Stage, prompts, trainer_config
from tests.gateway.tokens.policies import write

RUNNERS = "runners"
"""As workers of Ray find it, where another package is called ``tests``."""
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests" / "framework"))


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[None]:
    path = {"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'testing'}:{ROOT / 'tests' / 'framework'}"}}
    # TransferQueue's controller and units reserve a CPU each, whether there are so many or not.
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=path)
    yield
    ray.shutdown()


@pytest.fixture
def queue() -> Iterator[Any]:
    conf = OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    yield conf
    tq.close()


# -- Ray tasks -------------------------------------------------------------------------------------------------------


async def test_ray_task_imports_its_runner_anew_and_its_session_ends_in_the_parent(stage: Stage) -> None:
    await stage.start()
    kwargs = {"folder": str(stage.folder)}
    runner = {"runner_fqn": f"{RUNNERS}.notes_its_process", "runner_kwargs": kwargs, "dispatch_mode": "ray_task"}
    summary = await stage.framework({"far": runner}).run_batch(prompts(2))
    assert (summary.trajectories, summary.failed_sessions) == (4, 0), summary.reasons
    lines = (stage.folder / "processes").read_text().split("\n")[:-1]
    assert len(lines) == 4
    assert str(os.getpid()) not in {line.split()[0] for line in lines}
    assert stage.live_sessions() == []
    assert {row.fields["rm_scores"][-1] for row in stage.sink.rows.values()} == {1.0}


async def test_failure_of_a_ray_task_aborts_its_session_and_no_other(stage: Stage) -> None:
    await stage.start()
    kwargs = {"folder": str(stage.folder), "failing": 1}
    runner = {"runner_fqn": f"{RUNNERS}.notes_its_process", "runner_kwargs": kwargs, "dispatch_mode": "ray_task"}
    summary = await stage.framework({"far": runner}, rollout={"n": 1}).run_batch(prompts(3))
    assert (summary.trajectories, summary.failed_sessions) == (2, 1)
    assert "the agent broke" in summary.reasons[0]
    assert [stage.sink.status(f"u{number}")[-1] for number in range(3)] == ["finished", "failure", "finished"]
    # Once: a task that failed is not run again on a session half used.
    assert len((stage.folder / "processes").read_text().splitlines()) == 3
    assert stage.live_sessions() == []


async def test_runner_that_blocks_works_as_a_ray_task(stage: Stage) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.blocks", "dispatch_mode": "ray_task"}
    summary = await stage.framework({"far": runner}).run_batch(prompts(2))
    assert (summary.trajectories, summary.failed_sessions) == (4, 0), summary.reasons


async def test_cancelled_batch_ends_its_ray_tasks(stage: Stage) -> None:
    await stage.start()
    runner = {"runner_fqn": f"{RUNNERS}.hangs", "dispatch_mode": "ray_task"}
    running = asyncio.create_task(stage.framework({"far": runner}, rollout={"n": 1}).run_batch(prompts(2)))
    async with asyncio.timeout(60):
        while len(stage.engine.answered) < 2:  # noqa: ASYNC110 - another process answers
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.live_sessions() == []
    assert [stage.sink.status(f"u{number}")[-1] for number in range(2)] == ["failure"] * 2


# -- TransferQueue ---------------------------------------------------------------------------------------------------


def sample(uid: str, **fields: Any) -> PromptSample:
    given = {"uid": uid, "raw_prompt": [{"role": "user", "content": uid}], "data_source": "math", **fields}
    return PromptSample(uid, 0, given)


def trajectory(length: int, *, first: int = 1) -> Trajectory:
    ids = range(first, first + length)
    from array import array

    turns = (TrajectoryTurn(0, length, "stop", "7"),)
    mask, logprobs = b"\1" * length, array("f", [-1.0] * length)
    return Trajectory(
        "s", 0, array("i", [9, 9, 9]), array("i", ids), mask, logprobs, turns, "initial", message_count=2
    )


def row(uid: str, session: int, index: int, length: int, reward: float) -> Any:
    score = Score(reward, "runner", {"acc": reward})
    return trajectory_row(sample(uid), session, index, trajectory(length), score, global_steps=3, masked=False)


async def test_rows_are_in_the_queue_as_verl_reads_them(queue: Any) -> None:
    sink = TransferQueueSink(conf=queue)
    await sink.tag("train", "u0", {"status": "running", "is_prompt": True, "global_steps": 3})
    for session, (length, reward) in enumerate([(4, 1.0), (7, 0.0), (2, 0.0)]):
        await sink.put("train", [row("u0", session, 0, length, reward)])
    await sink.put("train", [row("u0", 3, 0, 3, 0.5), row("u0", 3, 1, 5, 0.5)])
    await sink.tag("train", "u0", {"status": "finished"})
    listed = tq.kv_list("train")["train"]
    assert listed["u0"] == {"status": "finished", "is_prompt": True, "global_steps": 3}
    assert (listed["u0_1_0"]["response_len"], listed["u0_1_0"]["seq_len"]) == (7, 10)
    assert (listed["u0_1_0"]["min_global_steps"], listed["u0_1_0"]["max_global_steps"]) == (7, 7)
    buffer = ReplayBuffer("sync", OmegaConf.create({}), None, "drop", OmegaConf.create({}), poll_interval=0.1)
    batch, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=1)
    assert sorted(batch.keys) == ["u0_0_0", "u0_1_0", "u0_2_0", "u0_3_0", "u0_3_1"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "loss_mask"):
        assert data[name].is_nested and data[name].dtype == torch.int64, name
    assert data["rm_scores"].dtype == data["rollout_log_probs"].dtype == torch.float32
    by_key = dict(zip(batch.keys, data["responses"], strict=True))
    assert by_key["u0_1_0"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    # verl's own advantage code, on what we wrote.
    algorithm = {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
    batch = PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
    advantages = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])["advantages"]
    found = {key: value.tolist() for key, value in zip(batch.keys, advantages, strict=True)}
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    for key, values in found.items():
        assert values == pytest.approx([expected[int(key.split("_")[1])]] * len(values), rel=1e-4), key
    await sink.aclose()


async def test_positions_of_images_stay_with_their_row(queue: Any) -> None:
    sink = TransferQueueSink(conf=queue)
    wide = torch.arange(4 * 8).reshape(4, 8)
    rows = [row("u0", 0, 0, 5, 1.0), row("u0", 0, 1, 2, 1.0)]
    rows[0].fields["position_ids"] = wide.numpy()
    await sink.put("train", rows)
    got = await sink.get("train", ["u0_0_0", "u0_0_1"], ["position_ids"])
    first, second = got["position_ids"].unbind() if got["position_ids"].is_nested else got["position_ids"]
    assert first.tolist() == wide.tolist()
    assert second.tolist() == [list(range(5))] * 4
    await sink.aclose()


async def test_dead_storage_unit_is_replaced_and_its_rows_are_written_again(queue: Any, tmp_path: Path) -> None:
    archive = TrajectoryArchive(tmp_path / "archive.sqlite")
    sink = TransferQueueSink(archive, conf=queue)
    for number in range(12):
        await sink.put("train", [row(f"u{number}", 0, 0, number + 1, 1.0)])
    ray.kill(tq.interface._TQ_STORAGE["SimpleStorage"]["TransferQueueStorageUnit#1"])
    async with asyncio.timeout(30):
        await asyncio.gather(*(sink.put("train", [row(f"u{n}", 0, 0, n + 1, 1.0)]) for n in range(12, 16)))
    keys = [f"u{number}_0_0" for number in range(16)]
    async with asyncio.timeout(30):
        got = await sink.get("train", keys, ["responses"])
    assert [len(each) for each in got["responses"]] == [number + 1 for number in range(16)]
    assert sink.rewritten >= 6  # and what was being written meanwhile
    await sink.forget_consumed()
    assert len(archive.keys("train")) == 16
    await tq.async_kv_clear(keys=keys[:5], partition_id="train")
    await sink.forget_consumed()
    assert sorted(archive.keys("train")) == sorted(keys[5:])
    await sink.aclose()


async def test_row_that_is_being_written_is_not_forgotten(
    queue: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = TrajectoryArchive(tmp_path / "archive.sqlite")
    sink = TransferQueueSink(archive, conf=queue)
    await sink.put("train", [row("u0", 0, 0, 1, 1.0)])
    listing = tq.async_kv_list
    archived, stored, listed, go_on = (asyncio.Event() for _ in range(4))

    async def put(partition: str, rows: Any, put: Any = sink._put) -> None:
        archived.set()
        await stored.wait()
        await put(partition, rows)

    async def list_slowly(**options: Any) -> Any:
        found = await listing(**options)
        listed.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(sink, "_put", put)
    monkeypatch.setattr(tq, "async_kv_list", list_slowly)
    async with asyncio.TaskGroup() as batches:
        early = batches.create_task(sink.put("train", [row("u1", 0, 0, 2, 1.0)]))
        await archived.wait()
        forgetting = batches.create_task(sink.forget_consumed())  # the next batch begins
        await listed.wait()
        stored.set()
        await early
        await sink.put("train", [row("u2", 0, 0, 3, 1.0)])
        go_on.set()
        await forgetting
    assert archive.keys("train") == ["u0_0_0", "u1_0_0", "u2_0_0"]
    await tq.async_kv_clear(keys=["u0_0_0", "u1_0_0"], partition_id="train")
    await sink.forget_consumed()
    assert archive.keys("train") == ["u2_0_0"]
    await sink.aclose()


# -- batches ---------------------------------------------------------------------------------------------------------


def test_tensordict_of_the_trainer_is_read() -> None:
    columns = {
        "uid": NonTensorStack("a", "b"),
        "raw_prompt": NonTensorStack([{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]),
        "extra_info": NonTensorStack({"index": 1}, {"index": 2}),
        "agent_name": NonTensorData("calls"),
        "index": torch.tensor([5, 6]),
    }
    prompts = TensorDict(columns, batch_size=[2])
    prompts["global_steps"] = NonTensorData(9)
    batch = read_batch(prompts)
    assert (batch.partition, batch.global_steps) == ("train", 9)
    assert [each.uid for each in batch.samples] == ["a", "b"]
    second = batch.samples[1].fields
    assert second["raw_prompt"] == [{"role": "user", "content": "2"}]
    assert (second["extra_info"], second["agent_name"], second["index"]) == ({"index": 2}, "calls", 6)


async def test_reward_worker_of_verl_gets_a_batch_of_its_own_kind() -> None:
    @ray.remote
    class Worker:
        def compute_score(self, data: Any) -> dict[str, Any]:
            assert data.batch["responses"].tolist() == [[1, 2, 3]]
            extra = data.non_tensor_batch["extra_info"][0]
            return {"reward_score": extra["worth"], "reward_extra_info": {"turns": int(extra["turns"])}}

    scorer = RewardLoopScorer([Worker.remote()])
    given = sample("u0", extra_info={"worth": 0.25}, reward_model={"ground_truth": "4"})
    assert await scorer(trajectory(3), given, {"turns": 2}) == (0.25, {"turns": 2})


# -- the adapter -----------------------------------------------------------------------------------------------------


class Client:
    """As verl's LLMServerClient: token ids in, `TokenOutput` out."""

    def __init__(self) -> None:
        self.teller = Teller()
        self.calls: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.calls.append({"prompt_ids": prompt_ids, "sampling": sampling_params})
        sampled = self.teller(prompt_ids, sampling_params["max_tokens"], len(self.calls))
        return TokenOutput(
            token_ids=list(sampled.token_ids),
            log_probs=list(sampled.logprobs),
            stop_reason="completed",
            extra_fields={"global_steps": 5, "min_global_steps": 5, "max_global_steps": 5},
        )


def model_directory(folder: Path) -> Path:
    """A policy that verl reads as a model: no weights are needed for its tokenizer and its configuration."""
    write(folder, FAMILY)
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text())
    plain = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in said.items()
    }
    file.write_text(json.dumps(plain))
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, **size}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 1000, "max_position_embeddings": 8192}))
    return folder


def configuration(folder: Path, runner: dict[str, Any], **block: Any) -> Any:
    block |= {"agent_runners": {"calls": runner}}
    given = trainer_config(block, n=2, prompt_length=2048, response_length=512, calculate_log_probs=True)
    path = str(model_directory(folder / "policy"))
    given["actor_rollout_ref"]["model"] = {"_target_": "verl.workers.config.HFModelConfig", "path": path}
    return OmegaConf.create(given)


async def states(*uids: str) -> set[str | None]:
    listed = (await tq.async_kv_list(partition_id="train"))["train"]
    return {listed.get(uid, {}).get("status") for uid in uids}


async def test_adapter_serves_a_trainer_from_batch_to_queue(queue: Any, tmp_path: Path) -> None:
    tq.init(queue)
    given = configuration(tmp_path, {"runner_fqn": f"{RUNNERS}.two_conversations"}, gateway_count=2)
    client = Client()
    make = lambda: AgentFrameworkRolloutAdapter.create(config=given, llm_client=client)  # noqa: E731
    adapter = await asyncio.to_thread(make)
    try:
        columns = {
            "uid": NonTensorStack("a", "b"),
            "raw_prompt": NonTensorStack([{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}]),
            "global_steps": NonTensorData(5),
        }
        batch = TensorDict(columns, batch_size=[2])
        await asyncio.to_thread(adapter.generate_sequences_and_wait, batch)
        listed = (await tq.async_kv_list(partition_id="train"))["train"]
        assert {listed["a"]["status"], listed["b"]["status"]} == {"finished"}
        keys = sorted(key for key in listed if "_" in key)
        assert keys == [f"{uid}_{session}_{index}" for uid in "ab" for session in (0, 1) for index in (0, 1)]
        data = await tq.async_kv_batch_get(keys=keys, partition_id="train")
        sampled = {tuple(call["prompt_ids"]) for call in client.calls}
        assert len(client.calls) == 12
        assert all(tuple(ids.tolist()) in sampled for ids in data["prompts"])
        assert {call["sampling"]["temperature"] for call in client.calls} == {0.9}
        assert {listed[key]["min_global_steps"] for key in keys} == {5}
        assert [float(scores[-1]) for scores in data["rm_scores"]] == [0.25] * 8
        adapter.generate_sequences(TensorDict({**columns, "uid": NonTensorStack("c", "d")}, batch_size=[2]))
        async with asyncio.timeout(60):
            while await states("c", "d") != {"finished"}:  # noqa: ASYNC110 - another process writes
                await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(adapter.shutdown)


@pytest.mark.parametrize(
    ("runner", "told"),
    [
        ({"runner_fqn": "no_such_package.run"}, "'no_such_package.run' cannot be imported"),
        ({"agent_server": "no_such_server"}, "no running stack has a server 'no_such_server'"),
    ],
)
def test_runner_that_the_worker_cannot_use_is_refused_before_a_batch_and_nothing_is_left(
    queue: Any, tmp_path: Path, runner: dict[str, Any], told: str
) -> None:
    tq.init(queue)
    with pytest.raises(ConfigError, match=told):
        AgentFrameworkRolloutAdapter.create(config=configuration(tmp_path, runner), llm_client=Client())
    assert background._started == []
    assert "engine-bridge" not in {thread.name for thread in threading.enumerate()}


def test_adapter_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="teacher_client"):
        AgentFrameworkRolloutAdapter.create(config={}, llm_client=None, teacher_client=object())
    block = {"agent_runners": {"calls": {"runner_fqn": f"{RUNNERS}.calls"}}, "gateway_count": 0}
    with pytest.raises(ValueError, match="gateway_count"):
        AgentFrameworkRolloutAdapter.create(config=OmegaConf.create(trainer_config(block)), llm_client=Client())
