"""Other gateways in front of the same engine, each in a separate environment that is made once.

So that configuration does not decide the comparison, each gets the defaults of its documentation, one worker process
like ours, and no optional feature. A peer that cannot be installed or started is reported with the reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from campaigns.bench.gateway_parts.conversations import Chat
from campaigns.bench.gateway_parts.doors import CHAT, ChatTalk, PlainDoor
from campaigns.bench.gateway_parts.processes import HERE, Running, child, wait_for
from campaigns.bench.gateway_parts.wire import Connection

# Pinned, and not the newest: attackers have taken over releases of this package before (1.82.7, 1.82.8 and 1.107.0).
LITELLM = ("litellm[proxy]==1.106.2",)
# verl without its training packages: the gateway needs only its tokenizer helpers and its start of uvicorn.
VERL = "verl==0.9.1"
VERL_NEEDS = (
    *("ray==2.60.0", "transformers==5.23.0", "jinja2==3.1.6", "fastapi==0.165.0"),
    *("uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0", "aiohttp==3.14.5", "orjson==3.13.0"),
)
UNI_AGENT_SOURCE = "UNI_AGENT_SOURCE"
INSTALL_S = 900.0
START_S = 90.0
KEY = "sk-bench"


class PeerMissingError(Exception):
    """A peer cannot be measured here; the message has the reason."""


def environments() -> Path:
    """Return the directory where peers are installed, which is kept between runs."""
    root = os.environ.get("NEMO_GYM_CACHE_DIR") or Path.home() / ".cache" / "nemo-gym"
    return Path(root) / "bench"


def _python(name: str, *installs: tuple[str, ...]) -> Path:
    """Return the interpreter of a virtual environment, made with one ``pip install`` per element of ``installs``."""
    folder = environments() / name
    python, done = folder / "bin" / "python", folder / "installed.json"
    expected = orjson.dumps(installs)
    if done.is_file() and done.read_bytes() == expected:
        return python
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands += [
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *args] for args in installs
    ]
    for command in commands:
        try:
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            tail = getattr(error, "stderr", None) or b""
            raise PeerMissingError(f"cannot be installed: {error}; {tail.decode(errors='replace')[-300:]}") from error
    done.write_bytes(expected)
    return python


@contextlib.contextmanager
def litellm(engine: str, folder: Path) -> Iterator[PlainDoor]:
    """Run the LiteLLM proxy in front of the engine's Chat Completions. Raises `PeerMissingError`."""
    python = _python("litellm", LITELLM)
    config = folder / "litellm.yaml"
    backend = {"model": "openai/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    config.write_bytes(orjson.dumps({"model_list": [{"model_name": "policy", "litellm_params": backend}]}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no look-up of prices on the internet
        "LITELLM_TELEMETRY": "False",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": KEY,
        "NO_PROXY": "*",
    }
    log = folder / "litellm.log"
    with child([*command, "--num_workers", "1"], environment=settings, log=log) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(url, "/health/liveliness", process, START_S)
        except RuntimeError as error:
            raise PeerMissingError(f"does not start: {error}; {log.read_text(errors='replace')[-300:]}") from error
        yield PlainDoor("litellm", url, Running(url, process.pid), headers=f"Authorization: Bearer {KEY}\r\n")


class UniAgentDoor:
    """uni-agent's gateway. It has no HTTP routes to open and end sessions, so `uni_agent_app` adds two."""

    name = "uni_agent"

    def __init__(self, server: Running) -> None:
        self.server, self.url = server, server.url
        self._opened = 0

    async def open(self, connection: Connection, number: int, **asked: Any) -> ChatTalk:
        self._opened += 1
        path = f"/sessions/s{self._opened}"
        (await connection.post(f"/bench{path}", b"{}")).json()
        return ChatTalk(connection, Chat(number, **asked), f"{path}{CHAT}", "", (f"/bench{path}/finalize", "", b"{}"))


@contextlib.contextmanager
def uni_agent(engine: str, policy: Path, folder: Path, source: str | None) -> Iterator[UniAgentDoor]:
    """Run uni-agent's gateway actor in a process without a Ray cluster. ``source``: a checkout of uni-agent. Raises
    `PeerMissingError`."""
    if source is None:
        raise PeerMissingError(f"no source: give --uni-agent or set {UNI_AGENT_SOURCE} to a checkout of it")
    if not Path(source, "uni_agent", "gateway").is_dir():
        raise PeerMissingError(f"{source} is no checkout of uni-agent")
    python = _python("uni-agent", ("--no-deps", VERL), VERL_NEEDS)
    log = folder / "uni_agent.log"
    address = folder / "uni_agent.url"
    command = [str(python), str(HERE / "uni_agent_app.py"), source, str(policy), engine, str(address)]
    with child(command, environment={"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}, log=log) as process:
        try:
            url = _read_address(address, process)
        except RuntimeError as error:
            raise PeerMissingError(f"does not start: {error}; {log.read_text(errors='replace')[-300:]}") from error
        yield UniAgentDoor(Running(url, process.pid))


def _read_address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if file.is_file() and (url := file.read_text()):
            return url
        time.sleep(0.1)
    raise RuntimeError(f"no address (exit status {process.poll()})")
