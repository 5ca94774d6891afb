"""What is wrong with a configuration or a batch is told before a session opens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from nemo_gym.contract.errors import ConfigError, RowError
from nemo_gym.framework import OpenAICompatibleAgentFramework
from nemo_gym.framework.batch import read_batch
from nemo_gym.framework.config import FrameworkConfig, framework_block
from tests.framework.conftest import MemorySink, Stage, prompts, trainer_config

RUNNERS = "tests.framework.runners"
CALLS = {"runner_fqn": f"{RUNNERS}.calls"}


def one(**runner: Any) -> dict[str, Any]:
    return {"agent_runners": {"calls": {**CALLS, **runner}}}


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({}, "agent_runners is required"),
        ({"agent_runners": {}}, "agent_runners is required"),
        ({"runner_fqn": "a.b"}, r"runner_fqn belong to a runner: put them below agent_runners\.<name>"),
        ({**one(), "max_concurrent_sessions": 3}, "no cap of all runners together"),
        ({"agent_runners": {"calls": {}}}, r"agent_runners\.calls: runner_fqn is required"),
        (one(dispatch_mode="thread"), r"agent_runners\.calls\.dispatch_mode: .*'inline_async' or 'ray_task'"),
        (one(max_concurrent_sessions=-1), r"max_concurrent_sessions: .*greater than or equal to 0"),
        (one(trajectory_selection="best"), "trajectory_selection"),
        (one(agent_server="simple_agent"), "and not both"),
        ({**one(), "mask_unfinished_episode": "true"}, r"mask_unfinished_episode: must be a bool, not 'true'"),
        ({**one(), "gateway_count": 0}, "gateway_count"),
        ({**one(), "gateway_cuont": 1}, "gateway_count"),
        ({"agent_runners": {"calls": {"agent_server": "x", "dispatch_mode": "ray_task"}}}, "the server is a process"),
    ],
)
def test_wrong_block_is_told_with_its_key(block: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        framework_block(trainer_config(block))


@pytest.mark.parametrize(
    ("runner", "told"),
    [
        ({"runner_fqn": "nowhere.to.be_found"}, r"runner_fqn: 'nowhere.to.be_found' cannot be imported"),
        ({"runner_fqn": f"{RUNNERS}.missing"}, "cannot be imported"),
        ({"runner_fqn": "calls"}, "it names no module"),
        ({"runner_fqn": f"{RUNNERS}.not_async"}, "no async function"),
        ({"runner_fqn": f"{RUNNERS}.NeedsLabel"}, "runner_kwargs: .* refuses them"),
        ({"runner_fqn": f"{RUNNERS}.calls", "tool_config_path": "x.yaml"}, "needs the package verl"),
    ],
)
def test_runner_that_cannot_be_called_is_told_at_build_time(runner: dict[str, Any], told: str) -> None:
    parts: Any = {"gateways": None, "sink": MemorySink()}
    with pytest.raises(ConfigError, match=told):
        OpenAICompatibleAgentFramework.from_config(
            config=trainer_config({"agent_runners": {"calls": runner}}), **parts
        )


def test_published_block_is_read_as_it_is() -> None:
    published = """
    actor_rollout_ref:
      rollout:
        n: 8
        temperature: 1.0
        top_p: 1.0
        top_k: -1
        prompt_length: 4096
        response_length: 8192
        val_kwargs: {n: 1, temperature: 0.6, top_p: 0.95, top_k: -1}
        custom:
          agent_framework:
            gateway_count: 8
            enable_last_assistant_rollback: true
            mask_unfinished_episode: true
            agent_runners:
              claude_code:
                runner_fqn: tests.framework.runners.calls
                runner_kwargs: {task: {name: swe_bench}}
                dispatch_mode: ray_task
                max_concurrent_sessions: 64
                trajectory_selection: longest
    """
    config, rollout = framework_block(OmegaConf.create(published))
    runner = config.agent_runners["claude_code"]
    assert (config.gateway_count, runner.dispatch_mode, runner.max_concurrent_sessions) == (8, "ray_task", 64)
    assert runner.runner_kwargs == {"task": {"name": "swe_bench"}}
    assert (rollout.n, rollout.val_n) == (8, 1)
    assert rollout.sampling_of("train", greedy=False) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_output_tokens": 8192,
    }
    assert rollout.sampling_of("val", greedy=False)["temperature"] == 0.6


def test_no_cap_is_0() -> None:
    assert FrameworkConfig.parse(one(max_concurrent_sessions=0)).agent_runners["calls"].max_concurrent_sessions == 0


@pytest.mark.parametrize(
    ("change", "told", "states"),
    [
        ({"uid": None}, "'uid' is missing", {}),
        ({"uid": ["a", 7]}, r"prompts\['uid'\]\[1\] must be a string", {}),
        ({"uid": ["a", ""]}, "must be a string that is not empty", {}),
        ({"uid": ["a", "b_c"]}, "before the first '_'", {}),
        ({"uid": ["a", "a"]}, "'a' comes twice", {}),
        ({"raw_prompt": None}, "'raw_prompt' is missing; set data.return_raw_chat=True", {"u0": "failure"}),
        ({"global_steps": None}, "'global_steps' is missing", {"u0": "failure"}),
        ({"global_steps": float("nan")}, r"prompts\['global_steps'\] must be a whole number", {"u0": "failure"}),
        ({"__rollout_n__": [2, "x"]}, r"prompts\['__rollout_n__'\]\[1\] must be .*, got 'x'", {"u1": "failure"}),
        (
            {"__rollout_n__": [0, 1]},
            r"prompts\['__rollout_n__'\]\[0\] must be a whole number from 1",
            {"u1": "failure"},
        ),
    ],
)
async def test_batch_that_cannot_be_run_is_refused_and_its_prompts_have_a_state(
    stage: Stage, change: dict[str, Any], told: str, states: dict[str, str]
) -> None:
    await stage.start()
    batch = {name: column for name, column in {**prompts(2), **change}.items() if column is not None}
    with pytest.raises(RowError, match=told):
        await stage.framework().generate_sequences(batch)
    assert {uid: tags[-1]["status"] for uid, tags in stage.sink.tags.items()}.items() >= states.items()
    assert stage.live_sessions() == []


@pytest.mark.parametrize("number", [3, np.int64(3), np.array(3), np.float32(3)])
def test_numbers_of_a_whole_batch_may_be_numpys(number: Any) -> None:
    whole = type("NonTensorData", (), {"data": number})()  # as a TensorDict holds a value of the whole batch
    batch = read_batch(prompts(2, global_steps=whole, __rollout_n__=whole))
    assert batch.global_steps == 3
    assert [sample.sessions(1) for sample in batch.samples] == [3, 3]
