"""A program that starts its servers as NeMo RL does, runs rows, and stops them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig

from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper
from nemo_gym.contract.errors import ConfigError, ServerError
from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import HEAD_SERVER_KEY_NAME, BaseServerConfig, close_global_aiohttp_client
from nemo_gym.stack.background import BackgroundStack, started_here
from nemo_gym.stack.endpoints import read_stack
from nemo_gym_testing.gateway import FakeVllmEngine
from responses_api_models.gateway.tests.conftest import FAMILY, Teller
from tests.framework.conftest import EngineThread
from tests.gateway.tokens.policies import write
from tests.rollouts.test_training_fields import read_as_nemo_rl

ROWS = Path("resources_servers/mcqa/data/example.jsonl")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories are made."""
    cache = tmp_path / "the user's, cached"
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(cache))
    return cache / "runs"


@pytest.fixture
def engine() -> Iterator[FakeVllmEngine]:
    teller = Teller()
    thread = EngineThread(FakeVllmEngine(teller))
    teller.texts = ["\\boxed{B}"] * 2 + ["no idea"] * 8
    yield thread.engine
    thread.stop()


def given(tmp_path: Path, engine: FakeVllmEngine) -> dict[str, Any]:
    """What NeMo RL passes, and a policy."""
    agent = {
        "entrypoint": "app.py",
        "resources_server": {"type": "resources_servers", "name": "mcqa"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    policy = {
        "entrypoint": "app.py",
        "model": "${policy_model_name}",
        "policy": {"path": str(write(tmp_path / "policy", FAMILY)), "max_context_tokens": 100_000},
        "engines": [{"type": "vllm", "base_url": "${policy_base_url}"}],
    }
    return {
        "config_paths": ["resources_servers/mcqa/configs/mcqa.yaml"],
        "mcqa_agent": {"responses_api_agents": {"simple_agent": agent}},
        "policy_model": {"responses_api_models": {"gateway": policy}},
        "policy_base_url": [f"{engine.url}/v1"],
        "policy_api_key": "dummy_key",
        "policy_model_name": "policy",
        HEAD_SERVER_KEY_NAME: {"host": "0.0.0.0", "port": 1},
        "ray_head_node_address": "127.0.0.1:6379",
        "global_aiohttp_connector_limit": 65536,
        "global_aiohttp_connector_limit_per_host": 16384,
        "port_range_low": 20_001,
        "port_range_high": 29_000,
        "default_host": "127.0.0.1",
    }


async def test_run_helper_starts_what_rollouts_of_a_trainer_need(
    tmp_path: Path, engine: FakeVllmEngine, runs: Path
) -> None:
    helper = RunHelper()
    helper.start(
        global_config_dict_parser_config=GlobalConfigDictParserConfig(
            dotenv_path=tmp_path / "none.yaml",
            initial_global_config_dict=DictConfig(given(tmp_path, engine)),
            skip_load_from_cli=True,
        )
    )
    helper.poll()
    run_dir = started_here()
    assert run_dir is not None and run_dir.parent == runs
    assert (runs / read_stack(run_dir).run_id).samefile(run_dir)
    assert (run_dir / "given.yaml").stat().st_mode & 0o777 == 0o600 and run_dir.stat().st_mode & 0o777 == 0o700
    try:
        rows = [{**json.loads(line), "_ng_task_index": 0} for line in [ROWS.read_text().splitlines()[0]] * 3]
        rows.append({"question": "no options", "_ng_task_index": 1})
        for number, row in enumerate(rows):
            row["_rowidx"] = number
        rollouts = RolloutCollectionHelper()
        head = BaseServerConfig(host="127.0.0.1", port=1)
        examples = rollouts.run_examples(examples=[*rows], head_server_config=head, max_attempts=1, concurrency=1)
        results = sorted([await done for done in examples], key=lambda pair: pair[0]["_rowidx"])
        assert [(result["reward"], result["mask_sample"]) for _, result in results] == [
            (1.0, False),
            (1.0, False),
            (0.0, False),
            (0.0, True),
        ]
        for _, result in results:
            assert isinstance(result["reward"], float)
            assert read_as_nemo_rl(result["response"])[0]
        await rollouts.aclose()
    finally:
        await close_global_aiohttp_client()
        helper.shutdown()
    assert started_here() is None and not (run_dir / "given.yaml").exists()
    with pytest.raises(ServerError, match="not running"):
        helper.poll()
    helper.shutdown()


def test_run_helper_says_that_its_servers_ended(tmp_path: Path, engine: FakeVllmEngine) -> None:
    helper = RunHelper()
    helper.start(GlobalConfigDictParserConfig(initial_global_config_dict=given(tmp_path, engine)))
    try:
        (ended,) = (child for child in psutil.Process().children() if "die_with_parent" in " ".join(child.cmdline()))
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # the helper is left to find it
        with pytest.raises(ServerError, match="ended with -9"):
            helper.poll()
    finally:
        helper.shutdown()


def test_servers_that_were_stopped_before_they_started_do_not_start(tmp_path: Path) -> None:
    servers = BackgroundStack(values={"policy_api_key": "secret"}, run_dir=tmp_path / "run")
    servers.stop()
    with pytest.raises(ServerError, match="the servers were stopped"):
        servers.start()
    assert not (tmp_path / "run" / "given.yaml").exists()


def test_run_helper_says_what_is_wrong_with_a_configuration(
    tmp_path: Path, engine: FakeVllmEngine, runs: Path
) -> None:
    wrong = given(tmp_path, engine)
    wrong["policy_model"]["responses_api_models"]["gateway"]["modle"] = "x"
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        RunHelper().start(GlobalConfigDictParserConfig(initial_global_config_dict=wrong))
    assert not [*runs.glob("*/given.yaml")], "it may hold keys"


@pytest.mark.parametrize(
    ("settings", "directory"),
    [
        ("run_id: nightly\n", "cache/runs/nightly"),
        ("run_dir: nightly\n", "nightly"),
        ("run_id: other\nrun_dir: ~/nightly\n", "home/nightly"),
    ],
)
def test_run_directory_of_a_programs_servers_is_that_of_env_yaml(
    settings: str, directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "env.yaml").write_text(settings)
    assert BackgroundStack().run_dir == tmp_path / directory
    assert BackgroundStack(["run_id=mine", "run_dir=mine"]).run_dir == tmp_path / "mine"
