"""Runs one command in a box and kills everything that it started.

An agent uploads this file and runs it with the box's Python, so it uses only the standard library, from Python 3.8 on:

    python -I process_supervisor.py --timeout 600 --receipt cleanup.json [--stop-file F] -- COMMAND…

At the deadline, or on SIGTERM, SIGINT or SIGHUP, it sends SIGTERM to the command. After the clean-up time it kills the
command and everything that the command started. This includes daemons: they stay this process's descendants after
their parents end. The receipt reports whether all are gone: ``{cleanup_confirmed, return_code, error, timed_out}``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEFAULT_CLEANUP_TIMEOUT = 10.0
"""Seconds for the command to end after SIGTERM, and again for the remaining processes to end after SIGKILL."""
POLL_S = 0.02
_PR_SET_CHILD_SUBREAPER = 36
_KILLED = 128


def exec_timeout(*, timeout: float, cleanup_timeout: float = DEFAULT_CLEANUP_TIMEOUT) -> float:
    """Return the timeout in seconds for the exec that runs this program: the command's ``timeout``, both clean-up
    times, and time to start and to write the receipt."""
    return timeout + 4 * cleanup_timeout


def adopt_orphans() -> bool:
    """Make descendants whose parents end become this process's children; return whether the system supports that."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False


def descendants() -> list[int]:
    """Return the ids of all living descendants of this process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    pids, has_grown = {os.getpid()}, True
    while has_grown:
        children = {pid for pid, parent in parents.items() if parent in pids} - pids
        pids |= children
        has_grown = bool(children)
    return sorted(pids - {os.getpid()})


def reap() -> None:
    """Reap orphans that have ended. Call it after the command's own `Popen` has taken the command's exit code."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def supervise(
    command: list[str], timeout: float, cleanup_timeout: float, stop_file: str | None = None
) -> dict[str, Any]:
    """Run ``command`` until it ends or must be ended; return the receipt."""
    receipt: dict[str, Any] = {"cleanup_confirmed": False, "return_code": None, "error": None, "timed_out": False}
    received_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: received_signals.append(received))
    if not adopt_orphans():
        receipt["error"] = "orphans cannot be adopted on this system"
        return receipt
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        receipt.update(cleanup_confirmed=True, error=f"{command[0]}: {error.strerror}")
        return receipt

    deadline = time.monotonic() + timeout
    while child.poll() is None and not received_signals and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if child.poll() is None:
        receipt["timed_out"] = not received_signals
        if stop_file is not None:
            Path(stop_file).touch()
        send(signal.SIGTERM, [child.pid])
        term_deadline = time.monotonic() + cleanup_timeout
        while child.poll() is None and time.monotonic() < term_deadline:
            time.sleep(POLL_S)

    # A process may start another before it is killed, so repeat until none is left.
    kill_deadline = time.monotonic() + cleanup_timeout
    remaining = descendants()
    while remaining and time.monotonic() < kill_deadline:
        send(signal.SIGKILL, remaining)
        child.poll()
        time.sleep(POLL_S)
        remaining = descendants()
    receipt["return_code"] = child.poll()
    reap()
    receipt["cleanup_confirmed"] = not remaining and receipt["return_code"] is not None
    if remaining:
        receipt["error"] = f"still running: {', '.join(map(str, remaining))}"
    return receipt


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs one command and leaves nothing of it behind.")
    parser.add_argument("--timeout", type=float, required=True, help="seconds that the command may take")
    parser.add_argument("--cleanup-timeout", type=float, default=DEFAULT_CLEANUP_TIMEOUT)
    parser.add_argument("--stop-file", help="made when the command is asked to end")
    parser.add_argument("--receipt", required=True, help="where to write how it went, as JSON")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    receipt = supervise(args.command, args.timeout, args.cleanup_timeout, args.stop_file)
    partial = Path(args.receipt + ".part")
    partial.write_text(json.dumps(receipt))
    partial.replace(args.receipt)
    if not receipt["cleanup_confirmed"]:
        return 1
    code = receipt["return_code"]
    return 127 if code is None else code if code >= 0 else _KILLED - code


if __name__ == "__main__":
    sys.exit(main())
