"""A wheel holds what a clone's product folders hold: whoever installs it composes the same runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("nemo_gym", "resources_servers", "responses_api_agents", "responses_api_models", "configs")
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def unpacked_wheel(source: Path, place: Path) -> Path:
    """Build a distribution's wheel from tracked files alone, and unpack it."""
    copy = place / "source"
    for name in tracked(str(source)):
        target = copy / Path(name).relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(place), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "installed")
    return place / "installed"


def test_wheel_holds_every_file_of_the_product_and_composes_outside_of_a_clone(tmp_path: Path) -> None:
    installed = unpacked_wheel(Path(), tmp_path)
    assert [name for name in tracked(*FOLDERS) if not (installed / name).is_file()] == []
    outside = tmp_path / "outside"
    outside.mkdir()
    words = ["agent=claude_code", "environment=swe_bench", "sandbox=local", "model=scripted"]
    program = "import sys; from nemo_gym.cli.validate import main; sys.argv[0] = 'ng_validate'; main()"
    command = [sys.executable, "-c", program, *words]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=outside, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert str(installed / "configs" / "model" / "scripted.yaml") in done.stdout


def test_wheel_of_the_test_doubles_holds_their_files(tmp_path: Path) -> None:
    installed = unpacked_wheel(Path("testing"), tmp_path)
    names = [str(Path(name).relative_to("testing")) for name in tracked("testing/nemo_gym_testing")]
    assert [name for name in names if not (installed / name).is_file()] == []
