"""The program that runs one command in a box and leaves nothing of it behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox import process_supervisor

DAEMON = """
import os, sys, time
if os.fork():
    {parent}
os.setsid()
if os.fork():
    os._exit(0)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def start(tmp_path: Path, *command: str, timeout: float = 60.0) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", process_supervisor.__file__, "--timeout", str(timeout), "--cleanup-timeout", "30"]
    words += ["--receipt", str(tmp_path / "receipt.json"), "--stop-file", str(tmp_path / "stop"), "--", *command]
    return subprocess.Popen(words)


def receipt(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "receipt.json").read_text())
    return found


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"{path} was not written"
        time.sleep(0.02)


def test_the_commands_own_exit_code_is_said(tmp_path: Path) -> None:
    assert start(tmp_path, sys.executable, "-c", "raise SystemExit(3)").wait(60) == 3
    assert receipt(tmp_path) == {"cleanup_confirmed": True, "return_code": 3, "error": None, "timed_out": False}
    assert not (tmp_path / "stop").exists()


def test_a_daemon_that_left_its_session_ends_with_the_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = DAEMON.format(parent="while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n    os._exit(0)")
    assert start(tmp_path, sys.executable, "-c", waits, str(pid)).wait(60) == 0
    wait_for(pid)
    assert receipt(tmp_path)["cleanup_confirmed"] is True
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize("ending", ["deadline", "told"])
def test_a_command_is_asked_to_end_and_may_finish_its_work(tmp_path: Path, ending: str) -> None:
    ready, done = tmp_path / "ready", tmp_path / "done"
    works = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    pathlib.Path(sys.argv[2]).write_text('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\npathlib.Path(sys.argv[1]).write_text('x')\ntime.sleep(600)"
    )
    running = start(
        tmp_path, sys.executable, "-c", works, str(ready), str(done), timeout=5.0 if ending == "deadline" else 60.0
    )
    wait_for(ready)
    if ending == "told":
        running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0
    assert done.read_text() == "saved"
    assert (tmp_path / "stop").exists()
    assert receipt(tmp_path)["timed_out"] is (ending == "deadline")


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert start(tmp_path, "no-such-command").wait(60) == 127
    assert "no-such-command" in receipt(tmp_path)["error"]
    assert process_supervisor.exec_timeout(timeout=10, cleanup_timeout=2) > 10 + 3 * 2
