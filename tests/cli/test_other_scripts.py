"""What the scripts do on machines unlike this one: programs that need root, a network or hours are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def stand_in(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def work_tree(place: Path, *scripts: str) -> Path:
    (place / "scripts").mkdir(parents=True)
    for name in scripts:
        shutil.copy(ROOT / "scripts" / name, place / "scripts")
    subprocess.run(["git", "init", "--quiet", place], check=True)
    return place


def run(command: list[str | Path], place: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=place, env=env, timeout=60)


def try_on_debian(place: Path, roots: Path) -> subprocess.CompletedProcess[str]:
    stand_in(place / "bin" / "id", "echo 0")
    stand_in(place / "bin" / "debootstrap", "exit 0")
    stand_in(place / "bin" / "unshare", "echo entered >>calls; exit 3")
    stand_in(place / "scripts" / "dockerd", 'echo "$NEMO_GYM_DOCKER_DIR $*" >>calls')
    return run([place / "scripts" / "try-on-debian", "bookworm", "true"], place, ROOTS=str(roots))


def test_trying_on_debian_leaves_the_mode_of_the_users_directory_alone(tmp_path: Path) -> None:
    roots = tmp_path / "shared"
    roots.mkdir()
    roots.chmod(0o1777)
    done = try_on_debian(work_tree(tmp_path / "tree", "try-on-debian"), roots)
    assert "entered" in (tmp_path / "tree" / "calls").read_text(), done.stderr
    assert roots.stat().st_mode & 0o7777 == 0o1777
    (own,) = roots.iterdir()
    assert own.stat().st_mode & 0o7777 == 0o700


def test_trying_on_debian_removes_the_bridge_of_the_engine_inside_even_when_the_command_fails(tmp_path: Path) -> None:
    place = work_tree(tmp_path / "tree", "try-on-debian")
    assert try_on_debian(place, tmp_path / "roots").returncode == 3
    assert (place / "calls").read_text().splitlines() == ["entered", "/root/.cache/nemo-gym/docker-bookworm stop"]


def run_full_tests(place: Path) -> tuple[int, str]:
    """The commands that ran, and the exit status."""
    (place / "calls").unlink(missing_ok=True)
    done = run([place / "scripts" / "test-full", "tests"], place)
    calls = place / "calls"
    return done.returncode, calls.read_text() if calls.exists() else ""


def full_tests(place: Path) -> Path:
    work_tree(place, "test-full")
    (place / ".gitignore").write_text("/.venv/\n/.cache/\n/calls\n")
    stand_in(place / ".venv" / "bin" / "python", 'echo "$*" >>calls')
    subprocess.run(["git", "add", "."], cwd=place, check=True)
    return place


def test_full_tests_run_again_when_a_file_that_git_does_not_track_is_new_or_has_changed(tmp_path: Path) -> None:
    place = full_tests(tmp_path / "tree")
    status, calls = run_full_tests(place)
    assert (status, "-m pytest" in calls) == (0, True)
    assert run_full_tests(place) == (0, "")
    new = place / "tests" / "test_new.py"
    new.parent.mkdir()
    for text in ("def test_it(): ...\n", "def test_it(): assert True\n"):
        new.write_text(text)
        assert run_full_tests(place) == (0, calls)
    (place / "NOTES.md").write_text("documentation")
    assert run_full_tests(place) == (0, "")


def test_full_tests_run_with_another_clone_inside(tmp_path: Path) -> None:
    place = full_tests(tmp_path / "tree")
    work_tree(place / "clone", "setup")
    (place / "link").symlink_to("scripts")
    assert run_full_tests(place)[0] == 0


def test_full_tests_do_not_pass_where_git_cannot_say_what_they_test(tmp_path: Path) -> None:
    place = full_tests(tmp_path / "tree")
    shutil.rmtree(place / ".git")
    assert run_full_tests(place) == (2, "")


def install_system(place: Path, *options: str, sudo: str = "", **environment: str) -> tuple[list[str], str]:
    """What an ordinary user's run on a machine without packages did with sudo, and its errors."""
    work_tree(place, "install-system", "apt.bash")
    bin_ = place / "programs"  # and no other program of this machine, but what is in sbin
    for name in ("bash", "dirname", "env", "sleep", "tail", "tee"):
        stand_in(bin_ / name, "").unlink()
        (bin_ / name).symlink_to(str(shutil.which(name)))
    stand_in(bin_ / "id", "echo 1000")
    stand_in(bin_ / "apt-get", "exit 1")
    stand_in(bin_ / "apt-cache", "exit 0")
    stand_in(bin_ / "sudo", f'[ "$*" = "-n true" ] || echo "$*" >>calls\n{sudo}')
    script: list[str | Path] = [place / "scripts" / "install-system", *options]
    done = run(script, place, **{"PATH": str(bin_), **environment})
    assert done.returncode == 1
    return (place / "calls").read_text().splitlines(), done.stderr


