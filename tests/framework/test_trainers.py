"""The checks against real trainers, each in an environment of its own (`scripts/install-trainers`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = [
    *("-q", "-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", "tests/framework", "-p", "no:cacheprovider"),
    *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "--import-mode=importlib"),
    *("-W", "ignore", "--timeout", "180"),
]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trainer", ["verl", "trl", "nemo_rl"])
def test_framework_works_with_the_real_trainer(trainer: str) -> None:
    code = os.environ.get("NEMO_RL")
    if trainer == "nemo_rl" and code is None:
        pytest.skip("no package index has NeMo RL's code; set NEMO_RL to a checkout of its repository")
    subprocess.run([ROOT / "scripts" / "install-trainers", trainer], check=True, cwd=ROOT)
    python = ROOT / ".trainers" / trainer / "bin" / "python"
    checks = f"tests/framework/trainers/check_{trainer}.py"
    env = {**os.environ, "PYTHONPATH": code} if trainer == "nemo_rl" and code else None
    command = [python, "-m", "pytest", *OPTIONS, checks]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
