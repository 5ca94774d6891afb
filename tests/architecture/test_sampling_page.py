"""The page on sampling for RL says what the code does, and its program runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_gym.cli.plan_placement import plan
from nemo_gym.config.pipeline import SamplingConfig
from tests.architecture.docs import PAGES, ROOT, command_lines, table, write_examples

PAGE = PAGES / "sampling-for-rl.md"
COMMANDS = {line.program: line for line in command_lines(PAGE)}


def test_every_command_of_the_page_is_one_that_these_tests_run() -> None:
    assert set(COMMANDS) == {"ng_run", "ng_plan_placement"} and len(COMMANDS) == len(list(command_lines(PAGE)))


def test_every_sampling_key_is_documented() -> None:
    assert set(table(PAGE, "sampling key")) == set(SamplingConfig.model_fields)


def test_plan_on_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(COMMANDS["ng_plan_placement"].words[1:]) == 0
    assert capsys.readouterr().out in PAGE.read_text(encoding="utf-8")


def test_trainer_of_the_page_gets_batches_of_effective_groups(tmp_path: Path) -> None:
    write_examples(PAGE, tmp_path)
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NEMO_GYM_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "resources_servers").symlink_to(ROOT / "resources_servers")
    variables["PYTHONPATH"] = str(ROOT)
    words = [*COMMANDS["ng_run"].words[1:], f"run_dir={tmp_path / 'run'}"]
    start = [sys.executable, "-c", "from nemo_gym.cli.run import main; main()", *words]
    with (tmp_path / "servers.txt").open("w") as said:
        servers = subprocess.Popen(start, cwd=tmp_path, env=variables, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 90
            while "servers ready" not in (tmp_path / "servers.txt").read_text():
                assert servers.poll() is None and time.monotonic() < deadline, (tmp_path / "servers.txt").read_text()
                time.sleep(0.05)
            trainer = subprocess.run(
                [sys.executable, "train.py"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
            )
        finally:
            servers.terminate()
            servers.wait(60)
    assert trainer.returncode == 0, trainer.stderr
    samples = [line.split() for line in trainer.stdout.splitlines() if re.match(r"\d ", line)]
    assert len(samples) == 3 * 2 * 4
    assert {(task, reward) for _, task, reward, _ in samples} == {("capital", "1.0"), ("capital", "0.0")}
    assert {int(staleness) for *_, staleness in samples} <= {0, 1}
    assert trainer.stdout.splitlines()[-1].endswith("} 3")
