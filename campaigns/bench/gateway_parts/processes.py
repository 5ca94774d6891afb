"""Servers as processes: how to start them on a socket that already listens, and what they cost."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
STOP_S = 20.0


@dataclass(frozen=True)
class Running:
    """A server process."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far, to the nanosecond."""
        # The kernel's clock of another process: (~pid << 3) | CPUCLOCK_SCHED; see clock_getcpuclockid(3).
        return time.clock_gettime((~self.pid << 3) | 2)

    def waited_s(self) -> float:
        """Seconds so far in which its threads were ready to run but had no core: the cost of other processes."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks) / 1e9


@contextlib.contextmanager
def on_socket(script: str, *arguments: str) -> Iterator[Running]:
    """Run a script of this folder, with the descriptor of its listening socket as its first argument."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4096)
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, str(HERE / script), str(listener.fileno()), *arguments]
        with child(command, pass_fds=(listener.fileno(),)) as process:
            yield Running(url, process.pid)


@contextlib.contextmanager
def child(
    command: list[str],
    *,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block. ``log`` receives its output."""
    with contextlib.ExitStack() as held:
        output = held.enter_context(log.open("wb")) if log is not None else None
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            pass_fds=pass_fds,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, path: str, process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Wait until the server responds with 200. Raises `RuntimeError` if it ends, or takes too long."""
    import urllib.error
    import urllib.request

    end = time.monotonic() + deadline_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            if opener.open(f"{url}{path}", timeout=5).status == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"no answer from {path} (exit status {process.poll()})")
