"""`scripts/install-clis` says what is missing and why it cannot be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.clis.drivers import CLIS
from tests.acceptance.clis.place import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "install-clis"


def run(
    cache: Path, *arguments: str, path: str | None = None, script: Path = SCRIPT
) -> subprocess.CompletedProcess[str]:
    env = {"HOME": str(cache), "NEMO_GYM_CACHE_DIR": str(cache), "PATH": path or os.environ["PATH"]}
    return subprocess.run(["/bin/bash", script, *arguments], capture_output=True, text=True, env=env)


def test_check_names_the_clis_that_are_missing_and_installs_none(tmp_path: Path) -> None:
    done = run(tmp_path, "--check", "codex", "qwen-code")
    assert done.returncode == 1
    assert "missing codex qwen-code; run scripts/install-clis codex qwen-code" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_unknown_name_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, "codecs")
    assert done.returncode == 1
    assert "no CLI is called 'codecs'" in done.stderr
    assert all(name in done.stderr for name in CLIS)


def test_install_says_what_it_needs_when_there_is_no_python(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cut", "dirname", "flock", "mkdir", "paste", "rm"):
        (programs / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "scripts").mkdir()
    elsewhere = Path(shutil.copy(SCRIPT, tmp_path / "scripts"))  # beside no virtual environment
    done = run(tmp_path, "codex", path=str(programs), script=elsewhere)
    assert done.returncode == 1
    assert "node needs Python 3.11 or newer with the venv module; install python3 and python3-venv" in done.stderr


@pytest.mark.parametrize("name", [*CLIS])
def test_directory_of_a_cli_is_in_the_cache_by_its_pinned_version(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--dir", name)
    directory = Path(done.stdout.strip())
    assert directory.parent == tmp_path / "clis" / name
    assert directory.name.count(".") == 2
