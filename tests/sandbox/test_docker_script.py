from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "dockerd"


@pytest.fixture
def state() -> Iterator[Path]:
    """A short path, as sockets have; whatever runs there is stopped."""
    directory = Path(tempfile.mkdtemp(prefix="ngd"))
    yield directory
    run("stop", directory)
    shutil.rmtree(directory)


def run(action: str, state: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NEMO_GYM_DOCKER_DIR": str(state), **environment}
    return subprocess.run([str(SCRIPT), action, *more], env=env, capture_output=True, text=True, timeout=120)


def test_dockerd_script_starts_one_private_engine_and_stops_only_that(docker_engine: str, state: Path) -> None:
    first = run("start", state, "--private")
    assert first.stdout == f"DOCKER_HOST=unix://{state}/engine.sock\n", first.stderr
    again = run("start", state, "--private")
    assert again.stdout == first.stdout
    assert "already running" in again.stderr
    assert run("status", state).stdout == first.stdout
    both = subprocess.run(["docker", "-H", docker_engine, "version"], capture_output=True)
    assert both.returncode == 0
    assert run("stop", state).returncode == 0
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
    still = subprocess.run(["docker", "-H", docker_engine, "version"], capture_output=True)
    assert still.returncode == 0, "stopping the private engine stopped another one"


def test_process_with_the_number_of_a_killed_containerd_keeps_no_engine_from_starting(
    docker_engine: str, state: Path
) -> None:
    # As after a restart of the machine, or in a namespace of low numbers.
    pidfile = state / "exec" / "containerd" / "containerd.pid"
    pidfile.parent.mkdir(parents=True)
    pidfile.write_text(str(os.getpid()))
    started = run("start", state, "--private")
    assert started.returncode == 0, started.stderr


def test_bridge_of_a_killed_engine_does_not_take_the_network_of_the_next(docker_engine: str, state: Path) -> None:
    left = "ngbr0left000"
    subprocess.run(["ip", "link", "add", left, "type", "bridge"], check=True)
    subprocess.run(["ip", "addr", "add", "172.30.240.1/20", "dev", left], check=True)
    subprocess.run(["ip", "link", "set", left, "up"], check=True)
    subprocess.run(["iptables", "-A", "FORWARD", "-o", left, "-j", "ACCEPT"], check=True)
    try:
        started = run("start", state, "--private")
        assert started.returncode == 0, started.stderr
        assert left not in {path.name for path in Path("/sys/class/net").iterdir()}
        assert left not in subprocess.run(["iptables", "-S"], capture_output=True, text=True, check=True).stdout
        networks = [line.split()[0] for line in _routes() if "dev ngbr" in line]
        assert len(networks) == len(set(networks)) >= 1
    finally:
        subprocess.run(["ip", "link", "delete", left], capture_output=True)


def _routes() -> list[str]:
    return subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_dockerd_script_uses_an_engine_that_answers_already(docker_engine: str, state: Path) -> None:
    done = run("start", state, DOCKER_HOST=docker_engine)
    assert done.stdout == f"DOCKER_HOST={docker_engine}\n"
    assert "already answers" in done.stderr
    assert list(state.iterdir()) == []


def test_dockerd_script_finds_an_engine_at_the_default_socket(docker_engine: str, state: Path) -> None:
    path = docker_engine.removeprefix("unix://")
    done = run("start", state, DOCKER_HOST="", NEMO_GYM_DEFAULT_DOCKER_SOCKET=path)
    assert done.stdout == f"DOCKER_HOST={docker_engine}\n"


def test_dockerd_script_says_what_to_do_when_nothing_answers(state: Path) -> None:
    none = state / "none.sock"
    done = run("status", state, DOCKER_HOST=f"unix://{none}", NEMO_GYM_DEFAULT_DOCKER_SOCKET=str(none))
    assert done.returncode == 3
    assert "scripts/dockerd start" in done.stderr


def start_as_nobody(state: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    state.chmod(0o755)
    copy = state / "dockerd-script"
    shutil.copy(SCRIPT, copy)
    return subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", str(copy), "start", *more],
        env={
            "PATH": os.environ["PATH"],
            "NEMO_GYM_DOCKER_DIR": str(state / "sub"),
            "HOME": "/nonexistent",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_dockerd_script_names_root_when_an_ordinary_user_starts_it(state: Path) -> None:
    none = str(state / "none.sock")
    for done in (start_as_nobody(state, "--private"), start_as_nobody(state, NEMO_GYM_DEFAULT_DOCKER_SOCKET=none)):
        assert done.returncode == 1
        assert "starting an engine needs root. Run the make command as root" in done.stderr


def test_dockerd_script_names_the_group_of_an_engine_that_an_ordinary_user_may_not_use(state: Path) -> None:
    path = state / "system.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o660)
        done = start_as_nobody(state, NEMO_GYM_DEFAULT_DOCKER_SOCKET=str(path))
    assert done.returncode == 1
    assert "sudo usermod -aG docker nobody, then log in again" in done.stderr
