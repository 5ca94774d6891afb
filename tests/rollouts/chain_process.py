"""Peers of `tests.rollouts.chain` as processes that can be killed and restarted."""

from __future__ import annotations

import multiprocessing
import os
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rollouts import chain

DEADLINE_S = 30.0
ROOT = Path(__file__).parents[2]
# Peers are forked from a process that has imported what they need: a stack starts in tenths of a second.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.rollouts.chain"])


def chain_stack(servers: Mapping[str, ChainServer]) -> dict[str, Any]:
    """The blocks of one environment, agent and model server, by role."""
    ports = {role: {"host": "127.0.0.1", "port": server.port} for role, server in servers.items()}
    references = {"resources_server": {"name": "env"}, "model_server": {"name": "policy"}}
    return {
        "env": {"resources_servers": {"chain": ports["environment"]}},
        "policy": {"responses_api_models": {"chain": ports["model"]}},
        "trivial": {"responses_api_agents": {"chain": {**ports["agent"], **references}}},
    }


class ChainServer:
    """One peer; its listening socket stays open here, so a restarted one has the same address."""

    def __init__(self, role: str, options: dict[str, Any]) -> None:
        self.role, self.options = role, options
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self.socket.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start the process without waiting until it answers."""
        self.process = FORKSERVER.Process(target=chain.serve, args=(self.role, self.socket, self.options), daemon=True)
        self.process.start()

    def wait_ready(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=DEADLINE_S) as reply:
            assert reply.status == 200

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self, **options: Any) -> None:
        self.options = {**self.options, **options}
        self.start()
        self.wait_ready()

    def stop(self) -> None:
        self.kill()
        self.socket.close()
