"""A broker in a process of its own, on a socket that outlives it, so that it can be killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gym.config.launch import LAUNCH_FD_ENV, ServerLaunch, write_launch
from nemo_gym.contract.credentials import CREDENTIAL_HEADER, Role, StackKeys

APP = Path(__file__).parents[1] / "app.py"
ROOT = Path(__file__).parents[3]
INSTANCE = "sandbox_broker"
START_PATIENCE_S = 60.0


class BrokerProcess:
    """One broker's state directory, socket and keys, and the process that serves them, if there is one.

    Args:
        provider: the block of the backend.
        settings: further keys of the server's block.
        program: what runs the server instead of ``app.py``.
        endpoints: base URLs of the model servers and environments of its run.
    """

    def __init__(
        self,
        state_dir: Path,
        provider: Mapping[str, Any],
        *,
        program: Sequence[str] = (str(APP),),
        env: Mapping[str, str] | None = None,
        endpoints: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.state_dir, self.program, self.env = state_dir, program, dict(env or {})
        self.keys = StackKeys.generate()
        self.listener = socket.socket()
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(1024)
        self.port = int(self.listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        block = {
            "entrypoint": "app.py",
            "host": "127.0.0.1",
            "port": self.port,
            "sandbox_provider": "broker_backend",
            **settings,
        }
        self.config = {
            "broker_backend": dict(provider),
            INSTANCE: {"resources_servers": {"sandbox": block}},
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.log = state_dir.parent / f"{state_dir.name}.log"

    def credential(self, name: str = "tests", role: Role = Role.OPERATOR) -> str:
        return self.keys.caller(role, name, INSTANCE)

    def caller(self, name: str = "tests", role: Role = Role.OPERATOR) -> dict[str, str]:
        """Headers of a caller of the stack."""
        return {CREDENTIAL_HEADER: self.credential(name, role)}

    def remote(self, name: str = "tests", role: Role = Role.OPERATOR) -> dict[str, Any]:
        """Configuration of a remote provider that calls this broker."""
        return {"remote": {"url": self.url, "token": self.credential(name, role)}}

    def start(self, *, wait: bool = True) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        launch = ServerLaunch(
            instance=INSTANCE,
            config=self.config,
            socket_fd=self.listener.fileno(),
            credentials=self.keys.for_server(INSTANCE, Role.OPERATOR, []),
            state_dir=str(self.state_dir),
            endpoints=self.endpoints,
        )
        descriptor = write_launch(launch)
        self.listener.set_inheritable(True)
        try:
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, *self.program],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT), LAUNCH_FD_ENV: str(descriptor), **self.env},
                    pass_fds=(descriptor, self.listener.fileno()),
                    stdout=log,
                    stderr=log,
                )
        finally:
            os.close(descriptor)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            assert self.process is not None
            assert self.process.poll() is None, f"the broker ended:\n{self.said()}"
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"the broker is not ready:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self.process is not None and self.process.poll() == -signal.SIGKILL

    def kill(self) -> None:
        """``kill -9``, and wait until it is dead."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def wait_dead(self, timeout_s: float = START_PATIENCE_S) -> None:
        assert self.process is not None
        self.process.wait(timeout_s)

    async def until_dead(self, timeout_s: float = START_PATIENCE_S) -> None:
        await asyncio.to_thread(self.wait_dead, timeout_s)

    def stop(self) -> None:
        """End it in order, as its supervisor would."""
        if self.runs:
            assert self.process is not None
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self.listener.close()
