"""Plugins whose requirements this interpreter does not meet."""

from __future__ import annotations

import urllib.request
import zipfile
from pathlib import Path

import pytest

from nemo_gym.contract.errors import ConfigError
from nemo_gym.stack import venvs
from nemo_gym.stack.venvs import environment_key, interpreter_for, requirement_lines, unmet

from .stacks import command, ng_run, no_traceback, write


def wheel(folder: Path, version: str) -> None:
    """A package of one module, as a wheel that needs neither network nor a build."""
    info = f"tiny_thing-{version}.dist-info"
    with zipfile.ZipFile(folder / f"tiny_thing-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_thing.py", f"VERSION = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-thing\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def plugin(root: Path, version: str = "1.0") -> Path:
    """The environment, which now needs ``tiny-thing``."""
    folder = root / "resources_servers" / "sums"
    wheels = root / "wheels"
    wheels.mkdir(exist_ok=True)
    wheel(wheels, version)
    write(
        folder / "requirements.txt",
        f"# the suite itself\n-e nemo-gym[dev] @ ../../\n--no-index\n--find-links {wheels}\ntiny-thing=={version}\n",
    )
    app = (folder / "app.py").read_text()
    if "tiny_thing" not in app:
        (folder / "app.py").write_text(
            app.replace("import os\n", "import os\nimport tiny_thing\n").replace(
                'print("print from the plugin")', "print('tiny thing', tiny_thing.VERSION, sys.prefix)"
            )
        )
    return folder


def test_what_nemo_gym_brings_and_a_plugin_of_its_imports_is_a_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(venvs.NEMO_GYM_BRINGS, "tiny_thing", "tiny-thing")
    folder = tmp_path / "odd"
    write(folder / "app.py", "import json\nimport tiny_thing.part\nimport pydantic\nimport nobody_knows\n")
    write(folder / "tests" / "test_app.py", "import ray_of_light\n")
    write(folder / "requirements.txt", "-e nemo-gym[dev] @ ../../\n")
    assert requirement_lines(folder) == ["tiny-thing"]
    write(folder / "requirements.txt", "nemo-gym\nTiny_Thing==2.0\n")
    assert requirement_lines(folder) == ["Tiny_Thing==2.0"]
    write(folder / "requirements.txt", "other\n")  # of this suite: it lists what it needs
    assert requirement_lines(folder) == ["other"]


def test_plugin_with_unmet_requirements_runs_in_an_environment_of_its_own(root: Path) -> None:
    plugin(root)
    with ng_run(root, "environment=sums", "pass_env=[MY_API_KEY]", MY_API_KEY="environ-secret-1234") as stack:
        stack.wait_ready()
        assert "sums runs in an environment of its own, for tiny-thing==1.0" in stack.stderr
        assert f"tiny thing 1.0 {root / 'cache' / 'venvs'}" in stack.log("sums")
        server = stack.server("sums")
        with urllib.request.urlopen(f"{server['url']}/health", timeout=20) as response:
            assert response.status == 200
        pid = server["pid"]
        assert "NEMO_GYM_LAUNCH_FD" in Path(f"/proc/{pid}/environ").read_text()
        assert stack.entry["root_key"] not in Path(f"/proc/{pid}/environ").read_text()
        assert "environ-secret-1234" not in Path(f"/proc/{pid}/environ").read_text()
        assert "passed on: True" in stack.log("sums")
    made = sorted((root / "cache/venvs").glob("sums-*/.complete"))
    assert len(made) == 1
    before = made[0].stat().st_mtime_ns
    with ng_run(root, "environment=sums") as stack:
        stack.wait_ready()
    assert made[0].stat().st_mtime_ns == before  # found again, not made again


def test_requirements_that_cannot_be_installed_are_one_error(root: Path) -> None:
    folder = plugin(root)
    write(folder / "requirements.txt", "--no-index\nno-such-distribution-anywhere==1.0\n")
    done = command(root, "run", "environment=sums", f"run_dir={root / 'run'}")
    assert done.returncode == 2
    assert "cannot be installed; correct its requirements.txt" in done.stderr
    assert "no-such-distribution-anywhere" in done.stderr
    assert no_traceback(done.stderr)
    assert not list((root / "cache/venvs").glob("sums-*/"))


def test_half_made_environment_is_made_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CACHE_DIR", str(root / "cache"))
    folder = plugin(root)
    python = interpreter_for(folder)
    assert python is not None
    venv = Path(python).parents[1]
    (venv / ".complete").unlink()
    (venv / "half").touch()
    assert interpreter_for(folder) == python
    assert not (venv / "half").exists()


def test_other_requirements_make_another_environment() -> None:
    assert environment_key(["a==1"], []) != environment_key(["a==2"], [])
    assert environment_key(["a", "b"], []) == environment_key(["b", "a"], [])
    assert environment_key(["a"], ["b"]) != environment_key(["a", "b"], [])


def test_requirements_are_read_from_either_file(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", '[project]\nname = "x"\ndependencies = ["nemo-gym[dev]", "other>=2"]\n')
    assert requirement_lines(tmp_path) == ["other>=2"]
    write(tmp_path / "more.txt", "third\n")
    write(tmp_path / "requirements.txt", "-r more.txt\nNeMo_Gym\n\n# nothing\nfourth==1 # why\n")
    assert requirement_lines(tmp_path) == ["third", "fourth==1"]
    write(tmp_path / "pyproject.toml", "[project\n")
    (tmp_path / "requirements.txt").unlink()
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        requirement_lines(tmp_path)


@pytest.mark.parametrize(
    ("line", "met"),
    [
        ("pydantic>=2", True),
        ("pydantic<2", False),
        ("Pydantic", True),
        ("no-such-thing", False),
        ("no-such-thing; python_version < '3'", True),
        ("uvicorn[standard]", True),
        ("fastapi[all]", False),
        ("git+https://example.invalid/x.git", False),
        ("--find-links x", True),
    ],
)
def test_requirement_is_judged_without_installing(line: str, met: bool) -> None:
    assert (unmet([line]) == []) is met
