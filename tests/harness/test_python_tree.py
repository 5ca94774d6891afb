"""A Python of its own for a package: taken along from this host, relocatable, with wheels of pinned checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_gym.agent.harness.base import CliPackage
from nemo_gym.agent.harness.provision import SYSTEM_DIRECTORY, host_loader, installed, take_along
from nemo_gym.agent.harness.provision.fetch import fetch
from nemo_gym.agent.harness.provision.python_tree import PYTHON_VARIABLE, find_interpreter
from nemo_gym.contract.errors import ConfigError

HERE = "{}.{}".format(*sys.version_info)
LOOK = "import sys, json, os; print(json.dumps([sys.executable, sys.prefix, *sys.path, dict(os.environ)]))"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliPackage:
    """A package with one wheel, for the Python that runs this test."""
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    wheel = tmp_path / "greeter-1.0-py3-none-any.whl"
    info = "greeter-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("greeter.py", "import ctypes, sqlite3, ssl\nWORDS = 'hello from the wheel'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements = tmp_path / "requirements.lock"
    requirements.write_text(f"greeter @ {wheel.as_uri()} --hash=sha256:{digest}\n")
    return CliPackage(
        name="greeter",
        version="1.0",
        command="bin/python",
        runtime="script",
        requirements=requirements,
        pythons=(HERE,),
    )


def run(python: Path, *words: str) -> str:
    env = {"PATH": os.defpath}
    done = subprocess.run([python, "-I", *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_runs_from_wherever_it_is_with_its_own_libraries(tmp_path: Path, package: CliPackage) -> None:
    made = fetch(package)
    elsewhere = tmp_path / "opt" / "nemo-gym" / "greeter"
    shutil.move(made, elsewhere)
    python = elsewhere / package.command
    assert run(python, "-c", "import greeter; print(greeter.WORDS)") == "hello from the wheel\n"
    executable, prefix, *path, env = json.loads(run(python, "-c", LOOK))
    assert (executable, prefix) == (str(python), str(elsewhere))
    assert all(Path(place).is_relative_to(elsewhere) for place in path if place), path
    assert not [name for name in env if name.startswith(("PYTHON", "LD_"))], "its children find the image's own"
    maps = run(python, "-c", "import greeter; print(open('/proc/self/maps').read())")
    loaded = {line.split()[5] for line in maps.splitlines() if ".so" in line}
    assert loaded and all(Path(library).is_relative_to(elsewhere) for library in loaded), loaded
    assert list(elsewhere.rglob("greeter.*.pyc")), "compiled before it is mounted read-only"


def test_package_of_other_requirements_is_refused(package: CliPackage) -> None:
    made = fetch(package)
    assert installed(package) == made
    assert package.requirements is not None
    package.requirements.write_text(package.requirements.read_text() + "# another pin\n")
    with pytest.raises(ConfigError, match=r"installed from other requirements .* run: ng_prepare agents"):
        installed(package)


def test_wheel_that_is_not_the_pinned_one_is_never_installed(tmp_path: Path, package: CliPackage) -> None:
    assert package.requirements is not None
    text = package.requirements.read_text()
    package.requirements.write_text(text[:-5] + "0000\n")
    with pytest.raises(ConfigError, match="DO NOT MATCH THE HASHES"):
        fetch(package)
    assert [path.name for path in (tmp_path / "cache" / "agents" / "greeter").iterdir()] == [".lock"]


def test_host_without_a_fitting_python_is_told_how_to_get_one(
    tmp_path: Path, package: CliPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE)
    for name in ("PATH", "PYENV_ROOT", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"'greeter' needs CPython {HERE}, and this host has none .* set {PYTHON_VARIABLE}"
    ):
        find_interpreter(package)
    (tmp_path / f"python{HERE}").symlink_to(sys.executable)
    assert find_interpreter(package).version == HERE


@pytest.mark.parametrize(
    ("given", "said"),
    [(sys.executable, rf"is Python {HERE}\.\d+; 'greeter' needs CPython 3\.99"), ("/bin/false", "cannot be run")],
)
def test_named_python_that_does_not_fit_is_refused(
    package: CliPackage, monkeypatch: pytest.MonkeyPatch, given: str, said: str
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, given)
    with pytest.raises(ConfigError, match=said):
        find_interpreter(replace(package, pythons=("3.99",)))


def test_libraries_taken_along_run_the_program_by_themselves(tmp_path: Path) -> None:
    program = Path(shutil.which("env") or "/usr/bin/env").resolve()
    take_along([program], tmp_path / "native")
    loader = tmp_path / "native" / host_loader().name
    done = subprocess.run([loader, "--library-path", tmp_path / "native", program, "A=b"], capture_output=True, env={})
    assert done.stdout == b"A=b\n"
    assert (tmp_path / "native" / SYSTEM_DIRECTORY).read_text().startswith("/")
