"""``scripts/setup`` says what it does while pip works, and what pip said when it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
for number in 1 2 3; do echo "Collecting package-$number<2,>=1 (from nemo-gym-suite==0.1.0)"; done
echo "WARNING: a location is ignored"
echo "Installing collected packages: package-1, package-2, package-3"
exit {status}
"""


def run(place: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Set up a copy whose virtual environment has a pip that says the same every time."""
    (place / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", place / "scripts")
    shutil.copy(ROOT / "pyproject.toml", place)
    python = place / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    command = [place / "scripts" / "setup"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_setup_says_what_pip_is_doing(tmp_path: Path) -> None:
    done = run(tmp_path, 0)
    assert done.returncode == 0, done.stderr
    assert "setup: package 1: package-1<2,>=1\n" in done.stderr
    assert "setup: unpacking 3 packages\n" in done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / ".venv" / ".setup-stamp").exists()


def test_setup_that_fails_shows_what_pip_said_and_is_run_again(tmp_path: Path) -> None:
    done = run(tmp_path, 1)
    assert done.returncode == 1
    assert "WARNING: a location is ignored" in done.stderr
    assert "setup: pip could not install the packages" in done.stderr
    assert not (tmp_path / ".venv" / ".setup-stamp").exists()
