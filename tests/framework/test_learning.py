"""The run that learns (`examples/train`), cut short: a real vLLM, the gateway, and weights that change each step."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 3

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of policies: both runs start from the same."""
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def python() -> Path:
    for script, name in (("install-trainers", "trl"), ("install-engines", "vllm")):
        subprocess.run([ROOT / "scripts" / script, name], check=True, cwd=ROOT)
    return ROOT / ".trainers" / "trl" / "bin" / "python"


def test_policy_of_another_warm_start_is_refused(python: Path, tmp_path: Path) -> None:
    (tmp_path / "policy0").mkdir()
    (tmp_path / "policy0" / "warm_start.json").write_text('{"steps": 350}')
    command = [python, "-m", "examples.train.arithmetic", "--warm-steps", "10", "--output", tmp_path]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "policy0 has a policy of 350 steps; remove it" in ended.stderr


@pytest.mark.parametrize("batches", ["plain", "sampler"])
def test_weights_of_each_step_are_the_engines_for_the_next_batch(python: Path, folder: Path, batches: str) -> None:
    command = [python, "-m", "examples.train.arithmetic", "--json", "--batches", batches, "--output", folder]
    short = ["--steps", str(STEPS), "--held-out-rows", "2"]
    ended = subprocess.run([*command, *short], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-5000:]
    outcome: dict[str, Any] = json.loads(ended.stdout)
    assert 1e6 <= outcome["parameters"] <= 5e6 and outcome["merges"] >= 1000
    assert outcome["retokenising_changes"] >= 0.2
    assert outcome["turns_per_rollout"] > 1.5
    assert outcome["weights_versions"][0] == 0
    steps = outcome["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    trained = [step for step in steps if step["loss"] is not None]
    assert trained and all(math.isfinite(step["loss"]) for step in trained)
    # Logprobs that the trainer computes with its weights are those that the engine sampled with: of every batch that
    # was sampled wholly with the latest weights.
    errors = [step["logprob_error"] for step in trained if step["logprob_error"] is not None]
    assert errors and max(errors) < 1e-3
    if batches == "plain":
        assert outcome["weights_versions"] == [0, STEPS - 1]
        assert len(errors) == len(trained) and not any(step["staleness_max"] for step in steps)
    else:
        assert max(step["staleness_max"] for step in steps) <= 1
        assert all(step["effective"] > 0 for step in steps) and len(trained) == STEPS
    assert (folder / f"seed0-exact-{batches}" / "curve.png").stat().st_size > 10_000
