"""Two Ray nodes on loopback addresses of their own. Ray listens on every interface: use it in a network namespace only
(`campaigns.compat.isolated`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ADDRESSES = ("127.0.0.2", "127.0.0.3")
STORE_BYTES = 80 << 20
GONE_WITHIN_S = 120.0


def has_own_network() -> bool:
    """Whether loopback is the only network there is."""
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]} == {"lo"}


class Nodes:
    """A cluster of two nodes with one CPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        assert has_own_network(), "Ray listens on every interface; run this in a network namespace"
        self._cluster = Cluster()
        options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.nodes = [self._cluster.add_node(node_ip_address=address, **options) for address in ADDRESSES]
        self.address = str(self._cluster.address)

    def kill(self, number: int) -> None:
        """As a machine that loses its power: everything the node runs is gone at once, and nobody says so."""
        raylet = psutil.Process(self.nodes[number].all_processes["raylet"][0].process.pid)
        doomed = [raylet, *raylet.children(recursive=True)]
        for process in doomed:  # none of them gets to see that another is gone
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def stop(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.stop()


@contextlib.contextmanager
def running_head(address: str, port: int, variables: Mapping[str, str]) -> Iterator[None]:
    """A node that ``ray start`` runs, with environment variables of its own."""
    assert has_own_network(), "Ray listens on every interface; run this in a network namespace"
    options = ["--head", f"--node-ip-address={address}", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    code = "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", code, "start", *options, "--block"]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any("Ray runtime started" in line for line in process.stdout), "Ray did not start"
        yield
    finally:
        process.terminate()
        process.wait(GONE_WITHIN_S)


def until(condition: Any, what: str, within_s: float = GONE_WITHIN_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.1)
