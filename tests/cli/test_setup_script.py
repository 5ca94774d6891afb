"""``scripts/setup`` says what it does while pip works, and what pip said when it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
for number in 1 2 3; do echo "Collecting package-$number<2,>=1 (from nemo-gym-suite==0.1.0)"; done
echo "WARNING: a location is ignored"
echo "Installing collected packages: package-1, package-2, package-3"
exit {status}
"""
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {real} "$@"
echo "$*" >>made
mkdir -p .venv/bin
cp -r kept/. .venv
"""


def copy(place: Path, status: int = 0) -> Path:
    """A copy whose virtual environment has a pip that says the same every time; so has one that its Python makes."""
    place.mkdir(exist_ok=True)
    (place / "scripts").mkdir()
    for name in ("setup", "make-venv"):
        shutil.copy(ROOT / "scripts" / name, place / "scripts")
    shutil.copy(ROOT / "pyproject.toml", place)
    venv = place / "kept"
    (venv / "bin").mkdir(parents=True)
    version = ".".join(str(part) for part in sys.version_info[:3])
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
    (venv / "bin" / "activate").write_text(f'VIRTUAL_ENV="{place}/.venv"\nexport VIRTUAL_ENV\n')
    executable(venv / "bin" / "python", PIP.format(status=status))
    executable(place / "python", PYTHON.format(real=sys.executable))
    shutil.copytree(venv, place / ".venv")
    return place


def executable(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


def start(place: Path, **environment: str) -> subprocess.Popen[str]:
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(place / "python"), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen([place / "scripts" / "setup"], stdout=pipe, stderr=pipe, text=True, env=env)


def set_up(place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(place, **environment)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_setup_says_what_pip_is_doing(tmp_path: Path) -> None:
    done = set_up(copy(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "setup: package 1: package-1<2,>=1\n" in done.stderr
    assert "setup: unpacking 3 packages\n" in done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / ".venv" / ".setup-stamp").exists()


def test_setup_that_fails_shows_what_pip_said_and_is_run_again(tmp_path: Path) -> None:
    done = set_up(copy(tmp_path, 1))
    assert done.returncode == 1
    assert "WARNING: a location is ignored" in done.stderr
    assert "setup: pip could not install the packages" in done.stderr
    assert not (tmp_path / ".venv" / ".setup-stamp").exists()


def test_setup_keeps_an_environment_that_was_made_here(tmp_path: Path) -> None:
    assert set_up(copy(tmp_path)).returncode == 0
    assert not (tmp_path / "made").exists()


def stop_while_it_is_made(venv: Path) -> None:
    (venv / "bin" / "activate").unlink()


def take_another_python(venv: Path) -> None:
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.1\n")


def move(venv: Path) -> None:
    (venv / "bin" / "activate").write_text(f'VIRTUAL_ENV="/old{venv}"\n')


@pytest.mark.parametrize("spoil", [stop_while_it_is_made, take_another_python, move])
def test_setup_makes_an_environment_anew_that_is_not_the_one_of_this_place(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    assert set_up(copy(tmp_path)).returncode == 0
    spoil(tmp_path / ".venv")
    for _ in range(2):
        done = set_up(tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").read_text() == "-m venv --clear .venv\n"


def test_setup_clears_no_environment_that_lies_elsewhere(tmp_path: Path) -> None:
    place = copy(tmp_path / "place")
    (place / ".venv").rename(tmp_path / "shared")
    (place / ".venv").symlink_to(tmp_path / "shared")
    assert set_up(place).returncode == 0
    take_another_python(tmp_path / "shared")
    done = set_up(place)
    assert done.returncode == 1
    assert f".venv is in {tmp_path}/shared" in done.stderr
    assert not (place / "made").exists()


def test_setup_keeps_the_python_of_the_environment_when_none_is_named(tmp_path: Path) -> None:
    copy(tmp_path)
    executable(tmp_path / "python3.13", '#!/bin/sh\n[ "$1" = -c ] || { echo "$*" >>made; exit 1; }\n')
    answers = PIP.format(status=0).replace("#!/bin/sh", f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"')
    executable(tmp_path / ".venv" / "bin" / "python", answers)
    done = set_up(tmp_path, PYTHON="", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "made").exists()


def test_two_setups_at_once_install_one_after_the_other(tmp_path: Path) -> None:
    copy(tmp_path)
    alone = "#!/bin/sh\nmkdir at-work || exit 1\nsleep 0.3\nrmdir at-work\n"
    executable(tmp_path / ".venv" / "bin" / "python", alone)
    both = [start(tmp_path), start(tmp_path)]
    ended = [(process.communicate(timeout=60)[1], process.returncode) for process in both]
    assert [status for _, status in ended] == [0, 0], ended
