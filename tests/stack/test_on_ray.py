"""The checks against a real Ray cluster, in an environment and a network of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = [
    *("-q", "-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", "tests/stack/on_ray", "-p", "no:cacheprovider"),
    *("--import-mode=importlib", "-W", "ignore", "--timeout", "280"),
]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_composition_runs_on_two_ray_nodes() -> None:
    subprocess.run([ROOT / "scripts" / "install-trainers", "ray"], check=True, cwd=ROOT)
    python = ROOT / ".trainers" / "ray" / "bin" / "python"
    checks = [python, "campaigns/compat/isolated.py", *OPTIONS, "tests/stack/on_ray/check_on_ray.py"]
    ended = subprocess.run(checks, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