def test_packages_are_installed_without_questions_and_through_the_proxy_of_the_user(tmp_path: Path) -> None:
    calls, _ = install_system(tmp_path, https_proxy="http://proxy:3128")
    (install,) = (call for call in calls if " install " in call)
    assert install.startswith("-n env DEBIAN_FRONTEND=noninteractive https_proxy=http://proxy:3128 apt-get ")
    assert "DPkg::Lock::Timeout=" in install


def test_failed_update_of_the_package_lists_says_what_to_repair(tmp_path: Path) -> None:
    sudo = '[[ "$*" != *apt-get* ]] || { echo "E: no route to the archive"; exit 100; }'
    _, errors = install_system(tmp_path, sudo=sudo)
    assert "E: no route to the archive" in errors
    assert "install-system: 'apt-get update' failed" in errors
    assert "Repair the network" in errors


def test_update_waits_for_another_that_is_under_way(tmp_path: Path) -> None:
    locked = 'echo "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"; exit 100'
    sudo = f"""
[[ "$*" != *install* || -e updated ]] || exit 100
[[ "$*" != *update || -e waited ]] || {{ : >waited; {locked}; }}
[[ "$*" != *update ]] || : >updated"""
    calls, errors = install_system(tmp_path, sudo=sudo)
    assert [call.split()[-1] for call in calls if call.endswith(" update")] == ["update", "update"]
    assert "still cannot find" in errors


def test_make_with_many_jobs_installs_packages_once_at_a_time(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    stand_in(tmp_path / "scripts" / "setup", "exit 0")
    stand_in(tmp_path / "scripts" / "dockerd", "exit 0")
    stand_in(tmp_path / "scripts" / "install-system", "mkdir at-work && sleep 0.3 && rmdir at-work")
    done = run(["make", "-j4", "test-system", "engine"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_prometheus_for_tests_does_not_start_a_server_on_this_machine(tmp_path: Path) -> None:
    calls, _ = install_system(tmp_path, "--with-tests")
    (mask,) = (number for number, call in enumerate(calls) if call.endswith("prometheus.service"))
    assert calls[mask].endswith("ln -s /dev/null /etc/systemd/system/prometheus.service")
    assert any(" install " in call and " prometheus" in call for call in calls[mask:])


def test_rollouts_take_the_key_of_the_model_that_is_named_or_exported(tmp_path: Path) -> None:
    place = work_tree(tmp_path, "rollouts")
    stand_in(place / ".venv" / "bin" / "ng_prepare", "exit 0")
    stand_in(place / ".venv" / "bin" / "ng_run", 'echo "$POLICY_API_KEY"')
    model = {"MODEL_URL": "http://model/v1", "MODEL_NAME": "model"}
    exported = {"POLICY_API_KEY": "exported"}
    for keys, key in (({}, "none"), (exported, "exported"), ({"MODEL_API_KEY": "named", **exported}, "named")):
        assert run([place / "scripts" / "rollouts"], place, **model, **keys).stdout == f"{key}\n"


def install_engines(place: Path, *engines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    work_tree(place, "install-engines")
    in_engine = """case "$*" in *download*) tar -czf "${@: -2:1}/llama_cpp_python-1.tar.gz" -C scripts . ;; esac"""
    stand_in(place / "python-of-engine", in_engine)
    making = """echo "$*" >>calls; mkdir -p "$3/bin"; cp python-of-engine "$3/bin/python\""""
    stand_in(place / ".venv" / "bin" / "python", making)
    return run([place / "scripts" / "install-engines", *engines], place, PIP_NO_INDEX="1", **environment)


def test_engines_say_that_there_is_no_compiler_before_they_install_anything(tmp_path: Path) -> None:
    done = install_engines(tmp_path, CXX="no-such-compiler")
    assert done.returncode == 1
    assert "install-engines: llama-cpp needs a C++ compiler; on Debian or Ubuntu: apt-get install g++" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_build_of_an_engine_that_fails_leaves_nothing_in_the_temporary_directory(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    stand_in(tmp_path / "bin" / "cmake", "exit 1")
    done = install_engines(tmp_path, "llama-cpp", CXX="bash", TMPDIR=str(temporary))
    assert "cmake failed" in done.stderr
    assert not [*temporary.iterdir()]
    assert "-m venv" in (tmp_path / "calls").read_text(), "the environment's Python makes engines"


@pytest.mark.parametrize("script", ["install-engines", "install-opensandbox-server"])
def test_installers_say_that_there_is_no_python(tmp_path: Path, script: str) -> None:
    work_tree(tmp_path, script)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    done = run([tmp_path / "scripts" / script], tmp_path, PATH=str(programs))
    assert (done.returncode, done.stderr) == (
        1,
        f"{script}: there is no Python; run 'make setup' first, or set PYTHON=\n",
    )


def test_opensandbox_server_is_installed_with_the_python_of_the_environment(tmp_path: Path) -> None:
    work_tree(tmp_path, "install-opensandbox-server")
    stand_in(tmp_path / ".venv" / "bin" / "python", "echo $* >>calls; exit 1")
    run([tmp_path / "scripts" / "install-opensandbox-server"], tmp_path, PIP_NO_INDEX="1")
    assert (tmp_path / "calls").read_text().startswith("-m venv ")
