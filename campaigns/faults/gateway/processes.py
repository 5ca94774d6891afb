"""A gateway and its engines as separate processes, started as the suite starts them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nemo_gym.config.launch import LAUNCH_FD_ENV, ServerLaunch, write_launch
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys
from nemo_gym.stack.child import ENVIRONMENT_FD_ENV
from nemo_gym_testing.gateway.tiny.policies import make_policy

ROOT = Path(__file__).resolve().parents[3]
APP = ROOT / "responses_api_models" / "gateway" / "app.py"
NAME = "gateway"
START_TIMEOUT_S = 60.0
ENDPOINT = {"openai": {"model": "real", "logprobs": True}}
"""The settings that engines of a type need in addition to their URL."""


class EngineProcess:
    """A tiny engine that keeps its own log."""

    def __init__(self, policy: Path, log: Path, *options: str, wire: str = "vllm") -> None:
        self.log = log
        command = [sys.executable, "-m", "nemo_gym_testing.gateway.tiny", "--policy", str(policy)]
        command += ["--wire", wire, "--log", str(log), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"the engine did not start: exit status {self._process.wait()}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


class GatewayProcess:
    """One gateway instance. Its listening socket outlives it, as it does under the supervisor: callers that connect
    while it is down are answered by its successor."""

    def __init__(
        self, folder: Path, engines: list[str], policy: Path | None, *, wire: str = "vllm", **block: Any
    ) -> None:
        self.log_path = folder / "gateway.log"
        self.journal = folder / "journal"
        self.keys = StackKeys.generate()
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(4096)
        self.port = self._listener.getsockname()[1]
        server_config = {
            "entrypoint": "app.py",
            "host": "127.0.0.1",
            "port": self.port,
            "engines": [
                {"type": wire, "base_url": url, "name": f"e{number}", **ENDPOINT.get(wire, {})}
                for number, url in enumerate(engines)
            ],
            "policy": {"path": str(policy), "max_context_tokens": 32_768} if policy is not None else None,
            "journal_dir": str(self.journal),
            **block,
        }
        self._config = {NAME: {"responses_api_models": {"gateway": server_config}}}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def headers(self, role: Role = Role.PIPELINE) -> dict[str, str]:
        """Return headers with a credential of the stack."""
        return {CREDENTIAL_HEADER: self.keys.caller(role, "campaign", NAME)}

    def start(self) -> float:
        """Start the gateway and wait until it serves; return the seconds. Raises `RuntimeError` if it does not."""
        began = time.monotonic()
        reading, writing = os.pipe()
        launch = ServerLaunch(
            instance=NAME,
            config=self._config,
            socket_fd=self._listener.fileno(),
            credentials=self.keys.for_server(NAME, Role.MODEL, ()),
            ready_fd=writing,
            run_id="faults",
            parent_pid=os.getpid(),
        )
        environment_fd = os.memfd_create("environment")
        os.write(environment_fd, json.dumps({}).encode())
        os.lseek(environment_fd, 0, os.SEEK_SET)
        launch_fd = write_launch(launch)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nemo_gym.stack.child", str(APP), str(ROOT)],
                env={**os.environ, LAUNCH_FD_ENV: str(launch_fd), ENVIRONMENT_FD_ENV: str(environment_fd)},
                pass_fds=(launch_fd, environment_fd, self._listener.fileno(), writing),
                stdout=log,
                stderr=log,
                cwd=ROOT,
            )
        for fd in (launch_fd, environment_fd, writing):
            os.close(fd)
        try:
            line = _first_line(reading, began + START_TIMEOUT_S)
        finally:
            os.close(reading)
        if line != b"ready\n":
            self.kill()
            raise RuntimeError(f"the gateway did not start ({line!r}):\n{self.log_path.read_text()[-4000:]}")
        self.starts += 1
        return time.monotonic() - began

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """Stop the gateway as the supervisor does; return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(120)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self._listener.close()

    def memory_mib(self) -> float:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) / 1024


def policy_in(folder: Path, family: str = "chatml_think") -> Path:
    return make_policy(folder / "policy", family)


def _first_line(fd: int, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(fd, 4096) if ready else b""
        if not piece:
            break
        line += piece
    return line
